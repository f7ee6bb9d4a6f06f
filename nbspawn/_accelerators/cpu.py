"""No accelerator: ranks compute on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nbspawn._accelerators.accelerator import Accelerator, Unavailable

if TYPE_CHECKING:
    import torch


class Cpu(Accelerator):
    """The machine's processors: one rank on each core."""

    type, title, word = "cpu", "CPU", "cpu"
    backends = ("gloo",)

    def count(self, env: Mapping[str, str]) -> int:
        return 0

    def select(self, indices: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
        raise Unavailable("--devices selects GPUs, and these ranks have none")

    def initialise(self, rank: int, ranks: int) -> None:
        """There is nothing to be initialised."""

    def device(self, rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def is_used(self) -> bool:
        return False
