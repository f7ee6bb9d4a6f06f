"""``%ranks vars``: the variables of kept ranks, and where they differ."""

from __future__ import annotations

import re

from kernels import Kernel, ok

CELL = """%%spawn 3 --keep -m {method} --name trained
import threading, torch
class Batches:
    def __repr__(self): raise ZeroDivisionError
def helper(): pass
torch.manual_seed(0)
model, lr, batches = torch.nn.Linear(20, 2), 0.1, Batches()
loss = 0.25 * (1 + rank // 2)
history = [loss, batches]
x = torch.full((64, 10), float(rank))
if rank == 1: only = "here"
_hidden = 1"""


def test_variables_of_ranks(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(CELL.format(method=method)))
    try:
        shown = ok(kernel.execute("%ranks vars")).outputs[-1]["data"]
        title, *lines, how = shown["text/plain"].splitlines()
        assert title == "Variables of 3 ranks @trained" and "`%ranks diff NAME`" in how
        zeros = "Tensor 64×10 float32 cpu: min 0, mean 0, max 0"
        rows = [re.split(r"  +", line) for line in lines]
        assert rows == [
            ["device", "device(type='cpu')"],
            ["model", "Linear, 42 parameters, training"],
            ["lr", "0.1"],
            ["batches", "Batches"],
            ["loss", "0-1", "0.25"],
            ["", "2", "0.5"],
            ["history", "0-1", "[0.25, Batches]"],
            ["", "2", "[0.5, Batches]"],
            ["x", "0", zeros],
            *(["", str(rank), zeros.replace(" 0", f" {rank}")] for rank in (1, 2)),
            ["only", "0,2", "not there"],
            ["", "1", "'here'"],
        ], shown["text/plain"]
        assert "<table" in shown["text/html"] and "Linear, 42 parameters" in shown["text/html"]
    finally:
        ok(kernel.execute("%ranks stop"))


def test_of_ranks_that_are_busy(kernel: Kernel) -> None:
    cell = kernel.submit("%%spawn 2 --background\nimport time\nstep = 7\ntime.sleep(600)")
    cell.see(lambda: cell.reply.outputs and cell.reply.table["text/plain"].count("time.sleep") == 2, "they are there")
    try:
        assert "\nstep" in ok(kernel.execute("%ranks vars")).outputs[-1]["data"]["text/plain"]
    finally:
        ok(kernel.execute("%ranks stop"))
