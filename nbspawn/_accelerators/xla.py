"""XLA by torch_xla: how many ranks it can run, what they need, what it cannot do, and a rank's start.

Ranks are what torch_xla's own processes are (torch_xla/_internal/pjrt.py): one per TPU chip, or a single one. Nothing
here imports torch_xla in the kernel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from nbspawn._accelerators import tpu
from nbspawn._accelerators.accelerator import Accelerator, Unavailable

if TYPE_CHECKING:
    import torch

_DEVICE = "PJRT_DEVICE"
_LAST = (2, 9)  # no release for a later torch: https://github.com/pytorch/xla/issues/9684

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


class Xla(Accelerator):
    """torch_xla's."""

    type = title = word = "xla"
    backends = ("xla",)
    packages = ("torch_xla",)

    def is_built(self) -> bool:
        return importlib.util.find_spec("torch_xla") is not None

    def count(self, env: Mapping[str, str]) -> int:
        """TPU chips; one on any other device. Raises Unavailable if torch_xla is not installed, or is for another
        version of torch: its import would fail with the name of a C++ symbol."""
        self._check()
        return max(1, tpu.chips()) if device_type(env) == "TPU" else 1

    def _check(self) -> None:
        import torch

        ours = _minor(torch.__version__)
        if not self.is_built():
            if ours > _LAST:
                last = ".".join(map(str, _LAST))
                to_do = f"its last version is for torch {last}. torch_tpu follows it (%%spawn tpu, Python 3.13). Else"
            else:
                to_do = "`pip install torch_xla`, or"
            raise Unavailable(f"torch_xla is not installed in this environment: {to_do} give a number of ranks, or cpu")
        version = importlib.metadata.version("torch_xla")
        if _minor(version) != ours:
            raise Unavailable(
                f"torch_xla {version} does not load with torch {torch.__version__}: both need the same minor version"
            )

    def select(self, indices: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
        raise Unavailable("--devices selects GPUs: torch_xla assigns a TPU to each rank itself")

    def prepare(self, nprocs: int, env: Mapping[str, str]) -> dict[str, str]:
        kind, found = device_type(env), self.count(env)
        if kind == "TPU" and nprocs not in (1, found):
            runs_on = (
                f"all {found} TPU chips of this machine, or on one" if found > 1 else "the one TPU chip of this machine"
            )
            raise Unavailable(f"torch_xla runs on {runs_on}, got {nprocs} ranks: use xla for the number of ranks")
        return {_DEVICE: env.get(_DEVICE, kind)}

    def note(self, nprocs: int, env: Mapping[str, str], backend: str | None) -> str:
        if nprocs == 1 or device_type(env) == "TPU":
            return ""
        group = "; the process group is gloo's, and takes CPU tensors" if backend in self.backends else ""
        return (
            f"XLA's {device_type(env)} device has no collectives between processes: to torch_xla each rank is alone "
            f"(xm.all_reduce returns its own value, xm.optimizer_step averages nothing){group}."
        )

    def is_held(self, env: Mapping[str, str]) -> bool:
        runtime = sys.modules.get("_XLAC")
        return device_type(env) == "TPU" and runtime is not None and runtime._xla_runtime_is_initialized()

    def initialise(self, rank: int, ranks: int) -> int | None:
        """Make this process one of torch_xla's, as its launcher does. Its ordinal may differ on a TPU from the order of
        the processes.

        Raises RuntimeError if this process has several devices: torch_xla then has a thread for each, but a rank is a
        process.
        """
        for name in _STALE:
            os.environ.pop(name, None)
        # CLOUD_TPU_TASK_ID only gives the host's number within a TPU of several hosts, and there is one host.
        os.environ.setdefault("TPU_WORKER_ID", "0")
        from torch_xla import runtime
        from torch_xla._internal import pjrt

        if ranks == 1:
            pjrt.initialize_singleprocess()
        else:
            pjrt.initialize_multiprocess(rank, ranks)
        devices = runtime.addressable_device_count()
        if devices > 1:
            raise RuntimeError(
                f"each process has {devices} XLA devices here (TPU v2 and v3 have two per chip, CPU_NUM_DEVICES sets "
                "them on the CPU), but a rank is one process for one device: use torch_xla.launch, which has a thread "
                "for each"
            )
        runtime._init_world_size_ordinal()
        if runtime.device_type() != "TPU":
            if ranks > 1:
                _refuse_collectives()
            return None
        if runtime.world_size() != ranks:
            raise RuntimeError(
                f"torch_xla counts {runtime.world_size()} TPU devices, and there are {ranks} ranks: nbspawn runs on "
                "one host"
            )
        return int(runtime.global_ordinal())

    def backend(self, asked: str) -> str:
        """gloo's where XLA has no collectives between processes: a torch_xla group would return each rank's own values
        there as if they were sums."""
        from torch_xla import runtime

        return asked if asked != "xla" or runtime.device_type() == "TPU" or os.environ["WORLD_SIZE"] == "1" else "gloo"

    def device(self, rank: int) -> torch.device:
        import torch_xla

        found: torch.device = torch_xla.device()
        return found

    def is_used(self) -> bool:
        return False  # torch_xla waits by itself


def device_type(env: Mapping[str, str]) -> str:
    """'TPU', 'CPU', ...: PJRT_DEVICE, or what torch_xla would set it to."""
    return env.get(_DEVICE, "").partition("_")[0] or ("TPU" if tpu.chips() else "CPU")


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


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
