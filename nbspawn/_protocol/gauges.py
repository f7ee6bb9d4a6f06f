"""A rank's gauges: a few numbers in a file that it shares with the kernel, which reads them when it needs them.

No message is necessary: the last sign of life costs nothing, and distinguishes a rank that is stuck from a quiet one.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nbspawn._accelerators import kinds
from nbspawn._accelerators.accelerator import Load

SLOT = struct.Struct("=dd9qq")
"""A ``Reading``, and the rank's process id."""
# The most, which gVisor does not tell, and the present one.
_RESIDENT = re.compile(rb"(?:VmHWM:\s*(\d+) kB\n)?VmRSS:\s*(\d+) kB")


class Reading(NamedTuple):
    """``time`` of the last sign of life (CLOCK_MONOTONIC seconds, 0 before the first), processor seconds so far,
    resident bytes, bytes on the device (-1: no device is used); of both also the most since the command began; and what
    is known of the device of which torch has most."""

    time: float
    cpu: float
    memory: int
    peak_memory: int
    device_memory: int
    peak_device_memory: int
    load: Load = Load()


class Gauges:
    """In the rank: writes the rank's slot of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._map = mapped(path)
        self._offset = rank * SLOT.size
        self._device_peak = -1
        self._torch_peak_before = -1
        self._load = Load()

    def begin(self) -> None:
        """A kept rank's next command begins, and its peaks with it; takes 40 microseconds. Where the system cannot
        begin anew (macOS, gVisor), the memory's peak is that since the rank's start."""
        global _earlier_peak
        _earlier_peak = peak()
        with suppress(OSError), open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")  # https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
        self._device_peak = -1
        _, self._torch_peak_before = _sums(_on_devices())

    def write(self, now: float) -> None:
        """Write one reading; takes 30 microseconds."""
        reading = Reading(now, time.process_time(), *memory(), *self._device_memory())
        SLOT.pack_into(self._map, self._offset, *reading[:-1], *self._load, os.getpid())

    def look_at_the_device(self) -> None:
        """Read the device, for the next readings; takes some milliseconds."""
        accelerator = kinds.in_use()
        if accelerator is not None:
            self._device_memory()
            self._load = accelerator.load(self._load.number) if self._load.number >= 0 else Load()

    def _device_memory(self) -> tuple[int, int]:
        """Bytes on the device: now, and at most as far as is known. A command may end before anybody looks at it, but
        its number is known."""
        used = _on_devices()
        current = [one["current"] for one in used]
        if any(current) and (number := current.index(max(current))) != self._load.number:
            self._load = Load(number)
        allocated, torch_peak = _sums(used)
        # Only the user resets torch's peak, which may be an earlier command's. A changed one is of this command.
        known = allocated if torch_peak == self._torch_peak_before else torch_peak
        self._device_peak = max(self._device_peak, known)
        return allocated, self._device_peak


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
    return Reading._make((*reading[:6], Load._make(reading[6:])))


def processes(slots: mmap.mmap) -> set[int]:
    """The process ids of all ranks that have written."""
    return {pid for *_, pid in SLOT.iter_unpack(slots)} - {0}


_earlier_peak = 0
"""Of the commands before the one that runs."""


def peak() -> int:
    """The most resident bytes since the rank's start."""
    return max(_earlier_peak, memory()[1])


def memory() -> tuple[int, int]:
    """Resident bytes: now, and at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "linux":
        return most, most  # bytes on macOS
    try:
        with open("/proc/self/status", "rb") as file:
            found = _RESIDENT.search(file.read())
    except OSError:  # no descriptor is left
        found = None
    if found is None:
        return most * 1024, most * 1024
    # Of a spawned rank, ``most`` includes the kernel's peak: Linux keeps it over exec.
    return int(found[2]) * 1024, int(found[1] or most) * 1024


def _sums(used: list[dict[str, int]]) -> tuple[int, int]:
    """The bytes that torch has allocated on all devices, now and at most; -1 if it uses none."""
    return (sum(one["current"] for one in used), sum(one["peak"] for one in used)) if used else (-1, -1)


def _on_devices() -> list[dict[str, int]]:
    """What torch's allocator has of each device; empty if it uses none, or does not tell."""
    accelerator = kinds.in_use()
    if accelerator is None:
        return []
    module = accelerator.module
    # Of all devices: the current one is a setting of each thread, and the user's code has set it in another one.
    try:
        each = [module.memory_stats_as_nested_dict(device) for device in range(module.device_count())]
        return [stats["allocated_bytes"]["all"] for stats in each]
    except Exception:  # an allocator of the user's keeps no statistics (torch.cuda.memory.CUDAPluggableAllocator)
        return []
