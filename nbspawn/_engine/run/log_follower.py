"""Follows the logs of all ranks of a run: when they are to be read, and how far."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from nbspawn._engine.run.logs import LONGEST, LogTail
from nbspawn._protocol.messages import Printed

_INTERVAL = 0.05  # seconds: how late a printed line, or an exit that no sentinel reports, may be noticed
_LONG_INTERVAL = 0.5  # the same, when a command has run for five seconds: ranks in lock-step feel each poll


class LogFollower:
    """The tails of the logs that are open as ``fds``, by rank. All moments are CLOCK_MONOTONIC seconds."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._tails = [LogTail(fd, rank) for rank, fd in enumerate(fds)]
        self._polled_at = 0.0
        self._read_early = False
        self._first = 0

    def next_poll(self, began_at: float) -> float:
        """When the logs are to be polled next, for a command that ``began_at`` then."""
        return self._polled_at + self._interval(began_at)

    def poll_is_due(self, now: float, began_at: float) -> bool:
        """Are the logs to be polled now? Waking up is most of a poll's cost: one that is soon due is made at once."""
        return now >= self._polled_at + max(_INTERVAL, self._interval(began_at) / 2)

    def _interval(self, began_at: float) -> float:
        """Seconds between two polls. What a rank printed before a message is read with that; its peers may have
        printed the same, which is shown once if it is read soon. So are bars that may have ended."""
        if self._read_early:
            return _INTERVAL
        return min(_LONG_INTERVAL, max(_INTERVAL, (self._polled_at - began_at) / 10))

    def poll_begins(self, now: float) -> None:
        """The next poll is due an interval from ``now``."""
        self._polled_at = now
        self._read_early = False

    def ends(self, ranks: Collection[int]) -> dict[int, int]:
        """How many bytes the logs of these ranks hold."""
        return {rank: self._tails[rank].end() for rank in ranks}

    def read(self, ends: Mapping[int, int]) -> list[Printed]:
        """What was printed since the last read, but nothing beyond these offsets, by rank. Where reading takes long,
        the next call begins with the rank that this one does not come to."""
        found: list[Printed] = []
        until = time.monotonic() + LONGEST
        for rank in sorted(ends, key=lambda rank: (rank < self._first, rank)):
            found += self._tails[rank].read(ends[rank], until)
            self._read_early = self._read_early or self._tails[rank].holds
            if time.monotonic() >= until:
                self._first = rank + 1
                break
        else:
            self._first = 0
        return found

    def read_to(self, rank: int, offset: int | None, ends: bool = True) -> tuple[list[Printed], int]:
        """The next piece of what the rank printed before a message which it sent at this offset, or before it ended
        (None), and how many bytes that was: 0 where there is no more. ``ends``: it is the command's last one."""
        printed, size = self._tails[rank].read_to(offset, ends)
        self._read_early = self._read_early or (offset is not None and bool(printed))
        return printed, size

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()
