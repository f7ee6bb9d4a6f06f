"""A rank that waits for its GPU, where collectives are queued. Of a GPU there are only the signs here: an asynchronous
call of gloo that the recorder has as NCCL's, and a call into C that spins without Python's lock, as loss.item() does.
"""

from __future__ import annotations

import pytest
import torch
from kernels import Cell, Kernel, ok
from packaging.version import Version

pytestmark = pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch has no recorder for gloo")

GPU = """
import hashlib, time, torch, torch.distributed as dist
def as_on_a_gpu():
    c10d = torch._C._distributed_c10d
    c10d._dump_nccl_trace = vars(c10d).pop("_dump_fr_trace")
    torch.cuda.is_initialized = lambda: True
def item():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
QUEUED = """%%spawn 3 -b gloo -g 1 {options}
as_on_a_gpu()
x = torch.ones(4)
dist.all_reduce(x)
if rank != 1:
    work = dist.all_reduce(x, async_op=True)
    print("queued")
    item()
time.sleep(600)"""
SENTENCE = (
    "Collective 2 of the default group, all_reduce float32[4] (line 6): ranks 0 and 2 are in it, "
    "rank 1 has not reached it (last call: 1, all_reduce) and is at line 9: time.sleep(600)."
)


def queued(kernel: Kernel, options: str = "", cell: str = QUEUED) -> Cell:
    ok(kernel.execute(GPU))
    return kernel.submit(cell.format(options=options)).until("queued")


def rows(cell: Cell) -> str:
    text: str = cell.reply.table["text/plain"]
    return text


def test_the_usual_hang(kernel: Kernel) -> None:
    cell = queued(kernel)
    cell.see(lambda: "have waited" in rows(cell), "ranks wait")
    table = rows(cell)
    assert "waiting for its GPU " in table and "8  item()" in table, table
    assert " s at line 8 (item()) for their GPUs. " + SENTENCE in cell.reply.table["text/html"]
    kernel.interrupt()
    reply = cell.wait()
    assert reply.traceback.count(SENTENCE) == 1, str(reply)


def test_the_host_is_a_hundred_calls_ahead(kernel: Kernel) -> None:
    """The first call that has not ended is told, not the last ones."""
    works = "    works = [dist.all_reduce(x, async_op=True) for _ in range(100)]"
    ahead = QUEUED.replace("    work =", f"{works}\n    work =")
    cell = queued(kernel, cell=ahead)
    cell.see(lambda: "have waited" in rows(cell), "ranks wait")
    assert "Collective 2 of the default group, all_reduce float32[4] (line 6): ranks 0 and 2 are in it" in rows(cell)
    kernel.interrupt()
    cell.wait()


def test_what_it_did_when(kernel: Kernel) -> None:
    """Its time has a colour and a letter of its own; that of a rank that sleeps, for all that is queued, has not."""
    cell = """%%spawn 2 -b gloo -o out --profile
import ctypes
as_on_a_gpu()
x = torch.ones(4)
dist.all_reduce(x)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    ctypes.CDLL(None).usleep(3_500_000)
    time.sleep(3.5)
    work.wait()
else:
    time.sleep(7)
    dist.all_reduce(x)"""
    ok(kernel.execute(GPU))
    reply = ok(kernel.execute(cell))
    told = kernel.value("[(row['rank'], row['line'], row['waiting']) for row in out.timeline if row['device']]")
    assert set(told) == {(0, 8, False)}
    assert "dark, °, g: for its GPU" in reply.table["text/plain"] and " °" in reply.table["text/plain"]
