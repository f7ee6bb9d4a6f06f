"""A rank's gauges: a few numbers in a file that it shares with the kernel, read there whenever somebody wants to know.

No message is needed, so the last sign of life costs nothing, and a rank that is stuck is told from one that is quiet.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

SLOT = struct.Struct("=ddqq")


class Reading(NamedTuple):
    """``time`` of the last sign of life (CLOCK_MONOTONIC seconds, 0 before the first), processor seconds so far,
    resident bytes, bytes on the device (-1: none is used)."""

    time: float
    cpu: float
    memory: int
    device_memory: int


class Gauges:
    """The rank's hand: writes its slot of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(fd, 0)
        os.close(fd)
        self._offset = rank * SLOT.size
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if sys.platform == "linux" else -1
        self._page = mmap.PAGESIZE

    def write(self, now: float) -> None:
        """One reading; 10 microseconds."""
        SLOT.pack_into(self._map, self._offset, now, time.process_time(), self._memory(), _device_memory())

    def _memory(self) -> int:
        if self._statm < 0:
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, and the most so far
        return int(os.pread(self._statm, 128, 0).split()[1]) * self._page


def read(fd: int, rank: int) -> Reading:
    """In the kernel: what the rank wrote last into the file that is open as ``fd``."""
    return Reading(*SLOT.unpack(os.pread(fd, SLOT.size, rank * SLOT.size)))


def _device_memory() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return -1
    return int(torch.cuda.memory_allocated())
