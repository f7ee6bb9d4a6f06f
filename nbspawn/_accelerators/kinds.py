"""The kinds of accelerators that nbspawn serves, and which of them this torch is built for."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from nbspawn._accelerators.accelerator import Accelerator
from nbspawn._accelerators.cpu import Cpu
from nbspawn._accelerators.cuda import Cuda, Rocm
from nbspawn._accelerators.tpu import Tpu
from nbspawn._accelerators.xla import Xla
from nbspawn._accelerators.xpu import Xpu

if TYPE_CHECKING:
    import torch

CPU, XLA, TPU = Cpu(), Xla(), Tpu()
GPUS: tuple[Accelerator, ...] = (Cuda(), Rocm(), Xpu())
"""A torch is built for one of them, or none."""
GPU_TYPES = {one.type for one in GPUS}
WORDS = ("auto", "cpu", "gpu", "tpu", "xla")
"""Words for a number of ranks."""
ASKED_FOR = {one.type: one for one in (CPU, XLA, TPU)}
"""What the user has to ask for, by its word or its backend."""
BACKENDS = {name: one for one in reversed((*GPUS, XLA, TPU)) for name in one.backends}

# torch's modules whose runtime cannot be initialised again in a forked process.
_RUNTIMES = ("cuda", "xpu", "mtia", "hpu", "npu", "tpu")


def named(name: str) -> Accelerator:
    """The accelerator of a launch: one of ASKED_FOR, or '' for what torch is built for."""
    return ASKED_FOR[name] if name else own()


def own() -> Accelerator:
    """What this torch is built for; CPU for none, and for what nbspawn does not serve."""
    return next((one for one in GPUS if one.is_built()), CPU)


def own_gpu() -> torch.device:
    """In a rank: the device for what was on one in the kernel; the CPU where there is none, or ranks are to use
    none."""
    return (CPU if _ranks_are_for == CPU.type else own()).device(int(os.environ.get("LOCAL_RANK", 0)))


def ranks_are_for(name: str) -> None:
    """In a rank, at its start: note what it was started for, as in ``named``."""
    global _ranks_are_for
    _ranks_are_for = name


_ranks_are_for = ""


def unserved() -> str:
    """torch's name of an accelerator of its that nbspawn does not serve; '' for none."""
    import torch

    current = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None  # since 2.6
    return "" if current is None or current.type in (*GPU_TYPES, *ASKED_FOR) else current.type


def initialised() -> list[str]:
    """torch's modules whose runtimes this process has initialised: 'cuda'. torch need not be imported."""
    torch = sys.modules.get("torch")
    modules = {name: vars(torch).get(name) for name in _RUNTIMES} if torch is not None else {}
    return [name for name, module in modules.items() if getattr(module, "is_initialized", bool)()]


def in_use() -> Accelerator | None:
    """What this process has initialised, and whose work is queued."""
    return next((one for one in GPUS if one.is_used()), None)
