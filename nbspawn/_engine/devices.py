"""Resolves the device options: the number of ranks, the backend of their process group, and the GPUs that they see.

Without touching an accelerator's runtime (_accelerators/ tells why).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from nbspawn._accelerators import kinds, tpu
from nbspawn._accelerators.accelerator import Accelerator, Unavailable
from nbspawn._accelerators.kinds import ASKED_FOR, BACKENDS, TPU, WORDS, XLA
from nbspawn._engine.launch import cores
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.launch import MARK
from nbspawn.errors import UsageError

_BY_THEMSELVES = (*XLA.backends, *TPU.backends)
"""Backends that no torch has by itself."""


def resolve(options: LaunchOptions) -> LaunchOptions:
    """The options with everything that depends on the machine: the number of ranks for one of WORDS, the backend for
    'auto', the environment variables for ``devices``, and the accelerator.

    Raises UsageError for devices and backends that are not available, and for options that exclude each other.
    """
    _check_environment(options.env)
    if options.backend is not None:
        options = replace(options, backend=str(options.backend).lower())  # as torch does
    if options.on is not None:
        if options.backend in _BY_THEMSELVES:
            raise UsageError(f"-b {options.backend} is for ranks on this machine")
        return options
    try:
        return _on_this_machine(options)
    except Unavailable as refusal:
        raise UsageError(str(refusal)) from None


def _on_this_machine(options: LaunchOptions) -> LaunchOptions:
    nprocs, backend = options.nprocs, options.backend
    env = {**os.environ, **options.env}
    accelerator = _accelerator(nprocs, backend, env)
    if options.devices is not None:
        options = replace(options, env={**options.env, **accelerator.select(options.devices, env)}, devices=None)
        env.update(options.env)
    # To count may take seconds: not for who gives the number of ranks, and no backend that needs GPUs.
    found = accelerator.count(env) if isinstance(nprocs, str) or backend not in (None, "gloo") else 0
    if nprocs == "gpu" and not found:
        other = kinds.unserved()
        why = f"torch has {other} devices here, which nbspawn does not serve" if other else "torch finds no GPU"
        raise UsageError(f"{why} on this machine: give a number of ranks, or cpu")
    ranks = (found or cores()) if isinstance(nprocs, str) else nprocs
    if backend == "auto":
        best = accelerator.backends[0]
        fits = best in _BY_THEMSELVES or (1 <= ranks <= found and best in _available())
        backend = best if fits else "gloo"
    elif backend is not None and backend not in _BY_THEMSELVES:
        for name in _named(backend):
            _check_devices(name, ranks, found, accelerator)
            _check_backend(name)
    asked = accelerator.type if accelerator.type in ASKED_FOR else ""
    return replace(options, nprocs=ranks, backend=backend, accelerator=asked)


def _accelerator(nprocs: int | str, backend: str | None, env: Mapping[str, str]) -> Accelerator:
    if isinstance(nprocs, str) and nprocs not in WORDS:
        raise UsageError(f"{nprocs!r} is neither a number of ranks nor one of {', '.join(WORDS)}")
    by_backend = BACKENDS.get(backend or "")
    if by_backend and nprocs in ("cpu", "gpu", "tpu", "xla") and nprocs != by_backend.word:
        raise UsageError(f"{backend} is no backend for {nprocs}: use -b auto, which chooses the right one")
    if backend in _BY_THEMSELVES:
        return BACKENDS[backend]
    if nprocs in ASKED_FOR:
        return ASKED_FOR[nprocs]
    own = kinds.own()
    if nprocs == "auto" and backend in (None, "auto") and not own.count(env) and tpu.chips():
        return next((one for one in (TPU, XLA) if one.is_built()), own)
    return own


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


def _check_devices(name: str, ranks: int, found: int, accelerator: Accelerator) -> None:
    """Raises UsageError if the backend needs a GPU for each rank and there are fewer."""
    if name not in BACKENDS:
        return
    if name not in accelerator.backends:
        raise UsageError(
            f"{name} needs GPUs, and this torch is built without {BACKENDS[name].title}: use -b gloo (or auto)"
        )
    if not found:
        raise UsageError(f"{name} needs GPUs, and torch finds none on this machine: use -b gloo (or auto)")
    if found < ranks:
        raise UsageError(
            f"{name} needs one GPU per rank: there are {ranks} ranks and {found} visible GPUs. Use -b gloo, or "
            "`gpu` for one rank per GPU"
        )


def _check_backend(name: str) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        raise UsageError("this torch is built without torch.distributed: ranks cannot have a process group")
    there = _available()
    if name not in there:
        known = name in dist.Backend.backend_list and name != dist.Backend.UNDEFINED
        wrong = f"this torch is built without {name}" if known else f"torch has no backend {name!r:.60}"
        raise UsageError(f"{wrong}: use {', '.join(there)}, xla (torch_xla), tpu_dist (torch_tpu), or auto")


def _available() -> list[str]:
    """The backends that this torch has."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    known = [one for one in dist.Backend.backend_list if one != dist.Backend.UNDEFINED]
    return [one for one in known if dist.is_backend_available(one)]
