"""torch_xla in the rank: makes it a process of torch_xla's, by torch_xla's own functions, before the command runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from nbspawn._rank.info import RankInfo

if TYPE_CHECKING:
    import torch

# Which process and chip this is. torch_xla sets them where they are not set, and in a kernel they may be: for the whole
# machine by the host (Kaggle: TPU_PROCESS_ADDRESSES=local), or for one process by an earlier use of the device.
_STALE = (
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
    "TPU_VISIBLE_CHIPS",
    "TPU_PROCESS_PORT",
    "TPU_PROCESS_ADDRESSES",
    "CLOUD_TPU_TASK_ID",
)


_kept: list[object] = []
_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "scatter_", "gather_", "send", "recv_"),
    *("allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_"),
)


def initialise(info: RankInfo) -> None:
    """As torch_xla's launcher does in each of its processes. Afterwards ``info.ordinal`` and RANK are torch_xla's
    ordinal, which on a TPU need not follow the order of the processes.

    Raises RuntimeError where this process has several devices: torch_xla has a thread for each there, and a rank is a
    process.
    """
    for name in _STALE:
        os.environ.pop(name, None)
    # Only the host's number within a TPU of several hosts is told by CLOUD_TPU_TASK_ID, and there is one host.
    os.environ.setdefault("TPU_WORKER_ID", "0")
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    ranks = info.launch.world_size
    if ranks == 1:
        pjrt.initialize_singleprocess()
    else:
        pjrt.initialize_multiprocess(info.rank, ranks)
    devices = runtime.addressable_device_count()
    if devices > 1:
        raise RuntimeError(
            f"each process has {devices} XLA devices here (TPU v2 and v3 have two a chip, CPU_NUM_DEVICES sets them on "
            "the CPU), and a rank is one process for one device: use torch_xla.launch, which has a thread for each"
        )
    runtime._init_world_size_ordinal()
    if runtime.device_type() != "TPU":
        if ranks > 1:
            _refuse_collectives()
        return
    if runtime.world_size() != ranks:
        raise RuntimeError(
            f"torch_xla counts {runtime.world_size()} TPU devices, and there are {ranks} ranks: nbspawn runs on one "
            "host"
        )
    info.ordinal = runtime.global_ordinal()
    os.environ["RANK"] = os.environ["ROLE_RANK"] = str(info.ordinal)
    if info.ordinal != info.rank:
        print(f"torch_xla's ordinal, and with it `rank`, is {info.ordinal} here; {info.rank} is the local rank.")


def _refuse_collectives() -> None:
    """Have gloo's collectives refuse XLA tensors. torch_xla hands them CPU copies, and forgets the results: after an
    all_reduce each rank would find its own value, unchanged and without a word."""
    import torch

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            "XLA's device here has no collectives between processes: move the tensor to the CPU for the process group "
            "(tensor.cpu()), and back"
        )

    library = torch.library.Library("c10d", "IMPL")
    _kept.append(library)  # what it implements goes when it goes
    for name in _COLLECTIVES:
        library.impl(name, refuse, "XLA")


def backend() -> str:
    """'xla', or 'gloo' where XLA has no collectives between processes: a group of torch_xla's would return each rank's
    own values there as if they were sums."""
    from torch_xla import runtime

    return "xla" if runtime.device_type() == "TPU" or os.environ["WORLD_SIZE"] == "1" else "gloo"


def device() -> torch.device:
    """This process's."""
    import torch_xla

    found: torch.device = torch_xla.device()
    return found
