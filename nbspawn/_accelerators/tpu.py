"""TPUs by torch_tpu: how many chips this machine has, and what the process needs that starts the ranks.

torch_tpu is TorchTPU, which replaces torch_xla: device ``tpu``, backend ``tpu_dist``
(https://github.com/google-pytorch/torch_tpu).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbspawn._accelerators.accelerator import Accelerator, Unavailable

if TYPE_CHECKING:
    import torch

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


class Tpu(Accelerator):
    """torch_tpu's."""

    type = title = word = "tpu"
    backends = ("tpu_dist", "tpu")

    def is_built(self) -> bool:
        return importlib.util.find_spec("torch_tpu") is not None

    def count(self, env: Mapping[str, str]) -> int:
        """The number of chips that torch_tpu can use. Raises Unavailable where it can use none."""
        if not self.is_built():
            raise Unavailable(
                "torch_tpu is not installed in this environment: `pip install torch_tpu`, on a machine with a TPU"
            )
        import torch

        device = torch.accelerator.current_accelerator()
        found = torch.accelerator.device_count() if device is not None and device.type == "tpu" else 0
        if not found:
            raise Unavailable(
                "torch_tpu finds no TPU on this machine: give a number of ranks without -b tpu_dist, or gpu, or cpu"
            )
        return found

    def select(self, indices: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
        raise Unavailable("--devices selects GPUs: torch_tpu assigns a TPU to each rank itself")

    def prepare(self, nprocs: int, env: Mapping[str, str]) -> dict[str, str]:
        """The environment that torch_tpu's documentation prescribes for the launching process, which sets it."""
        import torch

        found = self.count(env)
        runtime: Any = torch.tpu  # type: ignore[attr-defined]
        before = dict(os.environ)
        try:
            runtime.distributed.set_tpu_launch_env(nproc_per_node=nprocs)
        except (ValueError, RuntimeError) as refusal:
            raise Unavailable(f"torch_tpu cannot run {nprocs} ranks on the {found} TPUs here: {refusal}") from None
        configured = len(os.environ[_ADDRESSES].split(","))
        if configured != nprocs:  # torch_tpu never changes variables that are set
            raise Unavailable(
                f"torch_tpu is configured for {configured} ranks in this kernel ({_ADDRESSES}): use {configured} "
                f"ranks, or restart the kernel for {nprocs}"
            )
        return {name: value for name, value in os.environ.items() if before.get(name) != value}

    def is_held(self, env: Mapping[str, str]) -> bool:
        return self.is_used()

    def initialise(self, rank: int, ranks: int) -> None:
        """torch_tpu does it by itself."""

    def device(self, rank: int) -> torch.device:
        import torch

        return torch.device("tpu")

    def synchronize(self) -> None:
        """torch_tpu's calls are not known to be queued."""
