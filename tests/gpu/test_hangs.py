"""What a user reads of ranks that wait for their GPUs, or fail there, and what becomes of them: in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernels import Cell, Kernel, ok

HUNG = """%%spawn 2 -b nccl -g 3 {options}
import time, torch, torch.distributed as dist
x = torch.ones(4, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
print("ready")
if rank == 0:
    dist.all_reduce(x)
    x.tolist()
else:
    time.sleep(600)"""
MISSING = (
    "Collective 2 of the default group, all_reduce float32[4] (line 8): rank 0 is in it, "
    "rank 1 has not reached it (last call: 1, all_reduce) and is at line 11: time.sleep(600)."
)
STAY = "%%ranks -g 60"
"""A cell that is ended, and whose ranks stay: beside other tests one may need more than the usual three seconds."""
SUM = """%%ranks
x = torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(x)
x.tolist()"""
SUMMED = "[0-1] [3.0, 3.0, 3.0]"


def rows(cell: Cell) -> str:
    text: str = cell.reply.table["text/plain"] if cell.reply.outputs else ""
    return text


@pytest.fixture
def kept(kernel: Kernel) -> Iterator[Kernel]:
    """Two ranks with a group of NCCL, that have a variable to lose."""
    ok(kernel.execute("%%spawn 2 --keep -b nccl\nimport time, torch, torch.distributed as dist\nstep = 10 + rank"))
    assert ok(kernel.execute(SUM, timeout=120)).result == SUMMED
    yield kernel
    ok(kernel.execute("%ranks stop"))


def assert_alive(kernel: Kernel) -> None:
    """They have their variables, and a group that works."""
    reply = ok(kernel.execute(SUM, timeout=60))
    assert reply.result == SUMMED, str(reply)
    assert ok(kernel.execute("%%ranks\nstep")).result == "[0] 10\n[1] 11"


# ---------------------------------------------------------------- what ranks use


def test_which_gpu_a_rank_has_and_how_busy_and_full_it_is(kernel: Kernel) -> None:
    cell = """%%spawn 2
import torch
held = torch.zeros((1 + rank) << 30, dtype=torch.uint8, device=device)
torch.cuda._sleep(600 * 10**9)
torch.cuda.synchronize()"""
    running = kernel.submit(cell)
    running.see(lambda: re.search(r"0, 100 %, 1.3/17 GB(.*\n)+.*1, 100 %, 2.4/17 GB", rows(running)), "their loads")
    kernel.interrupt()
    running.wait()
    ok(kernel.execute("%%spawn 2 --keep\nimport torch\nheld = torch.zeros(1 << 30, dtype=torch.uint8, device=device)"))
    assert re.search(r"1.1 GB, GPU 0\n.*1.1 GB, GPU 1", ok(kernel.execute("%ranks")).text())
    report = ok(kernel.execute("%ranks memory")).outputs[0]["data"]["text/plain"]
    assert re.search(r"in all +1.3 GB +1.3 GB\nwhole GPU +1.3 GB +1.3 GB\n", report), report
    ok(kernel.execute("%ranks stop"))


# ---------------------------------------------------------------- waits are told


def test_the_usual_hang(kernel: Kernel) -> None:
    cell = kernel.submit(HUNG.format(options="")).until("ready")
    cell.see(lambda: "Collective 2" in rows(cell), "it is told")
    assert re.search(r"◍ waiting for its GPU \d+\.\d s +9  x.tolist\(\)", rows(cell)), rows(cell)
    told = " ".join(rows(cell).split())
    assert re.search(r"Rank 0 has waited \d+ s at line 9 \(x.tolist\(\)\) for its GPU. " + re.escape(MISSING), told)
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and reply.traceback.count(MISSING) == 1, str(reply)


def test_a_finished_cell(kernel: Kernel) -> None:
    """One call too many, at the end: the host has nothing more to do."""
    cell = kernel.submit(HUNG.format(options="-t 8").replace("    x.tolist()\nelse:\n    time.sleep(600)", "\n1"))
    reply = cell.wait()
    assert reply.ename == "RunTimeoutError", str(reply)
    assert re.search(
        r"\(line 8\): rank 0 is in it, rank 1 has not reached it \(.*\) and has finished\.", reply.traceback
    )
    assert "Rank 0 after the last line, waiting for its GPU:" in reply.traceback


# ---------------------------------------------------------------- kept ranks stay


def test_stop(kept: Kernel) -> None:
    hung = HUNG.partition("\n")[2]
    cell = kept.submit(f"{STAY}\n{hung}").until("ready")
    cell.see(lambda: "waiting for its GPU" in rows(cell), "rank 0 waits")
    kept.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert_alive(kept)


def test_stop_again_at_once(kept: Kernel) -> None:
    """Nothing looks at the rank between two of them: each Stop is another one."""
    hung = HUNG.partition("\n")[2]
    for _ in range(4):
        cell = kept.submit(f"{STAY}\n{hung}").until("ready")
        kept.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
    assert_alive(kept)


def test_stop_in_a_loop(kept: Kernel) -> None:
    """Wherever it comes: in Python, while a kernel is queued, in a rank that waits for one which has left the loop."""
    loop = f"""{STAY}
numbers = torch.ones(4, device=device)
for done in itertools.count():
    if done == 20:
        print("ready")
    dist.all_reduce(numbers)
    numbers.div_(2)
    numbers.sum().item()"""
    ok(kept.execute("%%ranks\nimport itertools"))
    for _ in range(10):
        cell = kept.submit(loop).until("ready")
        kept.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        assert_alive(kept)


def test_an_error_of_a_peer(kept: Kernel) -> None:
    """Rank 0 has called, and is at its end: as if all were well."""
    cell = f"{STAY}\nif rank == 1:\n    raise ValueError('before its call')\n"
    reply = kept.execute(f"{cell}dist.all_reduce(torch.ones(2, device=device))")
    assert reply.ename == "RankRaisedError" and "ValueError: before its call" in reply.traceback, str(reply)
    assert "Rank 0 was after the last line, waiting for its GPU" in reply.traceback, str(reply)
    assert_alive(kept)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_first_call_without_a_peer(kernel: Kernel, missing: int) -> None:
    """Rank 0 waits for a connection then, rank 1 for NCCL's identifier in the store; also in a model's constructor."""
    kept = "%%spawn 2 --keep -b nccl\nimport time, torch, torch.distributed as dist\nstep = 10 + rank"
    ok(kernel.execute(kept, timeout=60))
    model = "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda())"
    for call in ("dist.all_reduce(torch.ones(2, device=device))", model):
        reply = kernel.execute(f"{STAY}\nif rank == {missing}:\n    raise ValueError('before its call')\n{call}")
        assert reply.ename == "RankRaisedError" and "ValueError: before its call" in reply.traceback, str(reply)
        assert ok(kernel.execute("%%ranks\nstep")).result == "[0] 10\n[1] 11"  # the new group makes no call
    assert_alive(kernel)
    ok(kernel.execute("%ranks stop"))


def test_an_abort_that_hangs(kernel: Kernel) -> None:
    """Then Stop ends the ranks, after the grace period; and the next ones start."""
    begin = "%%spawn 2 --keep -b nccl -g 2 --env FAKE_NCCL_ABORT=hang\nimport torch, torch.distributed as dist"
    ok(kernel.execute(begin, timeout=60))
    cell = kernel.submit(f"%%ranks\n{HUNG.partition(chr(10))[2]}").until("ready")
    cell.see(lambda: "waiting for its GPU" in rows(cell), "rank 0 waits")
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "The session has ended." in reply.table["text/plain"], str(reply)
    kernel.assert_no_rank()
    assert ok(kernel.execute("%%spawn 2 -b nccl\nrank", timeout=60)).result == "[0] 0\n[1] 1"


# ---------------------------------------------------------------- errors


def test_the_first_error_of_a_gpu_is_the_error(kernel: Kernel) -> None:
    """NCCL's watchdog sees it, too, and would abort the process."""
    cell = """%%spawn 2 -b nccl
import time, torch, torch.distributed as dist
x, wrong = torch.ones(4, device=device), torch.zeros(1, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
if rank:
    time.sleep(600)
torch._assert_async(wrong)
dist.all_reduce(x)
try:
    x.tolist()
finally:
    time.sleep(0.5)"""
    reply = kernel.execute(cell, timeout=60)
    assert reply.ename == "RankRaisedError", str(reply)
    assert "AcceleratorError: CUDA error: device-side assert triggered (line " in reply.traceback, str(reply)
    assert "SIGABRT" not in reply.traceback


def test_an_error_after_the_last_line(kernel: Kernel) -> None:
    cell = "%%spawn 1\nimport torch\nwrong = torch.zeros(1, device=device)\ntorch._assert_async(wrong)"
    reply = kernel.execute(cell, timeout=60)
    assert reply.ename == "RankRaisedError" and "device-side assert triggered" in reply.traceback, str(reply)
    assert "The device told it after the last line" in reply.traceback


def test_a_broken_gpu_of_a_kept_rank(kept: Kernel) -> None:
    reply = kept.execute("%%ranks\nif rank:\n    torch._assert_async(torch.zeros(1, device=device))")
    assert reply.ename == "RankRaisedError" and "%ranks restart starts the ranks again" in reply.traceback, str(reply)
    assert "device-side assert triggered" in kept.execute("%%ranks\nstep").traceback, "each command fails"
    ok(kept.execute("%ranks restart"))
    assert ok(kept.execute("%%ranks\nrank", timeout=60)).result == "[0] 0\n[1] 1"


# ---------------------------------------------------------------- what else is recorded


def test_a_receive_without_its_send(kernel: Kernel) -> None:
    cell = """%%spawn 2 -b nccl -g 3
import time, torch, torch.distributed as dist
x = torch.ones(4, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
print("ready")
if rank == 0:
    dist.recv(x, 1)
    x.tolist()
time.sleep(600)"""
    running = kernel.submit(cell).until("ready")
    running.see(lambda: "have waited" in rows(running) or "has waited" in rows(running), "it is told")
    told = " ".join(rows(running).split())
    wanted = "Rank 0 waits in recv of float32[4] from rank 1 (line 8), but rank 1 does not send to it: it is at line 10"
    assert wanted in told, told
    kernel.interrupt()
    running.wait()


def test_a_batch_of_sends_that_is_over(kernel: Kernel) -> None:
    """torch does not mark them as ended."""
    batch = """peer, came = 1 - rank, torch.empty(4, device=device)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, came, peer)]):
    work.wait()
came.tolist()
print("ready")"""
    cell = kernel.submit(HUNG.format(options="").replace('print("ready")', batch)).until("ready")
    cell.see(lambda: "Collective 2" in rows(cell), "it is told")
    told = " ".join(rows(cell).split())
    assert "rank 1 has not reached it (last call: 1, all_reduce) and is at line 15: time.sleep(600)." in told, told
    kernel.interrupt()
    cell.wait()


def test_two_backends_in_one_group(kernel: Kernel) -> None:
    """Each counts its own calls: three of gloo come first."""
    cell = """%%spawn 2 -b cpu:gloo,cuda:nccl -g 3
import time, torch, torch.distributed as dist
here, there = torch.ones(3), torch.ones(4, device=device)
for _ in range(3):
    dist.all_reduce(here)
dist.all_reduce(there)
torch.cuda.synchronize()
print("ready")
if rank == 0:
    dist.all_reduce(there)
    there.tolist()
time.sleep(600)"""
    running = kernel.submit(cell).until("ready")
    running.see(lambda: "has waited" in rows(running), "it is told")
    told = " ".join(rows(running).split())
    assert "Collective 2 of the default group (nccl), all_reduce float32[4] (line 10): rank 0 is in it, rank 1" in told
    kernel.interrupt()
    running.wait()


def test_a_first_call_that_no_gpu_leaves(kernel: Kernel) -> None:
    ok(kernel.execute("import nbspawn._state.collectives as rule; usual, rule._FIRST = rule._FIRST, 5.0"))
    cell = "%%spawn 2 -b nccl -g 3 --env FAKE_NCCL_P2P=hang\nimport torch, torch.distributed as dist\n"
    running = kernel.submit(f"{cell}x = torch.ones(4, device=device)\ndist.all_reduce(x)\nx.tolist()")
    running.see(lambda: "NCCL_P2P_DISABLE=1" in rows(running), "it is told")
    kernel.interrupt()
    running.wait()
    ok(kernel.execute("rule._FIRST = usual"))


def test_backward_is_no_wait(kernel: Kernel) -> None:
    """It runs in a thread of the device's, while the main thread idles."""
    cell = """%%spawn 2 -b nccl -o out
import time, torch
weight = torch.ones(4, device=device, requires_grad=True)
weight.register_hook(lambda gradient: time.sleep(3))
(weight * 2).sum().backward()"""
    ok(kernel.execute(cell, timeout=60))
    waits = "[row for row in out.timeline if row['line'] == 5 and (row['waiting'] or row['device'])]"
    assert kernel.value(waits) == []
    assert kernel.value("sum(row['seconds'] for row in out.timeline if row['line'] == 5)") > 5


# ---------------------------------------------------------------- a rank's own GPU


def test_no_context_before_the_code_makes_one(kernel: Kernel) -> None:
    cell = "%%spawn {} -b nccl\nimport torch\nstr(device), torch.cuda.is_initialized(), torch.cuda.current_device()"
    reply = ok(kernel.execute(cell.format(2), timeout=60))
    assert reply.result == "[0] ('cuda:0', False, 0)\n[1] ('cuda:1', False, 1)"
    reply = ok(kernel.execute(cell.format("cpu").replace(" -b nccl", ""), timeout=60))
    assert "[0] ('cpu', False, 0)" in reply.result


def test_groups_of_kept_ranks_do_not_time_out_at_a_prompt(kept: Kernel) -> None:
    cell = """%%ranks
from torch.distributed.device_mesh import init_device_mesh
groups = dist.new_group([0, 1]), init_device_mesh("cuda", (2,)).get_group()
[group._get_backend(device).options._timeout.days for group in groups]"""
    assert ok(kept.execute(cell, timeout=60)).result == "[0-1] [1, 1]"
