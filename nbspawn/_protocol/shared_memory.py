"""Large buffers in anonymous files in memory, which other processes map copy-on-write.

Linux lets only one thread at a time write to a file. Large data are therefore split into stripes, a file each, which
are written in parallel and mapped contiguously.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

ALIGNMENT = 64  # bytes: a cache line, and the widest vector that torch's kernels load
_STRIPE = 1 << 26  # bytes: smaller data are written by one thread
_MOST = 8  # stripes: more do not help, the memory's bandwidth is used up
_MAP_FIXED = 0x10  # on Linux and macOS
_PIECE = 1 << 24  # bytes per write; of a device's memory, so much at a time is on the host


class DeviceBuffer(bytearray):
    """Stands for ``nbytes`` bytes in a device's memory. A slice of it is a copy on the host, which ``read`` makes.

    Were all copied before they are written, they would take the host's memory twice. It is an empty bytearray, because
    a PickleBuffer takes no class of Python's own before 3.12.
    """

    def __init__(self, nbytes: int, read: Callable[[int, int], memoryview]) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._read = read

    def __getitem__(self, part: slice) -> memoryview:  # type: ignore[override]
        start, stop, _ = part.indices(self.nbytes)
        return self._read(start, stop)


Large = memoryview | DeviceBuffer


def raw(buffer: pickle.PickleBuffer) -> Large:
    """The bytes of a buffer that is being pickled."""
    view = buffer.raw()
    return view.obj if isinstance(view.obj, DeviceBuffer) else view


def places(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """The layout of buffers of these sizes: (start, size) of each, in bytes."""
    found, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + size
        found.append((start, size))
    return found


def write(buffers: Sequence[Large]) -> int:
    """The descriptor of a file (a memfd where available) that contains these buffers. Raises OSError."""
    fds = empty_files(0)
    try:
        fill(fds, buffers)
    except BaseException:
        close(fds)
        raise
    return fds[0]


def empty_files(size: int) -> tuple[int, ...]:
    """The descriptors of empty files for buffers of ``size`` bytes in total. They are locked: another process that
    reads them waits until this one has filled them. Raises OSError."""
    fds: list[int] = []
    try:
        for _ in range(max(1, min(os.cpu_count() or 1, _MOST, size // _STRIPE))):
            fds.append(anonymous_file())
            fcntl.lockf(fds[-1], fcntl.LOCK_EX)
    except BaseException:
        close(fds)
        raise
    return tuple(fds)


def fill(fds: Sequence[int], buffers: Sequence[Large], cancelled: Callable[[], object] = lambda: False) -> None:
    """Write these buffers. Raises OSError."""
    where = places(buffer.nbytes for buffer in buffers)

    def fill_one(stripe: tuple[int, int, int]) -> None:
        fd, first, size = stripe
        for (start, _), buffer in zip(where, buffers, strict=True):
            at, end = max(0, first - start), min(buffer.nbytes, first + size - start)
            while at < end and not cancelled():
                at += os.pwrite(fd, buffer[at : min(at + _PIECE, end)], start + at - first)
        fcntl.lockf(fd, fcntl.LOCK_UN)

    if len(fds) == 1:
        fill_one((fds[0], 0, sum(where[-1])))
    else:
        with ThreadPoolExecutor(len(fds)) as threads:
            list(threads.map(fill_one, _stripes(fds, sum(where[-1]))))


def read(fds: Sequence[int], sizes: Iterable[int]) -> list[memoryview]:
    """The buffers, mapped copy-on-write. The mapping lives as long as one of them; the descriptors may be closed at
    once. Raises OSError, also if the files are too short: who reads what is not there is killed by SIGBUS."""
    for fd in fds:
        fcntl.lockf(fd, fcntl.LOCK_SH)
    where = places(sizes)
    total = sum(where[-1])
    end = max((start + size for start, size in where if size), default=0)
    for fd, first, part in _stripes(fds, total):
        there = -(-os.fstat(fd).st_size // mmap.PAGESIZE) * mmap.PAGESIZE
        if there < min(part, end - first):
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
    whole = _mapped(fds, total)
    return [whole[start : start + size] for start, size in where]


def unlock(fds: Iterable[int]) -> None:
    """Let other processes read what ``empty_files`` has locked."""
    for fd in fds:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def contents(fds: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """The files that hold ``size`` bytes, in order, with the bytes in each."""
    return ((fd, part) for fd, _, part in _stripes(fds, size))


def opened(paths: Iterable[str]) -> tuple[int, ...]:
    """Files that were filled, by their paths."""
    return tuple(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths)


def close(fds: Iterable[int]) -> None:
    """Close the files."""
    for fd in fds:
        os.close(fd)


def _stripes(fds: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """The part of ``size`` bytes in each file: (descriptor, first byte, bytes); whole pages, except the last."""
    step = -(-size // len(fds) // mmap.PAGESIZE) * mmap.PAGESIZE
    return ((fd, first, min(step, size - first)) for fd, first in zip(fds, range(0, size, step), strict=True))


def _mapped(fds: Sequence[int], size: int) -> memoryview:
    """Map by libc: until 3.13 Python's ``mmap`` keeps a descriptor open as long as the memory, and a user may keep
    many results."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def map_(where: int | None, size: int, access: int, flags: int, fd: int) -> int:
        address: int = libc.mmap(where, size, access, mmap.MAP_PRIVATE | flags, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return address

    address = map_(None, size, 0, mmap.MAP_ANONYMOUS, -1)
    whole = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(whole, libc.munmap, address, size).atexit = False
    for fd, first, part in _stripes(fds, size):
        map_(address + first, part, mmap.PROT_READ | mmap.PROT_WRITE, _MAP_FIXED, fd)
    return pickle.PickleBuffer(whole).raw()


def anonymous_file() -> int:
    """The descriptor of an empty file without a name: it works with a full disk and a deleted directory."""
    if sys.platform == "linux":
        return os.memfd_create("nbspawn", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="nbspawn-") as file:  # never has a name
        return os.dup(file.fileno())
