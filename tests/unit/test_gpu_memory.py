"""What an error for want of GPU memory says of the kernel and of other ranks."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from nbspawn._accelerators.accelerator import Load
from nbspawn._notebook import gpu_memory
from nbspawn._process import reached
from nbspawn._process.tensors import Holding

FULL = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU {} has a total capacity of 15.00 GiB of"
GB = 10**9


def pool(used: int = 0, alive: bool = True, **options: Any) -> Any:
    """One whose two ranks use so many bytes of GPUs."""
    given = {"env": {}, "on": None, **options}
    return types.SimpleNamespace(
        options=types.SimpleNamespace(**given), alive=alive, memory=lambda: [(0, used, Load()), (0, -1, Load())]
    )


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, Holding]:
    """What the kernel holds of cuda:0, by variable: 6 GB in all."""
    found: dict[str, Holding] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 0 if gpu else 6 * GB)
    monkeypatch.setattr(reached, "by", lambda variables: types.SimpleNamespace(holdings=found))
    return found


def holds(name: str, size: int, *also: str, device: str = "cuda:0") -> Holding:
    return Holding(name, size, devices={device: size}, also=dict.fromkeys(also))


def advice(*errors: str, variables: str = "", sessions: Any = (), **options: Any) -> list[str]:
    space = dict.fromkeys(variables.split())
    return list(gpu_memory.advice(space, pool(**options), dict(sessions), errors))


def test_the_kernels_variables_are_named_with_what_frees_them(held: dict[str, Holding]) -> None:
    held.update(
        small=holds("small", GB // 100),
        batch=holds("batch", GB // 2),
        model=holds("model", 4 * GB, "optimizer"),
        local=holds("x in f()", GB),
        host=holds("host", 9 * GB, device="cpu"),
    )
    expected = (
        "The notebook's kernel itself holds 6.0 GB of cuda:0 (model 4.0 GB, x in f() 1.0 GB, batch 500 MB). "
        "To free that, run in the notebook {}, `torch.cuda.empty_cache()`; what the cell needs of it, make in the cell."
    )
    names = "small model optimizer batch host _ Out"
    found = advice("ValueError: GPU 0 has", FULL.format(0), FULL.format(1), variables=names)
    assert found == [expected.format("`del model, optimizer, batch`")]
    held["model"].also["Out"] = None
    found = advice(FULL.format(0), variables=names)
    assert found == [expected.format("`%reset -f out`, `%xdel model`, `%xdel optimizer`, `%xdel batch`")]


def test_memory_without_a_variable(held: dict[str, Holding]) -> None:
    expected = (
        "The notebook's kernel itself holds 6.0 GB of cuda:0. `torch.cuda.empty_cache()` in the notebook frees what is "
        "unused of it."
    )
    assert advice(FULL.format(0)) == [expected]


def test_nothing_is_said_that_is_not_known(held: dict[str, Holding], monkeypatch: pytest.MonkeyPatch) -> None:
    held["model"] = holds("model", 4 * GB)
    other = {"": pool(GB)}
    assert advice("RuntimeError: no", sessions=other) == []
    assert advice(FULL.format(1)) == [], "the kernel holds nothing of that GPU"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        assert advice(FULL.format(0), env={name: "1"}) == [], "another GPU than the kernel's of that number"
    assert advice(FULL.format(0), on="ray", sessions=other) == [], "another machine"
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: {}["active"])
    assert advice(FULL.format(0)) == [], "the user's own allocator"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert advice(FULL.format(0)) == []


def test_other_ranks_that_hold_some() -> None:
    own = pool(GB)
    sessions = {"": pool(2 * GB), "eval": pool(GB), "own": own, "cpu": pool(-1), "far": pool(GB, on="ray")}
    sessions["over"] = pool(GB, alive=False)
    assert list(gpu_memory.advice({}, own, sessions, [FULL.format(0)])) == [
        "Other ranks hold 2.0 GB of GPU memory: `%ranks stop` ends them.",
        "Other ranks @eval hold 1.0 GB of GPU memory: `%ranks stop @eval` ends them.",
    ]
