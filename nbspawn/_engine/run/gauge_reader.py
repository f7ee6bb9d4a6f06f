"""Reads the gauges of a run's ranks (_protocol/gauges.py): once a second, and when a rank has ended its command."""

from __future__ import annotations

from collections.abc import Iterable

from nbspawn._protocol import gauges
from nbspawn._protocol.messages import Measured

_INTERVAL = 1.0  # seconds between two readings


class GaugeReader:
    """Reads the gauges of ``nprocs`` ranks from the file that is open as ``fd``."""

    def __init__(self, fd: int, nprocs: int) -> None:
        self._fd = fd
        self._nprocs = nprocs
        self._read_at = 0.0
        self._last: dict[int, float] = {}

    def is_due(self, now: float) -> bool:
        """Are they to be read at ``now`` (CLOCK_MONOTONIC seconds)?"""
        return now - self._read_at >= _INTERVAL

    def changes(self, ranks: Iterable[int], now: float) -> list[Measured]:
        """The gauges of those of these ranks that have moved them since the last reading."""
        self._read_at = now
        return [measured for rank in ranks for measured in self.change(rank)]

    def change(self, rank: int) -> list[Measured]:
        """What has changed for one rank: empty, or one reading."""
        reading = gauges.read(self._fd, rank)
        if reading.time == self._last.get(rank, 0.0):
            return []
        self._last[rank] = reading.time
        return [Measured(rank, *reading)]

    def usage(self) -> list[gauges.Reading]:
        """What each rank uses, as it last reported."""
        return [gauges.read(self._fd, rank) for rank in range(self._nprocs)]
