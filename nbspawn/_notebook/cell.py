"""Makes a job of the text below ``%%spawn``: IPython's name for the cell, its line numbers, the variables it uses."""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from IPython.core.alias import default_aliases

from nbspawn._engine.jobs import CellJob
from nbspawn._notebook import front_end
from nbspawn._payload import annotated, mentioned
from nbspawn._payload.names import FUTURES, Names, check, ends_silent, names_used
from nbspawn._protocol.messages import RunCell
from nbspawn._rank import magics
from nbspawn._rank.shell import displays
from nbspawn._render.lines import strip_ansi
from nbspawn.errors import RankExitedError, RankRaisedError, RankTraceback, SpawnError

_OLD_GROUP = re.compile("is not initialized in the world group map|is not registered, please create group")
"""torch's messages about a process group that no longer exists."""
_MAKE_AGAIN = (
    "The process group was created again after an error. What was built on the old one must be created again, too: "
    "device meshes, FSDP models, subgroups, sharded optimizers."
)
_MISSING = re.compile(r"(?:NameError|UndefinedVariableError): (?:name|local variable) '(\w+)' is not defined")
_BROKEN_GPU = re.compile(r"CUDA error: (device-side assert|an illegal|unspecified launch failure|misaligned address)")
"""An error after which the process cannot use its GPU any more."""
_INDENT = re.compile(r"(?:[ \t]*\n)*([ \t]+)\S")
"""Of the first line with text, which IPython takes away from all lines of a cell."""
_SHELLS = {"In", "Out", "get_ipython", "exit", "quit", "open", "_ih", "_oh", "_dh", "_exit_code"}
"""Variables that IPython has set: each rank has its own."""


def job(
    shell: Any,
    line: str,
    body: str,
    magic: str = "%%spawn",
    push: Sequence[str] | None = None,
) -> CellJob:
    """The cell as a job. ``magic`` and ``line`` are its first line ('' if it has none). ``push`` are the variables to
    send; None: those that the cell's text uses. Raises the cell's SyntaxError, shown like any cell's."""
    displays()  # a forked rank inherits the instances and their module, whose import would take 10 ms in each rank
    filename = _cell_name(shell)
    source = _with_line_numbers(magic, line, body)
    transform = functools.cache(shell.transform_cell)
    flags = shell.compile.flags & FUTURES
    try:
        transformed = transform(source)
        if push is None:
            names = names_used(source, filename, transform, flags)
        else:
            check(transformed, filename, flags)
            names = Names(frozenset(push), frozenset())
    except SyntaxError as error:
        raise _syntax_error(shell, error) from None
    command = RunCell(
        source=source,
        first_line=magic and f"{magic} {line}".rstrip() + "\n",
        filename=filename,
        number=_numbers(shell).get(filename, shell.execution_count),
        sources=_sources(shell),
        colors=shell.colors,
        silent=ends_silent(source, transform),
        transformed=transformed,
        aliases=_aliases(shell),
        directories=tuple(map(str, shell.history_manager.dir_hist)),
        flags=flags,
    )
    notes = tuple(_ignored_breakpoints(shell, filename))
    own_magics, perhaps = magics.used(shell, source, transformed)
    if push is not None:
        return CellJob(command, shell.user_ns, names.required, names.optional | perhaps, notes, own_magics)
    hidden = shell.user_ns_hidden  # what startup files have defined, too
    own = {name for name in _SHELLS & hidden.keys() if shell.user_ns.get(name) is hidden[name]}
    optional = names.optional.union(
        mentioned.sent_along(names.mentioned, shell.user_ns),
        annotated.sent_along(names.annotated, shell.user_ns),
        perhaps,
    )
    return CellJob(command, shell.user_ns, names.required - own, optional - own, notes, own_magics)


def _ignored_breakpoints(shell: Any, filename: str) -> Iterator[str]:
    """Of the front end's debugger, which is in the kernel."""
    debugger = front_end.debugger(shell)
    if not getattr(debugger, "is_started", False):
        return
    if lines := ", ".join(str(one.get("line")) for one in debugger.breakpoint_list.get(filename, ())):
        yield (
            f"The notebook's debugger does not stop ranks: its breakpoints in this cell (line {lines}) are ignored. "
            "breakpoint() in the code stops them, and so does `%ranks debug`."
        )


