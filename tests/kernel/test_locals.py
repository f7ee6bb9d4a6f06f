"""``--locals``: the variables of the frame that raised, in the error."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from kernels import Kernel

from nbspawn._rank.report.variables import summary

HALF = torch.tensor([[1.0, -1.0], [0.5, 0.0]])
MISSING = torch.tensor([1.0, float("nan"), 3.0])


class Raises:
    def __repr__(self) -> str:
        raise ValueError


class Several(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (HALF, "Tensor 2×2 float32 cpu: min -1, mean 0.125, max 1"),
        (HALF.bfloat16(), "Tensor 2×2 bfloat16 cpu: min -1, mean 0.125, max 1"),
        (HALF.double().requires_grad_(), "Tensor 2×2 float64 cpu: min -1, mean 0.125, max 1"),
        (torch.nn.Parameter(HALF), "Parameter 2×2 float32 cpu: min -1, mean 0.125, max 1"),
        (torch.arange(5), "Tensor 5 int64 cpu: min 0, mean 2, max 4"),
        (torch.tensor(3), "Tensor scalar int64 cpu: 3"),
        (HALF > 0, "Tensor 2×2 bool cpu: 2 of 4 True"),
        (MISSING, "Tensor 3 float32 cpu: has NaN (1 of 3)"),
        (torch.tensor([1.0, float("inf")]), "Tensor 2 float32 cpu: min 1, mean inf, max inf, has inf"),
        (torch.zeros(0, 3), "Tensor 0×3 float32 cpu, empty"),
        (torch.empty(3, device="meta"), "Tensor 3 float32 meta"),
        (torch.complex(HALF, HALF), "Tensor 2×2 complex64 cpu"),
        (HALF.to_sparse(), "Tensor 2×2 float32 cpu"),
        (HALF.to(torch.float8_e4m3fn), "Tensor 2×2 float8_e4m3fn cpu"),
        (HALF.as_subclass(Several), "Several 2×2 float32 cpu"),
        (np.array([[1.0, 2.0]]), "ndarray 1×2 float64: min 1, mean 1.5, max 2"),
        (np.array([1.0, np.nan]), "ndarray 2 float64: has NaN (1 of 2)"),
        (pd.DataFrame({"a": [1], "b": [2]}), "DataFrame 1×2: a, b"),
        (torch.nn.Linear(3, 4).eval(), "Linear, 16 parameters, evaluating"),
        ({"x": [HALF]}, "{'x': [Tensor 2×2 float32 cpu: min -1, mean 0.125, max 1]}"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
        ("two\nlines", r"'two\nlines'"),
    ],
)
def test_one_value(value: object, message: str) -> None:
    assert summary(value) == message


def test_a_value_is_one_line_of_bounded_length() -> None:
    assert len(summary("a" * 10_000)) < 100
    assert len(summary({f"key {n}" * 50: [MISSING] * 100 for n in range(100)})) <= 160
    assert "Raises" in summary(Raises())


CELL = """%%spawn 3 -b gloo -m {method} {options}
import torch, torch.distributed as dist
def loss(x, scale):
    y = x / scale
    many = list(range(10**6))
    assert not y.isnan().any()
x = torch.zeros(4, 2)
if rank == 1:
    loss(x, 0)
dist.barrier()"""

TOLD = """Variables of loss():
    x     = Tensor 4×2 float32 cpu: min 0, mean 0, max 0
    scale = 0
    y     = Tensor 4×2 float32 cpu: has NaN (8 of 8)
    many  = [0, 1, 2, 3, 4, 5, ...]
"""


def test_the_failing_function(kernel: Kernel, method: str) -> None:
    reply = kernel.execute(CELL.format(method=method, options="--locals"))
    assert reply.ename == "RankRaisedError" and "rank 1 of 3: AssertionError" in reply.traceback
    assert TOLD in reply.traceback
    assert reply.traceback.index("AssertionError:") < reply.traceback.index("Variables of")
    assert "Variables of" not in kernel.execute(CELL.format(method=method, options="")).traceback


def test_a_line_of_the_cell_tells_what_it_names(kernel: Kernel, method: str) -> None:
    reply = kernel.execute(
        f"%%spawn 1 -m {method} --locals\nimport json\nunused, d = 1, {{'a': [1]}}\njson.loads(d['b'])"
    )
    assert "Variables of the failing line:\n    d = {'a': [1]}\n" in reply.traceback


def test_library_frames_are_passed_over(kernel: Kernel, method: str) -> None:
    reply = kernel.execute(
        f"%%spawn 1 -m {method} --locals\nimport json\ndef read(text):\n    return json.loads(text)\nread('[1,')"
    )
    assert "JSONDecodeError" in reply.traceback and "Variables of read():\n    text = '[1,'\n" in reply.traceback


def test_a_function_that_spawn_runs(kernel: Kernel, method: str) -> None:
    cell = f"""import nbspawn
def main(rank, width):
    height = [rank]
    return width / (rank - 1)
try:
    nbspawn.spawn(main, (3,), nprocs=2, start_method={method!r}, show_locals=True)
except nbspawn.RankRaisedError as error:
    told = str(error)
told"""
    reply = kernel.execute(cell)
    assert reply.status == "ok", reply
    message = kernel.value("told")
    assert "Variables of main():\n    rank   = 1\n    width  = 3\n    height = [1]\n" in message
