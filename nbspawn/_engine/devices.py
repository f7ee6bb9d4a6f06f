"""Resolves the device options: the number of ranks, and the backend of their process group.

Without touching an accelerator's runtime: a kernel that has initialised CUDA cannot fork ranks, and a kernel that has
initialised a TPU holds it: no rank can use it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nbspawn._engine import tpu, xla
from nbspawn._engine.launch import cores
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.launch import MARK
from nbspawn.errors import UsageError

WORDS = ("auto", "cpu", "gpu", "tpu", "xla")
_BACKENDS = {"xla": xla.BACKEND, "tpu": tpu.BACKENDS[0]}


def resolve(options: LaunchOptions) -> LaunchOptions:
    """The options with everything that depends on the machine: the number of ranks for one of WORDS, the backend for
    'auto', and the accelerator to initialise.

    Raises UsageError for devices and backends that are not available, and for options that exclude each other.
    """
    nprocs, backend, visible = options.nprocs, options.backend, options.devices
    _check_environment(options.env)
    if backend is not None:
        backend = str(backend).lower()  # as torch does
    if options.on is not None:
        if backend in (xla.BACKEND, *tpu.BACKENDS):
            raise UsageError(f"-b {backend} is for ranks on this machine")
        return replace(options, backend="gloo" if backend == "auto" else backend)
    env = {**os.environ, **options.env}
    accelerator = _accelerator(nprocs, backend)
    if nprocs == "auto" and backend in (None, "auto") and not _gpus(visible) and tpu.chips():
        accelerator = "tpu" if tpu.installed() else "xla" if xla.installed() else ""
    if accelerator == "xla":
        xla.check()
        found = xla.count(env)
    elif accelerator == "tpu":
        found = tpu.count()
    else:
        found = _gpus(visible)
    if accelerator and visible is not None:
        raise UsageError(f"--devices selects GPUs: torch_{accelerator} assigns a TPU to each rank itself")
    if nprocs == "gpu" and not found:
        raise UsageError("torch finds no GPU on this machine: give a number of ranks, or cpu")
    ranks = cores() if nprocs == "cpu" else (found or cores()) if isinstance(nprocs, str) else nprocs
    if backend == "auto":
        backend = _BACKENDS.get(accelerator) or ("nccl" if nprocs != "cpu" and 1 <= ranks <= found else "gloo")
    elif backend is not None and backend not in (xla.BACKEND, *tpu.BACKENDS):
        for name in _named(backend):
            if name == "nccl":
                _check_nccl(ranks, found)
            _check_backend(name)
    return replace(options, nprocs=ranks, backend=backend, accelerator=accelerator or "cpu" * (nprocs == "cpu"))


def _accelerator(nprocs: int | str, backend: str | None) -> str:
    by_backend = "xla" if backend == xla.BACKEND else "tpu" if backend in tpu.BACKENDS else ""
    if isinstance(nprocs, str) and nprocs not in WORDS:
        raise UsageError(f"{nprocs!r} is neither a number of ranks nor one of {', '.join(WORDS)}")
    by_number = nprocs if isinstance(nprocs, str) and nprocs in _BACKENDS else ""
    if by_backend and nprocs in ("cpu", "gpu", "tpu", "xla") and nprocs != by_backend:
        raise UsageError(f"{backend} is no backend for {nprocs}: use -b auto, which chooses the right one")
    return by_backend or by_number


_OWN = ("RANK", "LOCAL_RANK", "ROLE_RANK")
_OURS = (MARK,)  # by which what a rank has left behind is found


def _check_environment(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(f"{name!r:.60} cannot be the name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(f"the environment variable {name} must be text without NUL, got {value!r:.60}")
        if name in _OURS:
            raise UsageError(f"{name} is set by nbspawn itself")
        if name in _OWN:
            raise UsageError(f"{name} differs by rank: it cannot be set for all of them")
    port = env.get("MASTER_PORT")
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        raise UsageError(f"MASTER_PORT must be between 1 and 65535, got {port!r:.60}")


def _named(backend: str) -> list[str]:
    """The backends in the option: 'gloo' and 'nccl' in 'cpu:gloo,cuda:nccl', one for each device type."""
    if ":" not in backend:
        return [backend]
    pairs = [part.split(":") for part in backend.split(",")]
    kinds = {pair[0] for pair in pairs if len(pair) == 2 and _is_device(pair[0])}
    if len(kinds) < len(pairs):
        raise UsageError(
            f"{backend!r:.60} does not name one backend for each device type: write it as cpu:gloo,cuda:nccl"
        )
    return [name for _, name in pairs]


def _is_device(kind: str) -> bool:
    import torch

    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def _check_backend(name: str) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        raise UsageError("this torch is built without torch.distributed: ranks cannot have a process group")
    known = [one for one in dist.Backend.backend_list if one != dist.Backend.UNDEFINED]
    there = [one for one in known if dist.is_backend_available(one)]
    if name not in there:
        wrong = f"this torch is built without {name}" if name in known else f"torch has no backend {name!r:.60}"
        raise UsageError(f"{wrong}: use {', '.join(there)}, xla (torch_xla), tpu_dist (torch_tpu), or auto")


def _gpus(visible: Sequence[int] | None) -> int:
    found = gpus()
    return found if visible is None else min(found, len(visible))


def _check_nccl(ranks: int, found: int) -> None:
    import torch

    if torch.version.cuda is None:
        raise UsageError("nccl needs GPUs, and this torch is built without CUDA: use -b gloo (or auto)")
    if 0 < found < ranks:
        raise UsageError(
            f"nccl needs one GPU per rank: there are {ranks} ranks and {found} visible GPUs. Use -b gloo, or "
            "`gpu` for one rank per GPU"
        )


def gpus() -> int:
    """The number of CUDA devices that ranks would see, from NVML. ``torch.cuda.device_count()`` can initialise CUDA in
    the kernel, and then no forked rank could use it."""
    import torch

    if torch.version.cuda is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    return max(0, torch.cuda._device_count_nvml())
