"""TPUs: how many chips this machine has, and what torch_tpu needs in the process that starts its ranks.

torch_tpu is TorchTPU, which replaces torch_xla: device ``tpu``, backend ``tpu_dist``
(https://github.com/google-pytorch/torch_tpu).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from nbspawn._engine import fork_safety
from nbspawn.errors import StartError, UsageError

BACKENDS = ("tpu_dist", "tpu")

_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"  # one per rank

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# TPU v2 and v3, v4, v5p, v5e, v6e, v7: the ids in torch_xla and torch_tpu.
_CHIPS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


def chips() -> int:
    """The number of TPU chips on this machine's PCI bus, which can be listed without claiming a chip."""
    return sum(
        _read(vendor) == _GOOGLE and _read(vendor.parent / "device") in _CHIPS for vendor in _PCI.glob("*/vendor")
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def installed() -> bool:
    """Is torch_tpu installed?"""
    return importlib.util.find_spec("torch_tpu") is not None


def count() -> int:
    """One rank per TPU that torch_tpu can use. Raises UsageError where it can use none."""
    if not installed():
        raise UsageError(
            "torch_tpu is not installed in this environment: `pip install torch_tpu`, on a machine with a TPU"
        )
    import torch

    device = torch.accelerator.current_accelerator()
    found = torch.accelerator.device_count() if device is not None and device.type == "tpu" else 0
    if not found:
        raise UsageError(
            "torch_tpu finds no TPU on this machine: give a number of ranks without -b tpu_dist, or gpu, or cpu"
        )
    return found


def prepare(nprocs: int) -> None:
    """Set the environment variables for ``nprocs`` ranks in this process, as torch_tpu's documentation prescribes for
    the launching process.

    Raises UsageError if torch_tpu cannot run this number of ranks, StartError if this process holds the TPU.
    """
    import torch

    runtime: Any = torch.tpu  # type: ignore[attr-defined]
    if runtime.is_initialized():
        raise StartError(fork_safety.holds_the_tpu("tpu"))
    found = count()
    try:
        runtime.distributed.set_tpu_launch_env(nproc_per_node=nprocs)
    except (ValueError, RuntimeError) as refusal:
        raise UsageError(f"torch_tpu cannot run {nprocs} ranks on the {found} TPUs here: {refusal}") from None
    configured = len(os.environ[_ADDRESSES].split(","))
    if configured != nprocs:  # torch_tpu never changes variables that are set
        raise UsageError(
            f"torch_tpu is configured for {configured} ranks in this kernel ({_ADDRESSES}): use {configured} ranks, or "
            f"restart the kernel for {nprocs}"
        )
