"""How many ranks ``auto``, ``gpu`` and ``cpu`` mean here, found without touching an accelerator's runtime."""

from __future__ import annotations

import os

from nbspawn.engine.launch import cores
from nbspawn.errors import UsageError


def count_ranks(wanted: int | str) -> int:
    """A number stays; 'gpu' is one rank a GPU, 'cpu' one a core, 'auto' the first where there is a GPU.

    Raises UsageError for 'gpu' where there is none.
    """
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return cores()
    found = gpus()
    if found == 0 and wanted == "gpu":
        raise UsageError("there is no GPU that torch can use here: give a number of ranks, or cpu")
    return found or cores()


def gpus() -> int:
    """The CUDA devices that ranks would see. Asking NVML keeps CUDA out of the kernel: ``torch.cuda.device_count()``
    can initialise it, after which no forked rank could use it."""
    import torch

    if torch.version.cuda is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    return max(0, torch.cuda._device_count_nvml())
