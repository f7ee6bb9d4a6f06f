"""Where every rank stands, in a real kernel: when the time is out, at the second Stop, when nothing moves."""

from __future__ import annotations

import re

import pytest
from kernels import Kernel, ok, plain
from users import User

GIL = """%%spawn 3 -b gloo -g 1 {options}
import collections, itertools, threading, torch.distributed as dist
def stuck(n):
    return collections.deque(itertools.repeat(0, n), 0)
if rank == 1:
    stuck(10**12)
threading.Thread(target=threading.Event().wait, args=(600,), name="loader", daemon=True).start()
dist.barrier()"""


def test_stacks_of_all_ranks_one_of_them_holds_the_gil(kernel: Kernel) -> None:
    user = User(kernel, GIL.format(options=""))
    user.see_controls()
    user.until(lambda: user.cell.reply.table["text/plain"].count("waiting") == 2, "ranks 0 and 2 wait")
    user.click("Stacks")
    user.until(lambda: user.cell.reply.stacks, "they are shown")
    user.click("Stop")
    [shown] = user.cell.reply.stacks
    text = plain(shown["text/plain"])
    assert "Ranks 0 and 2, waiting" in text and "Rank 1:" in text, text
    waiting, holding = text.index("Ranks 0 and 2, waiting"), text.index("Rank 1:")
    number = re.search(r"Cell In\[(\d+)\]", text)[1]  # type: ignore[index]
    assert waiting < text.index(f"Cell In[{number}], line 8\n      dist.barrier()") < holding
    assert "torch/distributed/distributed_c10d.py" in text[:holding] and "thread loader: " in text[:holding]
    assert f"Cell In[{number}], line 6\n      stuck(10**12)" in text[holding:]
    assert f"Cell In[{number}], line 4, in stuck\n" in text[holding:]
    assert "nbspawn" not in text and "interactiveshell" not in text
    assert "<details open>" in shown["text/html"] and "1 other thread" in shown["text/html"]
    user.cell.wait()


@pytest.mark.extended
def test_stacks_when_the_time_is_out_with_and_without_native_frames(kernel: Kernel) -> None:
    imports = "from nbspawn._engine.run import native_stacks\nfrom nbspawn._state import stall"
    ok(kernel.execute(f"{imports}\nfound = native_stacks._py_spy\nstall._STUCK = 1"))
    try:
        for absent in (False, True):
            if absent:
                ok(kernel.execute("native_stacks._py_spy = lambda: None"))
            reply = kernel.execute(GIL.format(options="-t 2"))
            waiting, _, holding = reply.traceback.partition("Rank 1:")
            assert reply.ename == "RunTimeoutError" and "Ranks 0 and 2, waiting" in waiting
            assert ("native: c10d::Work::wait (libtorch_cpu.so)" in waiting) is not absent
            assert "dist.barrier()" in waiting and "in stuck\n" in holding
    finally:
        ok(kernel.execute("native_stacks._py_spy, stall._STUCK = found, 10.0"))


def test_only_who_asks_for_it_halts_ranks_that_work(kernel: Kernel) -> None:
    """py-spy halts a process for up to a second."""
    cell = kernel.submit("%%spawn 2 --background\nimport time\ntime.sleep(600)")
    cell.see(lambda: cell.reply.outputs and cell.reply.table["text/plain"].count("time.sleep") == 2, "they are there")
    try:
        quick, native = (
            ok(kernel.execute(f"%ranks stacks{which}")).outputs[-1]["data"]["text/plain"] for which in ("", " native")
        )
        assert "time.sleep(600)" in quick and "native: " not in quick
        assert "time.sleep(600)" in native and "native: " in native
        assert "nothing or native, got 'deep'" in kernel.execute("%ranks stacks deep").traceback
    finally:
        ok(kernel.execute("%ranks stop"))


def test_stacks_of_a_rank_that_gets_no_processor(kernel: Kernel) -> None:
    """In its place one that is busy, and does not answer within the time that an answer takes otherwise."""
    cell = """%%spawn 1 -g 1 -t 1
import signal, time
from nbspawn._protocol.signals import STACK
signal.pthread_sigmask(signal.SIG_BLOCK, {STACK})
while STACK not in signal.sigpending():
    pass
end = time.monotonic() + 1.5
while time.monotonic() < end:
    pass
signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK})
time.sleep(600)"""
    reply = kernel.execute(cell)
    assert "Rank 0:\n" in reply.traceback and "SIG_UNBLOCK" in reply.traceback, reply.traceback


def test_stacks_at_the_second_interrupt(kernel: Kernel) -> None:
    cell = """%%spawn 2 -g 60
import time
def tidy():
    print("tidying")
    time.sleep(600)
try:
    print("begun")
    time.sleep(600)
finally:
    tidy()"""
    cell_ = kernel.submit(cell)
    cell_.until_ranks("begun", range(2))
    kernel.interrupt()
    cell_.until_ranks("tidying", range(2))
    kernel.interrupt()
    reply = cell_.wait()
    assert reply.ename == "KeyboardInterrupt"
    first, _, second = reply.traceback.partition("When they were killed:")
    assert "line 8" in first and "line 5, in tidy\n      time.sleep(600)" in second


@pytest.mark.extended
def test_stacks_when_nothing_has_moved_for_long(kernel: Kernel) -> None:
    shorter = "stop_policy.LONG = stall.PATIENCE = 1"
    imports = "from nbspawn._session import stop_policy\nfrom nbspawn._state import stall"
    ok(kernel.execute(f"{imports}\n{shorter}"))
    try:
        user = User(kernel, GIL.format(options=""))
        user.until(lambda: user.cell.reply.stacks, "they are shown")
        kernel.interrupt()
        reply = user.cell.wait()
    finally:
        ok(kernel.execute("stop_policy.LONG, stall.PATIENCE = 30.0, 5.0"))
    [shown] = reply.stacks
    assert "Ranks 0 and 2, waiting" in shown["text/plain"] and "in stuck" in shown["text/plain"]
    assert "<details>" in shown["text/html"]