def explain(
    shell: Any, error: BaseException, kept: bool, regrouped: bool, on_memory: Callable[[list[str]], Iterable[str]]
) -> None:
    """Add to the error of a run what the user can do. ``kept``: of kept ranks; ``regrouped``: their process group was
    created again after the error of an earlier command; ``on_memory`` gives advice on errors for want of memory."""
    if isinstance(error, (RankRaisedError, RankExitedError)):
        error.lines += tuple(_advice(shell, error, kept))
        error.lines += tuple(magics.advice(shell, error.summary))
        error.lines += tuple(on_memory([error.summary, *(other.summary for other in error.others)]))
        if regrouped and any(map(_OLD_GROUP.search, error.lines)):
            error.lines += (_MAKE_AGAIN,)
        error.args = (error.summary,)  # the cell shows the traceback; this is the front end's one-line summary
        # For handlers of errors that do not ask _render_traceback_ (rich's).
        error.__cause__ = RankTraceback(strip_ansi("\n".join(error.lines[1:])))


def _advice(shell: Any, error: RankRaisedError | RankExitedError, kept: bool) -> list[str]:
    """What to do about an error that breaks a kept rank's GPU, and about a NameError for a variable that exists in the
    notebook. The cell's text does not name it (``eval``, ``%run``), so it was not sent; ``kept`` ranks get variables
    only by ``--push``."""
    if kept and _BROKEN_GPU.search(error.summary):
        return [
            "What this rank does on its GPU fails from now on: %ranks restart starts the ranks again, without their "
            "variables."
        ]
    missing = _MISSING.search(error.summary)
    if missing is None and any("globals()" in strip_ansi(line) for line in error.lines):
        missing = re.search(r"KeyError: '(\w+)'", error.summary)
    if missing is None or missing[1] not in shell.user_ns:
        return []
    name = missing[1]
    if kept:
        return [f"{name} exists in the notebook, but not in the ranks: %%ranks --push {name} sends it."]
    or_fork = "" if error.host else ", or use -m fork"
    return [f"{name} was not sent, because the cell's code does not name it, or in a string only: name it{or_fork}."]


def debugged_already(shell: Any) -> None:
    """Have IPython not open its debugger for the error of this cell. Under ``%pdb on`` it would do so in the kernel,
    which has none of the rank's frames: the user has just debugged the rank."""
    shell.call_pdb = False

    def again(*_: object) -> None:
        shell.call_pdb = True
        shell.events.unregister("post_run_cell", again)

    shell.events.register("post_run_cell", again)


def _with_line_numbers(magic: str, line: str, body: str) -> str:
    """The cell with the magic's line as a comment: line 5 of a traceback is then line 5 of the cell. A cell magic in
    the body has to come first, so then there is no comment."""
    if not magic or body.lstrip().startswith("%%"):
        return body
    indented = _INDENT.match(body)
    return f"# {magic} {line}\n{re.sub('^' + indented[1], '', body, flags=re.MULTILINE) if indented else body}"


def _cell_name(shell: Any) -> str:
    """The file name under which IPython has compiled the cell that is running."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename if frame is not None else "<nbspawn cell>"


def _numbers(shell: Any) -> dict[str, int]:
    """File name -> execution count; empty under IPython 7, which does not store it."""
    return getattr(shell.compile, "_filename_map", {})


def _sources(shell: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The sources of the notebook's cells, for tracebacks in the ranks."""
    numbers = _numbers(shell)
    cached = getattr(linecache, "_ipython_cache", {}) or {name: linecache.cache.get(name) for name in numbers}
    return {name: (numbers.get(name, 0), tuple(entry[2])) for name, entry in cached.items() if entry is not None}


def _aliases(shell: Any) -> dict[str, str]:
    """Those that a rank's shell does not have by itself: a name may mean another command there."""
    own = dict(default_aliases())
    return {name: command for name, command in shell.alias_manager.aliases if own.get(name) != command}


def _syntax_error(shell: Any, error: SyntaxError) -> SpawnError:
    """An error with the name of ``error``'s class, but no SyntaxError: for one IPython would show nbspawn's frames."""
    shown = type(type(error).__name__, (SpawnError,), {})(str(error))
    shown.lines = tuple(shell.SyntaxTB.structured_traceback(type(error), error, []))
    return shown
