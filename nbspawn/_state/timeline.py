"""What each rank did when: its time in bins of equal width, whose number is bounded however long a run lasts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nbspawn._protocol.frames import Frame

_NARROWEST = 0.1  # seconds: ranks are not looked at more often
_BINS = 120  # of a rank, at most: more cannot be told apart in a picture
_FEWEST = 8
_OF_ALL = 8192  # bins of all ranks together, unless that leaves each too few
_KINDS = 6  # activities of a bin, at most
_ROUNDING = 1e-9  # seconds: the ends of a bin are not exact


class Activity(NamedTuple):
    """What a rank does: at the line of ``frame`` (None: outside of the user's code, or several lines that took little
    time), it computes, or is ``waiting`` for other ranks, or for its ``device``."""

    frame: Frame | None
    waiting: bool
    device: bool = False


@dataclass
class Bin:
    """``seconds`` by activity. ``printed``: the rank has printed meanwhile; ``asked``: it has asked the user, by
    ``input`` or a debugger's prompt."""

    seconds: dict[Activity, float] = field(default_factory=dict)
    printed: bool = False
    asked: bool = False

    def add(self, activity: Activity, seconds: float) -> None:
        """Add time; of too many activities the others that took least become one."""
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds
        while len(self.seconds) > _KINDS:
            others = [one for one in self.seconds if one.frame is not None and one != activity]
            least = min(others, key=lambda one: self.seconds[one])
            rest = least._replace(frame=None)
            self.seconds[rest] = self.seconds.get(rest, 0.0) + self.seconds.pop(least)

    def merge(self, other: Bin) -> None:
        """Add all of another bin."""
        for activity, seconds in other.seconds.items():
            self.add(activity, seconds)
        self.printed |= other.printed
        self.asked |= other.asked


class Timeline:
    """The bins of ``nprocs`` ranks from ``origin`` on (CLOCK_MONOTONIC seconds): when the run ``started``, or up to a
    tenth of a second before. Ranks are looked at whenever a tenth is full: then a bin has one sample, not parts of two.

    ``bins[rank][i]`` is the rank's time from ``i * width`` to ``(i + 1) * width`` seconds. Bins become twice as wide
    when a run outgrows their number.
    """

    def __init__(self, nprocs: int, started: float) -> None:
        self.origin = started - started % _NARROWEST
        self.width = _NARROWEST
        self.bins: list[list[Bin]] = [[] for _ in range(nprocs)]
        self._most = max(_FEWEST, min(_BINS, _OF_ALL // nprocs))

    @property
    def files(self) -> set[str]:
        """The files in whose lines ranks have spent time."""
        frames = (activity.frame for bins in self.bins for one in bins for activity in one.seconds)
        return {frame.file for frame in frames if frame is not None}

    def spend(self, rank: int, activity: Activity, begin: float, seconds: float) -> None:
        """The rank has spent ``seconds`` so, from the moment ``begin`` on."""
        begin = max(0.0, begin - self.origin)
        end = begin + seconds
        index = self._index(end)
        for number in range(min(int(begin / self.width), index), index + 1):
            part = min(end, (number + 1) * self.width) - max(begin, number * self.width)
            if part > _ROUNDING:
                self._bin(rank, number).add(activity, part)

    def print(self, rank: int, moment: float) -> None:
        """The rank has printed at this moment."""
        self._bin(rank, self._index(moment - self.origin)).printed = True

    def ask(self, rank: int, moment: float) -> None:
        """The rank has asked the user at this moment."""
        self._bin(rank, self._index(moment - self.origin)).asked = True

    def _index(self, passed: float) -> int:
        """The number of the bin for that many seconds after the origin; makes the bins wider if there are too few."""
        while passed > self._most * self.width:
            self.width *= 2
            for rank, narrow in enumerate(self.bins):
                for left, right in zip(narrow[::2], narrow[1::2], strict=False):
                    left.merge(right)
                self.bins[rank] = narrow[::2]
        return min(int(max(0.0, passed) / self.width), self._most - 1)

    def _bin(self, rank: int, index: int) -> Bin:
        bins = self.bins[rank]
        while len(bins) <= index:
            bins.append(Bin())
        return bins[index]
