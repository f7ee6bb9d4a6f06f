"""The process groups whose calls are queued on a device: NCCL's. A call that does not end is given back by an abort."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def exist() -> bool:
    """Is this process in one?"""
    return any(_backends())


def abort() -> None:
    """Have all their calls end: a thread that waits for the device goes on. Can hang, where other ranks do not do the
    same: https://github.com/NVIDIA/nccl/issues/829. The groups cannot be used any more."""
    for backend in list(_backends()):
        backend.abort()


def _backends() -> Iterator[Any]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not hasattr(dist, "ProcessGroupNCCL"):
        return
    device = sys.modules["torch"].device("cuda")
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has no backend for CUDA
            if isinstance(backend := group._get_backend(device), dist.ProcessGroupNCCL):
                yield backend
