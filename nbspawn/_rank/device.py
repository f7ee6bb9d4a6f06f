"""Which accelerator a rank computes on, initialised before the command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbspawn._rank.channel import Channel
from nbspawn._rank.info import RankInfo

if TYPE_CHECKING:
    import torch


@contextmanager
def ready(info: RankInfo, channel: Channel) -> Iterator[None]:
    """Initialise the device: before the process group is made, and before a function that does not choose one runs."""
    if info.launch.accelerator == "xla":
        from nbspawn._rank import xla

        xla.initialise(info)
    elif info.launch.backend == "nccl":
        choose(info)  # if all ranks are on the first GPU, the group hangs in its first collective
    yield


def choose(info: RankInfo) -> torch.device:
    """The device of torch_xla or torch_tpu, if the ranks were started for one of them; else ``cuda:<local rank>``, made
    the current device, if CUDA works in this rank; else ``cpu``."""
    import torch

    if info.launch.accelerator == "xla":
        from nbspawn._rank import xla

        return xla.device()
    if info.launch.accelerator == "tpu":
        return torch.device("tpu")
    if torch.version.cuda is None or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", info.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def in_use() -> bool:
    """Has this process initialised a device whose work is queued?"""
    torch: Any = sys.modules.get("torch")
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(one is not None and one.is_initialized() for one in devices)
