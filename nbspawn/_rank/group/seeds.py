"""The random numbers of a rank: other ones in each rank and each run, as in any new process, or those of ``--seed``."""

from __future__ import annotations

import random
import sys
from typing import Any

from nbspawn._process.after_import import after_import
from nbspawn._protocol.launch import LARGEST_SEED
from nbspawn._rank.program.info import RankInfo


def seed_generators(info: RankInfo) -> None:
    """Seed the global generators of ``random``, numpy and torch. A rank is a copy of the kernel or of the fork server,
    and would have their numbers: the same in all ranks, or in all runs.

    With a seed N, rank r gets N + r: a run repeats itself, and its ranks differ. numpy is seeded when it is imported.
    """
    chosen = info.launch.seed
    seed = None if chosen is None else (chosen + info.ordinal) % (LARGEST_SEED + 1)
    random.seed(seed)
    generator = _torchs_generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    if seed is not None or "numpy.random" in sys.modules:
        after_import("numpy.random", lambda: sys.modules["numpy.random"].seed(seed))


def _torchs_generator() -> Any:
    """torch itself, which seeds every device, or where it was built for none the CPU's generator: to seed a device that
    has not been used, torch writes down the stack (4 ms in all)."""
    torch: Any = sys.modules["torch"]
    accelerator = getattr(torch, "accelerator", None)  # since 2.6
    return torch if accelerator is None or accelerator.current_accelerator() else torch.default_generator
