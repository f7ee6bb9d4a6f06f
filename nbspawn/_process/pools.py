"""The sizes of the thread pools of libraries of C code: in each rank those of a new process with its environment.

A library reads the environment when it is loaded, which was in the fork server or in the kernel: before the rank had
its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from contextlib import suppress
from typing import Any

import threadpoolctl

_SIZE = {
    "openblas": ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"),
    "mkl": ("MKL_NUM_THREADS", "OMP_NUM_THREADS"),
    "blis": ("BLIS_NUM_THREADS", "OMP_NUM_THREADS"),
}
"""By threadpoolctl's name for the library: what it reads, the first that is set."""


_inherited: list[Any] = []


def find() -> None:
    """In a process that is to be copied: note which libraries are loaded. To find that takes each rank 3 to 10 ms."""
    _inherited[:] = _loaded(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _loaded(modules: int) -> list[Any]:
    """Libraries come with modules: as long as ``modules``, the number of these, is the same, no more have come."""
    return list(threadpoolctl.ThreadpoolController().lib_controllers)


def resize(threads: int) -> None:
    """In the rank: resize the pools. ``threads`` is for torch and OpenMP."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for library in _inherited or _loaded(0):
        size = threads
        if library.internal_api in _SIZE:  # not more than there are cores, as these do it themselves
            size = min(number(*map(os.environ.get, _SIZE[library.internal_api])) or threads, cores)
        if library.num_threads != size and not _written(library, size):
            library.set_num_threads(size)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _written(library: Any, size: int) -> bool:
    """Set OpenBLAS's number without its own function, which starts a thread for each core in a forked process, whatever
    ``size`` is, and these keep the cores busy for 30 ms (goto_set_num_threads in its driver/others/blas_server.c). They
    start with the first operation that needs them."""
    if library.internal_api != "openblas" or not hasattr(library, "dynlib"):  # threadpoolctl before 3.2
        return False
    with suppress(ValueError):  # this build hides it
        ctypes.c_int.in_dll(library.dynlib, "blas_cpu_number").value = size
    return bool(library.num_threads == size)


def number(*values: str | None) -> int:
    """The first of these that is a number of threads (OpenMP's may be a list by level, as in '4,2'); 0: none is."""
    for value in values:
        first = (value or "").partition(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return int(first)
    return 0
