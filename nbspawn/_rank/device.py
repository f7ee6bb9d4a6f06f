"""The accelerator that a rank computes on: which it is, initialised before the command runs, and at rest after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from nbspawn._rank import native
from nbspawn._rank.after_import import after_import
from nbspawn._rank.channel import Channel
from nbspawn._rank.info import RankInfo

if TYPE_CHECKING:
    import torch


_LATE = (
    "The device told it after the last line: which line has queued what failed is not known. With --env "
    "CUDA_LAUNCH_BLOCKING=1 each line waits for what it queues."
)


@contextmanager
def ready(info: RankInfo, channel: Channel) -> Iterator[None]:
    """Initialise XLA; and have ``cuda:<local rank>`` be the current device as soon as CUDA is initialised, which it is
    not here: a context takes time, and hundreds of MB of the GPU. (With all ranks on the first GPU, a group of NCCL
    hangs in its first collective.)"""
    if info.launch.accelerator == "xla":
        from nbspawn._rank import xla

        xla.initialise(info)
    else:
        after_import("torch", partial(_take_own_gpu, info.rank))
    yield


def _take_own_gpu(rank: int) -> None:
    cuda: Any = sys.modules["torch"].cuda

    def take() -> None:
        if index := rank % cuda.device_count():  # the first one is current, and has no context before it is used
            cuda.set_device(index)

    cuda._lazy_call(take)


def choose(info: RankInfo) -> torch.device:
    """The device of torch_xla or torch_tpu, if the ranks were started for one of them; ``cpu`` if they were for that;
    else ``cuda:<local rank>``, if CUDA works in this rank. No context is made."""
    import torch

    if info.launch.accelerator == "xla":
        from nbspawn._rank import xla

        return xla.device()
    if info.launch.accelerator == "tpu":
        return torch.device("tpu")
    if info.launch.accelerator == "cpu" or torch.version.cuda is None or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", info.rank % torch.cuda.device_count())


def settle() -> None:
    """Wait until what the command has queued on its device has ended. Raises the error of what fails there, and hears
    an interrupt."""
    if not in_use():
        return
    try:
        native.ends_within(-1, _synchronize)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(_LATE)
        raise


def _synchronize() -> None:
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):
                torch.cuda.synchronize(index)
    elif torch.xpu.is_initialized():
        torch.xpu.synchronize()


def in_use() -> bool:
    """Has this process initialised a device whose work is queued?"""
    torch: Any = sys.modules.get("torch")
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(one is not None and one.is_initialized() for one in devices)
