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

SLOT = struct.Struct("=ddqqq")
"""A ``Reading``, and the rank's process."""


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
        self._map = mapped(path)
        self._offset = rank * SLOT.size

    def write(self, now: float) -> None:
        """One reading; 20 microseconds."""
        reading = Reading(now, time.process_time(), self._memory(), _device_memory())
        SLOT.pack_into(self._map, self._offset, *reading, os.getpid())

    def _memory(self) -> int:
        if sys.platform != "linux":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, and the most so far
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE


def mapped(path: Path) -> mmap.mmap:
    """The file, in memory: it stays when somebody removes it, or closes every descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def read(fd: int, rank: int) -> Reading:
    """In the kernel: what the rank wrote last into the file that is open as ``fd``."""
    *reading, _ = SLOT.unpack(os.pread(fd, SLOT.size, rank * SLOT.size))
    return Reading(*reading)


def processes(slots: mmap.mmap) -> set[int]:
    """Those of all ranks that have written."""
    return {pid for *_, pid in SLOT.iter_unpack(slots)} - {0}


def _device_memory() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return -1
    # Of each: which one is current is a thread's own matter, and this is not the thread that has chosen one.
    return sum(int(torch.cuda.memory_allocated(device)) for device in range(torch.cuda.device_count()))
