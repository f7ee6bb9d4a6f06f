"""The accelerator that a rank computes on: which it is, initialised before the command runs, and at rest after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nbspawn._accelerators import kinds
from nbspawn._accelerators.accelerator import Accelerator
from nbspawn._process.after_import import after_import
from nbspawn._rank.program import in_thread
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

if TYPE_CHECKING:
    import torch


_LATE = (
    "The device told it after the last line: which line has queued what failed is not known. With --env "
    "CUDA_LAUNCH_BLOCKING=1 each line waits for what it queues."
)


@contextmanager
def ready(info: RankInfo, channel: Channel) -> Iterator[None]:
    """Initialise what the ranks were started for. What torch is built for is left to the user's code."""
    name = info.launch.accelerator
    kinds.ranks_are_for(name)
    if name in ("", kinds.CPU.type):
        after_import("torch", lambda: _initialise(kinds.own(), info))
    else:
        _initialise(kinds.named(name), info)
    yield


def _initialise(accelerator: Accelerator, info: RankInfo) -> None:
    ordinal = accelerator.initialise(info.rank, info.launch.world_size)
    if ordinal is None:
        return
    info.ordinal = ordinal
    os.environ["RANK"] = os.environ["ROLE_RANK"] = str(ordinal)
    if ordinal != info.rank:
        print(f"torch_xla's ordinal, and with it `rank`, is {ordinal} here; {info.rank} is the local rank.")


def choose(info: RankInfo) -> torch.device:
    """This rank's device. No context is made."""
    return kinds.named(info.launch.accelerator).device(info.rank)


def settle() -> None:
    """Wait until what the command has queued on its device has ended. Raises the error of what fails there, and hears
    an interrupt."""
    accelerator = kinds.in_use()
    if accelerator is None:
        return
    try:
        in_thread.ends_within(-1, accelerator.synchronize)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(_LATE)
        raise
