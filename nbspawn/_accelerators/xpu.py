"""Intel's GPUs."""

from __future__ import annotations

from nbspawn._accelerators.accelerator import Accelerator


class Xpu(Accelerator):
    """torch's ``xpu``."""

    type, title = "xpu", "XPU"
    backends = ("xccl",)
    counting = "torch.xpu.device_count()"
    visible = ("ZE_AFFINITY_MASK",)
    # https://github.com/huggingface/accelerate/pull/3884
    only_spawn = "Intel's GPUs cannot be relied on in forked processes"

    def is_built(self) -> bool:
        import torch

        return hasattr(torch, "xpu") and torch.xpu._is_compiled()
