"""What has happened, in the order in which it is told, each event behind what its rank had printed by then."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from nbspawn._engine.run.logs import LONGEST, LogFollower
from nbspawn._protocol.messages import Event

# Bytes of logs that are read at a time, about. As lines they take several times as much: what four ranks had printed,
# 780 MB, took 3.5 GB of the kernel's memory when it was read at once, and Stop was not heard meanwhile.
_PIECE = 4 << 20


@dataclass(frozen=True)
class _Unread:
    """What a rank has printed up to an offset of its log (None: the end); ``ends``: with which the command ends."""

    rank: int
    offset: int | None
    ends: bool


class EventQueue:
    """Events, and what was printed before them, which stays in ``logs`` until it is taken."""

    def __init__(self, logs: LogFollower) -> None:
        self._logs = logs
        self._waiting: deque[Event | _Unread] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, *events: Event) -> None:
        """Add events, which come next."""
        self._waiting += events

    def add_printed(self, rank: int, offset: int | None = None, ends: bool = True) -> None:
        """What the rank has printed up to this offset of its log comes next, or all of it. Unless the command ``ends``
        with it, a progress bar that it is drawing goes on."""
        self._waiting.append(_Unread(rank, offset, ends))

    def take(self) -> list[Event]:
        """What comes next; if the queue is not empty afterwards, more of the same is in the logs."""
        taken: list[Event] = []
        left, until = _PIECE, time.monotonic() + LONGEST
        while self._waiting:
            event = self._waiting[0]
            if isinstance(event, _Unread):
                printed, size = self._logs.read_to(event.rank, event.offset, event.ends)
                taken += printed
                left -= size
                if size:
                    if left <= 0 or time.monotonic() >= until:
                        break
                    continue
            else:
                taken.append(event)
            self._waiting.popleft()
        return taken

    def clear(self) -> None:
        """Nobody will take what waits."""
        self._waiting.clear()
