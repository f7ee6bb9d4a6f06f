"""A rank's gauges: a few numbers in a file that it shares with the kernel, which reads them when it needs them.

No message is necessary: the last sign of life costs nothing, and distinguishes a rank that is stuck from a quiet one.
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
"""A ``Reading``, and the rank's process id."""


class Reading(NamedTuple):
    """``time`` of the last sign of life (CLOCK_MONOTONIC seconds, 0 before the first), processor seconds so far,
    resident bytes, bytes on the device (-1: no device is used)."""

    time: float
    cpu: float
    memory: int
    device_memory: int


class Gauges:
    """In the rank: writes the rank's slot of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._map = mapped(path)
        self._offset = rank * SLOT.size

    def write(self, now: float) -> None:
        """Write one reading; takes 20 microseconds."""
        reading = Reading(now, time.process_time(), self._memory(), _device_memory())
        SLOT.pack_into(self._map, self._offset, *reading, os.getpid())

    def _memory(self) -> int:
        if sys.platform != "linux":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, and the maximum so far
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE


def mapped(path: Path) -> mmap.mmap:
    """The mapped file: it stays usable if it is removed, or if the user's code closes every descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def read(fd: int, rank: int) -> Reading:
    """In the kernel: the rank's last reading in the file that is open as ``fd``."""
    *reading, _ = SLOT.unpack(os.pread(fd, SLOT.size, rank * SLOT.size))
    return Reading(*reading)


def processes(slots: mmap.mmap) -> set[int]:
    """The process ids of all ranks that have written."""
    return {pid for *_, pid in SLOT.iter_unpack(slots)} - {0}


def _device_memory() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return -1
    # Of all devices: the current one is a setting of each thread, and the user's code has set it in another one.
    return sum(int(torch.cuda.memory_allocated(device)) for device in range(torch.cuda.device_count()))
