"""Where ranks stand: asks them for their stacks, and reads the files that they write (_rank/report/stacks.py)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from nbspawn._engine.run import native_stacks, signals
from nbspawn._protocol import plain
from nbspawn._protocol.frames import (
    Frame,
    Stack,
    Threads,
    ThreadsAt,
    described,
    is_after_the_last_line,
    is_own,
    is_runner,
    users_frames,
    written_frames,
)
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.plain import NotPlainError
from nbspawn._protocol.signals import STACK
from nbspawn._state.wording import name_ranks

_CUT = "\n  ...\n"
_TICK = 0.002  # seconds
_ANSWER = 1.0  # seconds; it takes a rank a millisecond of a processor, also in native code, once it gets one
_ANSWER_A_RANK = 0.01  # seconds
_PROCESSOR = 5.0  # seconds that a rank is waited for which wants a processor
_MOMENT = 0.1  # seconds for which it may want none: its threads take turns
_THREADS_ANSWER = 0.8  # seconds: the sampler writes them twice a second


class Stacks:
    """The stacks of the ranks that run one command; ``cell`` is the file name of the cell that they run, if they run
    one."""

    def __init__(self, files: RunFiles, cell: str | None) -> None:
        self._files = files
        self.cell = cell
        self._asked: dict[int, int] = {}

    def ask(self, pids: Mapping[int, int]) -> None:
        """Have these ranks write their stacks, for ``sentences``; returns at once, works from inside native code."""
        self._asked = self._send(pids)

    def _send(self, pids: Mapping[int, int]) -> dict[int, int]:
        """The sizes of their files before."""
        sizes = {rank: _size(self._files.stack(rank)) for rank in pids}
        for pid in pids.values():
            signals.send_to_main_thread(pid, STACK)
        return sizes

    def look(self, pids: Mapping[int, int], deep: bool, native: Collection[int] = ()) -> dict[int, Stack]:
        """The stacks of these ranks as they are now: at once if all answer, and within 1 s (64 ranks: 1.6 s; 5 s if it
        wants a processor) if one does not, whose stack is then empty.

        ``deep`` also reads the stacks of other threads (another 0.8 s if a rank holds Python's lock). Of the ranks in
        ``native``, one of those that stand at the same place is halted for up to a second, for the frames of its native
        code, where py-spy is installed.
        """
        before = self._send(pids)
        self._wait(before, pids)
        found = {rank: Stack(_read(self._files.stack(rank), before[rank])) for rank in sorted(pids)}
        if deep:
            threads = self._threads_of(before)
            found = {rank: replace(one, threads=threads[rank]) for rank, one in found.items()}
        return found | native_stacks.added({rank: found[rank] for rank in native if rank in found}, pids)

    def _wait(self, before: Mapping[int, int], pids: Mapping[int, int]) -> None:
        """Wait until these files, which had these sizes, have whole stacks: faulthandler writes line by line, and a
        rank on a loaded machine pauses at any of them."""
        unfinished = set(before)
        begin = now = time.monotonic()
        end = begin + _ANSWER + _ANSWER_A_RANK * len(before)
        while unfinished and now < end:
            unfinished -= {rank for rank in unfinished if is_whole(_text(self._files.stack(rank), before[rank]))}
            if end - now < _MOMENT and any(_wants_a_processor(pids[rank]) for rank in unfinished):
                end = max(end, min(now + _MOMENT, begin + _PROCESSOR))
            time.sleep(_TICK)
            now = time.monotonic()

    def stood(self, besides: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
        """Where the ranks stood that were asked last, but for ``besides``."""
        found = {rank: _read(self._files.stack(rank), self._asked[rank]) for rank in self._asked.keys() - set(besides)}
        return {rank: frames for rank, frames in found.items() if frames}

    def _threads_of(self, before: Mapping[int, int]) -> dict[int, Threads]:
        """What the ranks' other threads do, as they report once their stacks have grown from these sizes; nothing of
        one that does not."""
        found: dict[int, Threads] = {}
        end = time.monotonic() + _THREADS_ANSWER
        while len(found) < len(before) and time.monotonic() < end:
            for rank in before.keys() - found.keys():
                size, threads = self._answer(rank)
                if size > before[rank]:
                    found[rank] = threads
            time.sleep(_TICK)
        return {rank: found.get(rank, ()) for rank in before}

    def _answer(self, rank: int) -> ThreadsAt:
        try:
            return plain.loaded(ThreadsAt, self._files.threads(rank).read_bytes())  # type: ignore[no-any-return]
        except (OSError, NotPlainError):  # deleted, or this process has no descriptor left; the rank's code wrote it
            return -1, ()


def _wants_a_processor(pid: int) -> bool:
    """Does it run, or would it if it were let?"""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"R")
    except OSError:  # another system, or it has ended
        return False


def sentences(
    stood: Mapping[int, tuple[Frame, ...]], cell: str | None, names: Mapping[str, str], ending: str
) -> list[str]:
    """'Ranks 0 and 3 were at line 12, in wait, and were stopped.', of ranks that ran this ``cell`` (None: a function).
    ``names`` are IPython's for the notebook's cells, by file name."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(stood):
        groups.setdefault(_place(stood[rank], cell, names), []).append(rank)
    found = []
    for place, ranks in groups.items():
        verb = "was" if len(ranks) == 1 else "were"
        end = f"{',' * (', ' in place)} and {verb} {ending}" if ending else ""
        found.append(f"{name_ranks(ranks)} {verb} {place}{end}.")
    return found


def _place(frames: tuple[Frame, ...], cell: str | None, names: Mapping[str, str]) -> str:
    if is_after_the_last_line(frames):
        return "after the last line, waiting for its GPU"
    innermost = frames[-1]
    if cell is None:
        return described(innermost._replace(file=names.get(innermost.file, innermost.file)))
    in_cell = [frame for frame in frames if frame.file == cell]
    if not in_cell:
        return "not in the cell's code"
    public = (frame.name for frame in reversed(frames) if not (frame.name.startswith("_") or is_own(frame)))
    name = next(public, innermost.name)
    return f"at line {in_cell[-1].line}" + ("" if name.startswith("<") else f", in {name}")


def is_whole(text: str) -> bool:
    """Does what faulthandler has written so far contain the user's part of the stack? It writes no end, but a rank's
    stack goes on in nbspawn's code, or is cut where it is too deep."""
    written = text[: text.rfind("\n") + 1]
    return written.endswith(_CUT) or any(map(is_runner, written_frames(written)))


def crash(path: Path, cell: str | None) -> tuple[str, int | None]:
    """The stack of a rank that crashed, as a traceback, and its innermost line in this cell, where faulthandler has
    found any."""
    text = _text(path, 0)
    if not (stack := [frame for frame in users_frames(written_frames(text)) if not is_own(frame)]):
        return "", None
    shown = traceback.format_list([(*frame[:2], frame.name, None) for frame in stack])
    lines = [frame.line for frame in stack if frame.file == cell]
    reason = text.partition("\n\n")[0]  # 'Fatal Python error: Segmentation fault'
    return f"{reason}\nTraceback (most recent call last):\n{''.join(shown)}", lines[-1] if lines else None


def _read(path: Path, start: int) -> tuple[Frame, ...]:
    return users_frames(written_frames(_text(path, start)))


def _text(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode("utf-8", "replace")
    except OSError:  # deleted, or this process has no descriptor left
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted, or this process has no descriptor left
        return 0
