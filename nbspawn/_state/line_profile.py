"""Where the time went: the samples of all ranks, added up by line, and in the order of time. Pure.

A sample counts to a line of the running cell. What the user's own functions do below that line, those of other cells
too, is kept and can be unfolded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Event, InputRequest, Printed, Sampled, Stopped
from nbspawn._state.run import Run
from nbspawn._state.timeline import Activity, Timeline


@dataclass
class Line:
    """Seconds by rank at one line, among them those in collectives, and those of waits for the device; ``below``: the
    same for the lines of the functions that it calls. ``frame`` is None for what is not in the user's code."""

    frame: Frame | None
    seconds: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)
    device: dict[int, float] = field(default_factory=dict)
    below: dict[Frame, Line] = field(default_factory=dict)

    def add(self, rank: int, position: Position, frames: tuple[Frame, ...], seconds: float) -> None:
        """Time at a position that is reached from here by ``frames``."""
        self.seconds[rank] = self.seconds.get(rank, 0.0) + seconds
        if position.collective:
            self.waiting[rank] = self.waiting.get(rank, 0.0) + seconds
        if position.device:
            self.device[rank] = self.device.get(rank, 0.0) + seconds
        if frames:
            self.below.setdefault(frames[0], Line(frames[0])).add(rank, position, frames[1:], seconds)


class Profile:
    """The profile of a ``run``, which may have just begun."""

    def __init__(self, run: Run) -> None:
        self._cell = run.cell
        self.totals: dict[int, float] = {}
        """Seconds by rank."""
        self.lines: dict[Frame | None, Line] = {}
        """None is what is not in the user's code."""
        self.timeline = Timeline(len(run.ranks), run.started)

    def add(self, events: Iterable[Event], now: float) -> None:
        """Count the samples among the events, which were received at ``now`` (CLOCK_MONOTONIC seconds)."""
        for event in events:
            if not 0 <= event.rank < len(self.timeline.bins):
                continue
            if isinstance(event, Sampled):
                self._count(event)
            elif isinstance(event, Printed):
                self.timeline.print(event.rank, now)
            elif isinstance(event, (InputRequest, Stopped)):
                self.timeline.ask(event.rank, now)

    def _count(self, event: Sampled) -> None:
        begin = event.time - sum(seconds for _, seconds in event.spent)
        for position, seconds in event.spent:
            self.totals[event.rank] = self.totals.get(event.rank, 0.0) + seconds
            frame, below = _split(position.frames, self._cell)
            self.lines.setdefault(frame, Line(frame)).add(event.rank, position, below, seconds)
            self.timeline.spend(event.rank, Activity(frame, position.collective, position.device), begin, seconds)
            begin += seconds


@functools.lru_cache(maxsize=1000)
def _split(frames: tuple[Frame, ...], cell: str | None) -> tuple[Frame | None, tuple[Frame, ...]]:
    """The line that a position counts to (the innermost of the cell, or of a function the outermost), as a frame that
    is the same for every function name, and what is below it."""
    if not frames:
        return None, ()
    index = max((number for number, frame in enumerate(frames) if frame.file == cell), default=0)
    return frames[index]._replace(name=""), frames[index + 1 :]


def unfold(line: Line, least: float) -> Iterator[tuple[int, Line]]:
    """What is below a line, with its depth (from 1), if any rank has spent ``least`` seconds there."""
    for frame in sorted(line.below, key=lambda frame: -max(line.below[frame].seconds.values())):
        lower = line.below[frame]
        if max(lower.seconds.values()) >= least:
            yield 1, lower
            for depth, lowest in unfold(lower, least):
                yield depth + 1, lowest
