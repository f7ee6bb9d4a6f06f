"""Where ranks stand, drawn: each stack once, with its lines of source and the ranks that have it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape

from nbspawn._protocol.frames import Frame, Stack, Threads, is_after_the_last_line
from nbspawn._render.html import BOX, FOLD, QUIET
from nbspawn._render.report import Report
from nbspawn._render.text import clip, duration
from nbspawn._state.run import Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.wording import name_ranks

_WIDTH = 110
_MOST_FRAMES = 24  # of one stack: the outermost and, above all, the innermost
_MOST_GROUPS = 12
_TOLD = 2.5  # seconds: ranks tell where they are every two, and may have made many short calls since
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3\.\d+/")

_PRE = "margin:0 0 6px 1em;font-family:var(--jp-code-font-family,monospace);line-height:1.3;white-space:pre-wrap"


def report(title: str, stacks: Mapping[int, Stack], snapshot: Snapshot, open_: bool = True) -> Report:
    """The stacks under ``title``; in HTML a fold, ``open_`` from the start or not."""
    return Report("\n".join([title, *text(stacks, snapshot)]), html(title, stacks, snapshot, open_))


def text(stacks: Mapping[int, Stack], snapshot: Snapshot) -> list[str]:
    """Lines; the other threads take one each."""
    lines = []
    for heading, stack, threads in _groups(stacks, snapshot):
        lines += [heading, *(f"  {line}" for line in _lines(stack.frames, snapshot))]
        lines += [f"  thread {name}{_in(frames, snapshot.run)}" for name, frames in threads]
    return lines


def html(title: str, stacks: Mapping[int, Stack], snapshot: Snapshot, open_: bool) -> str:
    """A fold, ``open_`` from the start or not; the other threads, with their whole stacks, are one in it. Reads without
    styles."""
    parts = [f'<details{" open" if open_ else ""}><summary style="{FOLD}"><b>{escape(title)}</b></summary>']
    for heading, stack, threads in _groups(stacks, snapshot):
        shown = "\n".join(_lines(stack.frames, snapshot))
        parts.append(f'<div>{escape(heading)}</div><pre style="{_PRE}">{escape(shown)}</pre>')
        if threads:
            whole = "\n".join(
                "\n".join([f"thread {name}", *(f"  {line}" for line in _lines(frames, snapshot))])
                for name, frames in threads
            )
            count = "1 other thread" if len(threads) == 1 else f"{len(threads)} other threads"
            parts.append(
                f'<details><summary style="{FOLD};color:{QUIET}">{count}</summary>'
                f'<pre style="{_PRE}">{escape(whole)}</pre></details>'
            )
    return f'<div style="{BOX};margin:2px 0 6px 0">{"".join(parts)}</details></div>'


def _groups(stacks: Mapping[int, Stack], snapshot: Snapshot) -> Iterator[tuple[str, Stack, Threads]]:
    """A heading, the stack, and the different other threads of its ranks."""
    run = snapshot.run
    alike: dict[tuple[bool, tuple[Frame, ...]], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        # On a full disk no stack can be written, and a rank that is stopped writes none: then where it was seen last.
        answered = bool(stack.frames)
        alike.setdefault((answered, stack.frames or run.ranks[rank].position.frames), []).append(rank)
    for index, ((answered, frames), ranks) in enumerate(alike.items()):
        if index == _MOST_GROUPS:
            left = len(alike) - index
            yield f"and {left} more stacks, of other ranks", Stack(), ()
            return
        threads = {thread: None for rank in ranks for thread in stacks[rank].threads}
        state = _state(ranks, snapshot, frames) if answered else _silent(frames, ranks, run)
        yield f"{name_ranks(ranks)}{state}", Stack(frames), tuple(threads)


def _silent(frames: tuple[Frame, ...], ranks: list[int], run: Run) -> str:
    if frames:
        return ", without an answer, seen last:"
    states = {run.ranks[rank].state for rank in ranks}
    return ": starting" if states == {"starting"} else ": not in the cell's code, or stopped by the system"


def _state(ranks: list[int], snapshot: Snapshot, frames: tuple[Frame, ...]) -> str:
    every = [snapshot.run.ranks[rank] for rank in ranks]
    # Where it was seen last it need not be any more: what has gone on into a call that holds Python's lock is not seen.
    if is_after_the_last_line(frames):
        return " after the last line, waiting for its GPU:"
    waiting = [rank for rank in every if rank.state == "waiting" and _is_at(rank.position.frames, frames)]
    if not waiting:
        return ":"
    longest, position = max(snapshot.now - rank.called for rank in waiting), waiting[0].position
    what = "for its GPU" if position.device else f"in {position.call}"
    if longest >= _TOLD:
        return f", waiting {duration(longest)} {what}:"
    return f", waiting {what}:" if any(frame.name == position.call for frame in frames) else ":"


def _is_at(position: tuple[Frame, ...], frames: tuple[Frame, ...]) -> bool:
    """Are ``frames`` a stack through this position? Not by names: IPython's is '<cell line: 3>', faulthandler's may be
    '<module>'."""
    if not position:
        return False
    at = position[-1]
    files = at.file, at.file.encode("ascii", "backslashreplace").decode()  # as py-spy and faulthandler write it
    return any(frame.line == at.line and frame.file in files for frame in frames)


def _lines(frames: tuple[Frame, ...], snapshot: Snapshot) -> Iterator[str]:
    """The frames as lines of a traceback: the place, then the line's text."""
    left_out = len(frames) - _MOST_FRAMES
    for index, frame in enumerate(frames):
        if 0 < left_out and 4 <= index < 4 + left_out:
            if index == 4:
                yield f"... {left_out} more calls"
            continue
        if not frame.line:
            yield clip(f"native: {frame.name} ({frame.file})", _WIDTH)
            continue
        yield clip(_place(frame, snapshot.run), _WIDTH)
        if line := snapshot.text(frame):
            yield clip(f"    {line}", _WIDTH)


def _place(frame: Frame, run: Run) -> str:
    name = run.names.get(frame.file) or _INSTALLED.sub("", frame.file)
    return f"{name}, line {frame.line}" + ("" if frame.name.startswith("<") else f", in {frame.name}")


def _in(frames: tuple[Frame, ...], run: Run) -> str:
    return f": {_place(frames[-1], run)}" if frames else ""
