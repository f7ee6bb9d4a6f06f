"""Which modules a job will import, by its code and by what it is sent."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from nbspawn._payload import imported, packing

LATE = "torch._dynamo"


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("x = 1 + rank", set()),
        ("import os.path as p, json\nfrom a.b import c", {"os.path", "json", "a.b"}),
        ("def f():\n    class A:\n        def g(self):\n            import deep", {"deep"}),
        ("opt = torch.optim.SGD(model.parameters(), lr=0.1)", {LATE}),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", {LATE, "torch.nn.parallel"}),
        ("from __future__ import annotations\nawait f()", {"__future__"}),
        ("model(batch).sum().backward()", set()),
        ("import json json", set()),
        ("import json\0", set()),
    ],
)
def test_by_the_text_of_a_cell(text: str, modules: set[str]) -> None:
    assert imported.by_source(text) == modules


def step() -> object:
    from torch.distributed import fsdp

    return fsdp, DDP, torch.nn.Linear


def test_by_what_is_packed() -> None:
    """By the code of functions that travel, and by the names of what is imported for it."""
    namespace = {"torch": torch, "DDP": DDP, "__name__": "__main__"}
    sent = types.FunctionType(step.__code__, namespace, "step")
    sent.__module__ = "__main__"
    with packing.pack_variables({"step": sent, "layer": torch.nn.Linear(1, 1)}, namespace=namespace) as packed:
        assert {"torch", "torch.distributed", "torch.nn.parallel.distributed"} <= packed.modules
        assert "torch.nn.modules.linear" in packed.modules and "torch.optim" not in packed.modules
    sent.__module__ = None  # type: ignore[assignment]
    with packing.pack({"step": sent}, namespace) as packed:
        assert all(isinstance(name, str) for name in packed.modules)
    with packing.pack({"layer": torch.nn.Linear(1, 1)}) as packed:
        assert LATE not in imported.with_late(packed.modules)


def test_what_torch_imports_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a module of the user's own, which is imported by its name: by what that has."""
    for name in ("torch.optim.sgd", "torch.distributed.fsdp", "accelerate", "transformers.trainer"):
        assert LATE in imported.with_late([name]), name
    assert imported.with_late(["torch.nn", "torch.optimal", "numpy"]) == {"torch.nn", "torch.optimal", "numpy"}
    own = types.ModuleType("training_of_mine")
    own.__file__ = str(tmp_path / "training_of_mine.py")
    monkeypatch.setitem(sys.modules, "training_of_mine", own)
    assert imported.with_late(["training_of_mine"]) == {"training_of_mine"}
    own.optim = torch.optim  # type: ignore[attr-defined]
    own.odd = types.ModuleType("odd")  # type: ignore[attr-defined]
    del own.odd.__name__
    assert imported.with_late(["training_of_mine"]) == {"training_of_mine", "torch.optim", LATE}
