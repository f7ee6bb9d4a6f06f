"""Which accelerator a rank computes on: the one of its local rank, or the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def choose(local_rank: int) -> torch.device:
    """``cuda:<local rank>``, made the current device, where CUDA works in this rank; else ``cpu``."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
