"""torch_xla in the kernel: how many ranks it can run, what they need, and what it cannot do.

Ranks are what torch_xla's own processes are (torch_xla/_internal/pjrt.py): one per TPU chip, or a single one. Nothing
here imports torch_xla.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping

import torch

from nbspawn._engine import fork_safety, tpu
from nbspawn.errors import StartError, UsageError

BACKEND = "xla"
PACKAGE = "torch_xla"
_DEVICE = "PJRT_DEVICE"
_LAST = (2, 9)  # no release for a later torch: https://github.com/pytorch/xla/issues/9684


def installed() -> bool:
    """Is torch_xla installed?"""
    return importlib.util.find_spec(PACKAGE) is not None


def check() -> None:
    """Raises UsageError if torch_xla is not installed, or is for another version of torch: its import would fail with
    the name of a C++ symbol."""
    ours = _minor(torch.__version__)
    if not installed():
        if ours > _LAST:
            last = ".".join(map(str, _LAST))
            to_do = f"its last version is for torch {last}. torch_tpu follows it (%%spawn tpu, Python 3.13). Else"
        else:
            to_do = "`pip install torch_xla`, or"
        raise UsageError(f"torch_xla is not installed in this environment: {to_do} give a number of ranks, or cpu")
    version = importlib.metadata.version(PACKAGE)
    if _minor(version) != ours:
        raise UsageError(
            f"torch_xla {version} does not load with torch {torch.__version__}: both need the same minor version"
        )


def device_type(env: Mapping[str, str]) -> str:
    """'TPU', 'CPU', ...: PJRT_DEVICE, or what torch_xla would set it to."""
    return env.get(_DEVICE, "").partition("_")[0] or ("TPU" if tpu.chips() else "CPU")


def count(env: Mapping[str, str]) -> int:
    """One rank per TPU chip; one on any other device."""
    return max(1, tpu.chips()) if device_type(env) == "TPU" else 1


def prepare(nprocs: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that ``nprocs`` ranks need in addition to ``env``.

    Raises UsageError if torch_xla cannot run this number of ranks, StartError if this process holds the TPU.
    """
    check()
    kind = device_type(env)
    if kind == "TPU":
        found = count(env)
        if nprocs not in (1, found):
            runs_on = (
                f"all {found} TPU chips of this machine, or on one" if found > 1 else "the one TPU chip of this machine"
            )
            raise UsageError(f"torch_xla runs on {runs_on}, got {nprocs} ranks: use xla for the number of ranks")
        runtime = sys.modules.get("_XLAC")
        if runtime is not None and runtime._xla_runtime_is_initialized():
            raise StartError(fork_safety.holds_the_tpu("xla"))
    return {_DEVICE: env.get(_DEVICE, kind)}


def note(nprocs: int, env: Mapping[str, str], backend: str | None) -> str:
    """A warning for the view; '' for none."""
    if nprocs == 1 or device_type(env) == "TPU":
        return ""
    group = "; the process group is gloo's, and takes CPU tensors" if backend == BACKEND else ""
    return (
        f"XLA's {device_type(env)} device has no collectives between processes: to torch_xla each rank is alone "
        f"(xm.all_reduce returns its own value, xm.optimizer_step averages nothing){group}."
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
