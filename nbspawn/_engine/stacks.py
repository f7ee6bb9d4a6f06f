"""Where ranks stand: asks them for their stacks, and reads the files that they write (_rank/stacks.py)."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbspawn._engine import native, signals
from nbspawn._protocol.frames import Frame, Stack, Threads, users_frames
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.signals import STACK
from nbspawn._state.wording import name_ranks

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_BEGIN = "(most recent call first):"
_TICK = 0.002  # seconds
_STEADY = 0.01  # seconds without a new line: the stack is whole
_ANSWER = 0.2  # seconds; it takes a rank a millisecond of a processor, also in native code
_ANSWER_A_RANK = 0.01  # seconds
_THREADS_ANSWER = 0.8  # seconds: the sampler writes them twice a second


class Stacks:
    """Of the ranks that run one command; ``cell`` is the file name of the cell that they run, if they run one."""

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

    def look(self, pids: Mapping[int, int], deep: bool) -> dict[int, Stack]:
        """The stacks of these ranks as they are now, within 0.2 s (64 ranks: 1 s); an empty one of a rank that does not
        answer.

        ``deep`` also reads the stacks of other threads (another 0.8 s if a rank holds Python's lock) and, where py-spy
        is installed, the frames of native code, in one rank of those that stand at the same place.
        """
        before = self._send(pids)
        sizes = self._answered(before)
        found = {rank: Stack(_read(self._files.stack(rank), before[rank])) for rank in sorted(pids)}
        if deep:
            threads = self._threads_of(sizes)
            found = native.added({rank: replace(one, threads=threads[rank]) for rank, one in found.items()}, pids)
        return found

    def _answered(self, before: Mapping[int, int]) -> dict[int, int]:
        """Wait until the files have grown and grow no more: faulthandler writes line by line, and no end."""
        sizes, since = dict(before), time.monotonic()
        end = since + _ANSWER + _ANSWER_A_RANK * len(before)
        while time.monotonic() < end:
            now = {rank: _size(self._files.stack(rank)) for rank in before}
            if now != sizes:
                sizes, since = now, time.monotonic()
            elif time.monotonic() - since >= _STEADY and all(now[rank] > before[rank] for rank in before):
                break
            time.sleep(_TICK)
        return sizes

    def stood(self, besides: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
        """Where the ranks stood that were asked last, but for ``besides``."""
        found = {rank: _read(self._files.stack(rank), self._asked[rank]) for rank in self._asked.keys() - set(besides)}
        return {rank: frames for rank, frames in found.items() if frames}

    def _threads_of(self, sizes: Mapping[int, int]) -> dict[int, Threads]:
        """What the ranks' other threads do, as they report once their stacks have these sizes; nothing of one that
        does not."""
        found: dict[int, Threads] = {}
        end = time.monotonic() + _THREADS_ANSWER
        while len(found) < len(sizes) and time.monotonic() < end:
            for rank in sizes.keys() - found.keys():
                if (answer := self._answer(rank))["size"] == sizes[rank]:
                    found[rank] = tuple(
                        (name, tuple(Frame(*one) for one in stack)) for name, stack in answer["threads"]
                    )
            time.sleep(_TICK)
        return {rank: found.get(rank, ()) for rank in sizes}

    def _answer(self, rank: int) -> dict[str, Any]:
        try:
            return dict(json.loads(self._files.threads(rank).read_text()))
        except OSError:  # deleted, or this process has no descriptor left
            return {"size": -1}


def sentences(
    stood: Mapping[int, tuple[Frame, ...]], cell: str | None, names: Mapping[str, str], ending: str
) -> list[str]:
    """'Ranks 0 and 3 were at line 12, in wait.', of ranks that ran this ``cell`` (None: a function). ``names`` are
    IPython's for the notebook's cells, by file name."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(stood):
        groups.setdefault(_place(stood[rank], cell, names), []).append(rank)
    found = []
    for place, ranks in groups.items():
        verb = "was" if len(ranks) == 1 else "were"
        found.append(f"{name_ranks(ranks)} {verb} {place}{f' and {verb} {ending}' if ending else ''}.")
    return found


def _place(frames: tuple[Frame, ...], cell: str | None, names: Mapping[str, str]) -> str:
    innermost = frames[-1]
    if cell is None:
        return described(innermost._replace(file=names.get(innermost.file, innermost.file)))
    in_cell = [frame for frame in frames if frame.file == cell]
    if not in_cell:
        return "not in the cell's code"
    return f"at line {in_cell[-1].line}" + ("" if innermost.name.startswith("<") else f", in {innermost.name}")


def described(frame: Frame) -> str:
    """'in sleep (test.py, line 3)'."""
    return f"in {frame.name} ({Path(frame.file).name}, line {frame.line})"


def frames(text: str) -> tuple[Frame, ...]:
    """The first stack in what faulthandler wrote, outermost frame first, from the user's outermost on."""
    found = _FRAME.finditer("".join(text.split(_BEGIN, 2)[1:2]))
    return users_frames(Frame(match["file"], int(match["line"]), match["name"]) for match in found)


def crash(path: Path) -> str:
    """The stack of a rank that crashed, as faulthandler wrote it, without the frames that are not the user's."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:  # deleted, or this process has no descriptor left
        return ""
    lines = text.partition("\n\nExtension modules:")[0].splitlines()
    ours = [number for number, line in enumerate(lines) if any(part in line for part in _NOT_THE_USERS)]
    return "\n".join(lines[: ours[0]] if ours else lines)


_NOT_THE_USERS = (f"{os.sep}IPython{os.sep}core{os.sep}interactiveshell.py", f"{os.sep}nbspawn{os.sep}_rank{os.sep}")


def _read(path: Path, start: int) -> tuple[Frame, ...]:
    try:
        return frames(path.read_bytes()[start:].decode("utf-8", "replace"))
    except OSError:  # deleted, or this process has no descriptor left
        return ()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted, or this process has no descriptor left
        return 0
