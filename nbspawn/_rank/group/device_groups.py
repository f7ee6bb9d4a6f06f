"""The process groups whose calls are queued on a device: NCCL's. A call that does not end is given back by an abort."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_WATCHDOG = "pt_nccl_watchdg"


def exist() -> bool:
    """Is this process in one?"""
    return any(_backends())


def abort() -> None:
    """Have all their calls end: a thread that waits for the device goes on. Can hang, where other ranks do not do the
    same: https://github.com/NVIDIA/nccl/issues/829. The groups cannot be used any more."""
    for backend in list(_backends()):
        backend.abort()


def count() -> int:
    """How many there are."""
    return len(list(_backends()))


def watched() -> bool:
    """Does NCCL's watchdog live, a thread of each group? It ends with an error of a call, or its timeout."""
    names = []
    for path in glob.glob("/proc/self/task/*/comm"):
        with suppress(OSError), open(path) as file:
            names.append(file.read().strip())
    return names.count(_WATCHDOG) >= count()


def _backends() -> Iterator[Any]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not hasattr(dist, "ProcessGroupNCCL"):
        return
    device = sys.modules["torch"].device("cuda")
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has no backend for CUDA
            if isinstance(backend := group._get_backend(device), dist.ProcessGroupNCCL):
                yield backend
