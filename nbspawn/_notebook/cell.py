"""From the text under ``%%spawn`` to a job: IPython's name for the cell, its line numbers, the variables it uses."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from nbspawn._engine.jobs import CellJob
from nbspawn._payload.names import Names, check, ends_silent, names_used
from nbspawn._protocol.messages import RunCell
from nbspawn._rank.shell import displays
from nbspawn.errors import RankExitedError, RankRaisedError, SpawnError

_OLD_GROUP = "is not initialized in the world group map"
"""What torch says of a process group that it no longer knows."""
_MAKE_AGAIN = (
    "The process group was made anew after an error. What was built on the old one must be made again: device meshes, "
    "FSDP models, subgroups."
)
_EARLIER = re.compile(r"_+|_\d+|_i+|_i\d+")


def job(
    shell: Any,
    line: str,
    body: str,
    magic: str = "%%spawn",
    push: Sequence[str] | None = None,
) -> CellJob:
    """Raises the cell's SyntaxError, shown as any cell's would be. ``magic`` and ``line`` are its first line ('' if it
    has none). ``push`` are the variables to send, if that is not for the cell's text to say."""
    displays()  # a forked rank finds them made, and their module imported, which would cost each of them 10 ms
    filename = _cell_name(shell)
    source = _with_line_numbers(magic, line, body)
    transform = functools.cache(shell.transform_cell)
    try:
        transformed = transform(source)
        if push is None:
            names = names_used(source, filename, transform)
        else:
            check(transformed, filename)
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
    )
    if push is not None:
        return CellJob(command, shell.user_ns, *names)
    # Names of the shell's own (exit, In, ...) as long as the person has not rebound them: each rank has its own.
    # Not the values of earlier cells (`_`, `_5`), which IPython hides in the same way.
    hidden = {name: value for name, value in shell.user_ns_hidden.items() if not _EARLIER.fullmatch(name)}
    own = {name for name, value in hidden.items() if shell.user_ns.get(name) is value}
    return CellJob(command, shell.user_ns, names.required - own, names.optional - own)


def explain(shell: Any, error: BaseException, kept: bool, regrouped: bool) -> None:
    """Have the one error of ``kept`` ranks or others say what to do; ``regrouped``: an earlier command's error made the
    ranks make their process group anew."""
    if isinstance(error, (RankRaisedError, RankExitedError)):
        error.lines += tuple(_advice(shell, error.summary, kept))
        if regrouped and any(_OLD_GROUP in line for line in error.lines):
            error.lines += (_MAKE_AGAIN,)
        error.args = (error.summary,)  # the cell shows the traceback by itself; this is the front end's one line


def _advice(shell: Any, summary: str, kept: bool) -> list[str]:
    """What to do about a NameError for a variable that the notebook has: the cell's text does not name it (``eval``,
    ``%run``), so it was not sent; to ``kept`` ranks none is sent by itself."""
    missing = re.search(r"NameError: name '(\w+)' is not defined", summary)
    if missing is None or missing[1] not in shell.user_ns:
        return []
    name = missing[1]
    if kept:
        return [f"The notebook has {name}, the ranks have not: %%ranks --push {name} sends it."]
    return [f"The notebook has {name}, but the cell does not name it, so it was not sent: name it, or use -m fork."]


def debugged_already(shell: Any) -> None:
    """Under ``%pdb on`` IPython would open its debugger for the error of this cell too, in the kernel, where there is
    nothing to see: the person has just looked at the rank."""
    shell.call_pdb = False

    def again(*_: object) -> None:
        shell.call_pdb = True
        shell.events.unregister("post_run_cell", again)

    shell.events.register("post_run_cell", again)


def _with_line_numbers(magic: str, line: str, body: str) -> str:
    """The magic's line stays as a comment, so that line 5 of a traceback is line 5 of the cell. A cell magic inside has
    to come first."""
    if not magic or body.lstrip().startswith("%%"):
        return body
    return f"# {magic} {line}\n{textwrap.dedent(body)}"


def _cell_name(shell: Any) -> str:
    """The file name under which IPython has compiled the cell that is running."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename if frame is not None else "<nbspawn cell>"


def _numbers(shell: Any) -> dict[str, int]:
    """File name -> execution count; IPython 7 does not keep it."""
    return getattr(shell.compile, "_filename_map", {})


def _sources(shell: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The notebook's other cells, as tracebacks in the ranks will look for them."""
    numbers = _numbers(shell)
    cached = getattr(linecache, "_ipython_cache", {}) or {name: linecache.cache.get(name) for name in numbers}
    return {name: (numbers.get(name, 0), tuple(entry[2])) for name, entry in cached.items() if entry is not None}


def _syntax_error(shell: Any, error: SyntaxError) -> SpawnError:
    """Named as what it is, but no subclass: IPython would show our own frames for one."""
    shown = type(type(error).__name__, (SpawnError,), {})(str(error))
    shown.lines = tuple(shell.SyntaxTB.structured_traceback(type(error), error, []))
    return shown
