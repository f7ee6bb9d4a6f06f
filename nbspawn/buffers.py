"""Large buffers in one anonymous file in memory, which other processes map: shared until one of them writes."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence

ALIGNMENT = 64  # bytes: a cache line, and the widest vector that torch's kernels load
_PIECE = 1 << 28  # bytes that are written at a call: 0.1 s


def places(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where buffers of so many bytes lie in a file: (start, size)."""
    found, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + size
        found.append((start, size))
    return found


def write(buffers: Sequence[memoryview]) -> int:
    """A file (a memfd where there are any) that holds these buffers, as a descriptor. Raises OSError."""
    fd = to_be_filled()
    try:
        fill(fd, buffers)
    except BaseException:
        os.close(fd)
        raise
    return fd


def to_be_filled() -> int:
    """The descriptor of an empty file; another process that reads it waits until this one has filled it. Raises
    OSError."""
    fd = _anonymous_file()
    fcntl.lockf(fd, fcntl.LOCK_EX)
    return fd


def fill(fd: int, buffers: Sequence[memoryview], give_up: Callable[[], object] = lambda: False) -> None:
    """Write these buffers. Raises OSError."""
    for (start, _), buffer in zip(places(buffer.nbytes for buffer in buffers), buffers, strict=True):
        rest = buffer.cast("B")
        while rest.nbytes and not give_up():
            written = os.pwrite(fd, rest[:_PIECE], start)
            rest, start = rest[written:], start + written
    fcntl.lockf(fd, fcntl.LOCK_UN)


def read(fd: int, sizes: Iterable[int]) -> list[memoryview]:
    """The buffers again, writable; what this process writes stays its own. The mapping lives as long as one of them,
    and ``fd`` may be closed at once."""
    fcntl.lockf(fd, fcntl.LOCK_SH)
    where = places(sizes)
    whole = _mapped(fd, sum(where[-1]))
    return [whole[start : start + size] for start, size in where]


def _mapped(fd: int, size: int) -> memoryview:
    """Until 3.13 Python's own ``mmap`` keeps a descriptor as long as the memory, and a person may keep many results."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    whole = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(whole, libc.munmap, address, size).atexit = False
    return pickle.PickleBuffer(whole).raw()


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("nbspawn", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="nbspawn-") as file:  # has no name from the start
        return os.dup(file.fileno())
