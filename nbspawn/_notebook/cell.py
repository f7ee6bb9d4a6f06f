"""Makes a job of the text below ``%%spawn``: IPython's name for the cell, its line numbers, the variables it uses."""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.alias import default_aliases

from nbspawn._carried import magics
from nbspawn._engine.jobs import CellJob
from nbspawn._notebook import hints
from nbspawn._payload import annotated, mentioned
from nbspawn._payload.names import FUTURES, Names, check, ends_silent, names_used
from nbspawn._protocol.messages import RunCell
from nbspawn._rank.shell import displays
from nbspawn._render.lines import strip_ansi
from nbspawn.errors import RankExitedError, RankRaisedError, RankTraceback, SpawnError

if TYPE_CHECKING:
    from nbspawn._session.pool import Pool

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
    own_magics, perhaps = magics.used(shell, source, transformed)
    if push is not None:
        return CellJob(command, shell.user_ns, names.required, names.optional | perhaps, own_magics)
    hidden = shell.user_ns_hidden  # what startup files have defined, too
    own = {name for name in _SHELLS & hidden.keys() if shell.user_ns.get(name) is hidden[name]}
    optional = names.optional.union(
        mentioned.sent_along(names.mentioned, shell.user_ns),
        annotated.sent_along(names.annotated, shell.user_ns),
        perhaps,
    )
    return CellJob(command, shell.user_ns, names.required - own, optional - own, own_magics)


def explain(
    shell: Any, error: BaseException, pool: Pool, kept: bool, on_memory: Callable[[list[str]], Iterable[str]]
) -> None:
    """Add to the error of a run what the user can do, below its first line. ``kept``: the ``pool``'s ranks are kept;
    ``on_memory`` gives advice on errors for want of memory."""
    if isinstance(error, (RankRaisedError, RankExitedError)):
        found = hints.of(hints.Situation(error, shell, kept, pool.options.backend, pool.regrouped))
        memory = on_memory([error.summary, *(other.summary for other in error.others)])
        error.lines = (error.lines[0], *found, *memory, *error.lines[1:])
        error.args = (error.summary,)  # the cell shows the traceback; this is the front end's one-line summary
        # For handlers of errors that do not ask _render_traceback_ (rich's).
        error.__cause__ = RankTraceback(strip_ansi("\n".join(error.lines[1:])))


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
    """The aliases that a rank's shell does not have by itself, where a name may mean another command."""
    own = dict(default_aliases())
    return {name: command for name, command in shell.alias_manager.aliases if own.get(name) != command}


def _syntax_error(shell: Any, error: SyntaxError) -> SpawnError:
    """An error with the name of ``error``'s class, but no SyntaxError: for one IPython would show nbspawn's frames."""
    shown = type(type(error).__name__, (SpawnError,), {})(str(error))
    shown.lines = tuple(shell.SyntaxTB.structured_traceback(type(error), error, []))
    return shown
