"""torch_xla in the rank: initialises the process by torch_xla's own functions, before the command runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from nbspawn._rank.info import RankInfo

if TYPE_CHECKING:
    import torch

# Which process and chip this is. torch_xla sets these if they are not set. In a kernel they may be: for the whole
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
    """Initialise as torch_xla's launcher does in each of its processes. Afterwards ``info.ordinal`` and RANK are
    torch_xla's ordinal, which on a TPU may differ from the order of the processes.

    Raises RuntimeError if this process has several devices: torch_xla then has a thread for each, but a rank is a
    process.
    """
    for name in _STALE:
        os.environ.pop(name, None)
    # CLOUD_TPU_TASK_ID only gives the host's number within a TPU of several hosts, and there is one host.
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
            f"each process has {devices} XLA devices here (TPU v2 and v3 have two per chip, CPU_NUM_DEVICES sets them "
            "on the CPU), but a rank is one process for one device: use torch_xla.launch, which has a thread for each"
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
    """Have gloo's collectives refuse XLA tensors. torch_xla passes CPU copies to them, and drops the results: after an
    all_reduce each rank would silently have its own value, unchanged."""
    import torch

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            "XLA's device here has no collectives between processes: move the tensor to the CPU for the process group "
            "(tensor.cpu()), and back"
        )

    library = torch.library.Library("c10d", "IMPL")
    _kept.append(library)  # its kernels are unregistered when it is deleted
    for name in _COLLECTIVES:
        library.impl(name, refuse, "XLA")


def backend() -> str:
    """'xla', or 'gloo' where XLA has no collectives between processes: a torch_xla group would return each rank's own
    values there as if they were sums."""
    from torch_xla import runtime

    return "xla" if runtime.device_type() == "TPU" or os.environ["WORLD_SIZE"] == "1" else "gloo"


def device() -> torch.device:
    """The device of this process."""
    import torch_xla

    found: torch.device = torch_xla.device()
    return found
