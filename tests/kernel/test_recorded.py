"""What a user reads of collectives that do not fit: in the live table, in errors, and when they ask."""

from __future__ import annotations

import re

import pytest
import torch
from kernels import Kernel, ok
from packaging.version import Version

recorded = pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch has no recorder for gloo")

DIFFERENT = """%%spawn 3 -b gloo {options}
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(3))
print("ready")
if rank == 1:
    dist.all_gather([torch.ones(4)] * 3, torch.ones(4))
else:
    dist.all_reduce(torch.ones(10, 10))
"""
SENTENCE = (
    "Collective 2 of the default group: ranks 0 and 2 call all_reduce float32[10, 10] (line 8), "
    "rank 1 calls all_gather float32[4] (line 6). All its ranks have to make the same calls in the same order."
)


@recorded
def test_the_stall_sentence_and_stop(kernel: Kernel) -> None:
    cell = kernel.submit(DIFFERENT.format(options="")).until("ready")
    cell.see(lambda: "have waited" in cell.reply.table["text/plain"], "ranks wait")
    assert SENTENCE in cell.reply.table["text/html"], "the first sentence is the recorder's"
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and reply.traceback.count(SENTENCE) == 1
    assert "When the ranks were stopped" not in reply.table["text/plain"], "it is said once"


@pytest.mark.extended
@pytest.mark.timing
@recorded
def test_the_timeout_says_it(kernel: Kernel) -> None:
    reply = kernel.execute(DIFFERENT.format(options="--timeout 3"))
    assert reply.ename == "RunTimeoutError" and SENTENCE in reply.traceback
    assert "in all_gather" in reply.traceback, "where they stand is said, too"


@pytest.mark.extended
def test_without_a_recorder_the_sampler_guesses(kernel: Kernel) -> None:
    cell = kernel.submit(DIFFERENT.format(options="--env TORCH_FR_BUFFER_SIZE=0")).until("ready")
    cell.see(lambda: "The ranks have diverged." in cell.reply.table["text/plain"], "the old sentence")
    kernel.interrupt()
    reply = cell.wait()
    assert "Collective" not in reply.traceback
    assert "When the ranks were stopped: The ranks have diverged." in reply.table["text/plain"]


@recorded
@pytest.mark.parametrize(
    "call, ends",
    [
        (  # rank 0 does not leave before rank 1 has what it needs, too
            "dist.all_reduce(torch.ones(4 + (rank == 2)))\nif rank != 2: dist.barrier(pair)",
            r": ranks 0-1 call all_reduce float32\[4\] \(line 5\), rank 2 calls all_reduce float32\[5\] .*",
        ),
        (
            "if rank != 2: dist.all_gather([x] * 3, x)",
            r"ranks 0-1 are in it, rank 2 has not reached it \(last call: 1, barrier\) and has finished\.",
        ),
    ],
)
def test_an_error_in_a_collective(kernel: Kernel, call: str, ends: str) -> None:
    cell = "%%spawn 3 -b gloo\nimport torch, torch.distributed as dist\nx = torch.ones(2); dist.barrier()\n"
    cell += "pair = dist.new_group([0, 1])\n"
    reply = kernel.execute(cell + call)
    said = [line for line in reply.traceback.splitlines() if line.startswith("Collective 2 of the default group")]
    assert len(said) == 1 and re.search(f"{ends}$", said[0]), str(reply)


@recorded
@pytest.mark.parametrize("begin", ["%%spawn 3 -b gloo -m fork", "%%spawn 3 -b gloo", "%%spawn 3 -b gloo --keep"])
def test_an_abort_says_where_and_why(kernel: Kernel, begin: str) -> None:
    """gloo ends the process in a thread of its own: what it has said, where the main thread is, and all shapes."""
    cell = f"{begin}\nimport torch, torch.distributed as dist\ndist.barrier()\nrows = 7 - 2 * (rank == 2)\n"
    reply = kernel.execute(f"{cell}dist.all_reduce(torch.ones(rows, 4))")
    assert reply.ename == "RankExitedError", reply
    assert re.search(
        r"rank 2 of 3: .*SIGABRT: gloo::EnforceNotMet: op.preamble.* 20 vs 16.* \(line 5\)$",
        reply.evalue.splitlines()[0],
    )
    assert re.search(r"line 5, in <.*>\n    dist\.all_reduce\(torch\.ones\(rows, 4\)\)\n", reply.traceback)
    assert re.search(
        r"ranks? [01,-]+ calls? all_reduce float32\[7, 4\].*rank 2 calls all_reduce float32\[5, 4\]", reply.traceback
    )
    assert "SIGABRT: gloo::EnforceNotMet" in reply.table["text/plain"]
    kernel.execute("%ranks stop")


@recorded
@pytest.mark.parametrize(
    "lines, said",
    [
        (
            "if rank == 0: dist.send(torch.ones(4), 1)\nif rank == 1: dist.recv(torch.ones(2), 0)",
            "Rank 1 was ended in recv of float32[2] from rank 0 (line 4). Both ranks have to pass the same size and "
            "dtype.",
        ),
        (
            "if rank == 0: dist.recv(torch.ones(2), 1)",
            "Rank 0 waits in recv of float32[2] from rank 1 (line 3), but rank 1 does not send to it: it has finished.",
        ),
        (
            "calls = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2 + rank)]\n"
            "for one in calls: one.wait()",
            "Collective 3 of the default group, all_reduce float32[1] (line 3): rank 1 is in it, "
            "rank 0 has not reached it (last call: 2, all_reduce) and has finished.",
        ),
    ],
    ids=["another size", "never sent", "asynchronous"],
)
def test_what_a_rank_tells_at_its_end(kernel: Kernel, lines: str, said: str) -> None:
    reply = kernel.execute(f"%%spawn 2 -b gloo\nimport torch, torch.distributed as dist\n{lines}")
    assert said in reply.traceback.splitlines()[1:3], "below the headline"


@recorded
def test_ranks_that_do_not_match_are_told_though_none_fails(kernel: Kernel) -> None:
    """gloo adds the bytes of what it is given."""
    cell = "%%spawn 2 -b gloo\nimport torch, torch.distributed as dist\n"
    reply = ok(kernel.execute(cell + "dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))"))
    shown = reply.table["text/plain"]
    assert "rank 0 calls all_reduce float32[4] (line 3), rank 1 calls all_reduce int32[4] (line 3). All its" in shown
    assert "the values that they got are wrong" in shown and "wrong" in reply.table["text/html"]
    uneven = "dist.all_gather_object([None] * 2, 'x' * rank)\nx = [torch.ones(1), torch.ones(2)]\n"
    uneven += "dist.broadcast_object_list(['y' * rank]); dist.scatter(torch.ones(2), x[1:] * 2 if rank == 0 else None)"
    reply = ok(kernel.execute(cell + uneven))
    assert "Collective" not in reply.table["text/plain"], "these need not be equal"


@pytest.mark.extended
@recorded
def test_other_roots(kernel: Kernel) -> None:
    cell = "%%spawn 3 -b gloo --timeout 3\nimport torch, torch.distributed as dist\n"
    said = "float32[2] (line 3): called by rank 0 with src=0, rank 1 with src=1, rank 2 with src=2. All its ranks"
    assert said in kernel.execute(f"{cell}dist.broadcast(torch.ones(2), src=rank)").traceback


def test_an_error_elsewhere_is_not_put_down_to_collectives(kernel: Kernel) -> None:
    cell = "%%spawn 3 -b gloo\nimport torch.distributed as dist\nif rank == 2: raise KeyError('hieght')\ndist.barrier()"
    reply = kernel.execute(cell)
    assert "KeyError: 'hieght'" in reply.traceback and "Collective" not in reply.traceback, "its peers only followed"


@recorded
def test_ranks_collectives(kernel: Kernel) -> None:
    """Of ranks that run in the background, and of kept ones that are idle."""
    ok(kernel.execute("%%spawn 2 --keep -b gloo\nimport torch, torch.distributed as dist, time"))
    shown = ok(kernel.execute("%ranks collectives")).outputs[-1]["data"]
    assert shown["text/plain"].startswith("Collectives of 2 idle ranks\n")
    ok(kernel.execute("%%ranks\ndist.all_reduce(torch.ones(2, 3))"))
    shown = ok(kernel.execute("%ranks collectives")).outputs[-1]["data"]
    assert re.search(r"\d+  all_reduce float32\[2, 3\]  Cell In\[\d+\], line 2  done", shown["text/plain"])
    assert "<table" in shown["text/html"] and "all_reduce float32[2, 3]" in shown["text/html"]

    cell = kernel.submit("%%ranks --background\nif rank: time.sleep(60)\ndist.broadcast(torch.ones(5), 1)")
    cell.see(lambda: bool(cell.reply.outputs) and "waiting" in cell.reply.table["text/plain"], "rank 0 waits")

    def said() -> bool:
        shown = ok(kernel.execute("%ranks collectives")).outputs[-1]["data"]["text/plain"]
        return "broadcast float32[5] (line 3): rank 0 is in it, rank 1 has not reached it" in shown

    cell.see(said, "it is said after a second")
    ok(kernel.execute("%ranks interrupt"))
    ok(kernel.execute("%ranks stop"))


def test_ranks_collectives_without_a_recorder(kernel: Kernel) -> None:
    cell = "%%spawn 2 --keep -b gloo --env TORCH_FR_BUFFER_SIZE=0\nimport torch.distributed as dist\ndist.barrier()"
    ok(kernel.execute(cell))
    shown = ok(kernel.execute("%ranks collectives")).outputs[-1]["data"]["text/plain"]
    assert shown.splitlines()[-1].startswith("No calls are recorded in the ranks' process groups.")
    ok(kernel.execute("%ranks stop"))


def test_ranks_that_are_in_no_group(kernel: Kernel) -> None:
    ok(kernel.execute("%%spawn 2 --keep\n1"))
    shown = ok(kernel.execute("%ranks collectives")).outputs[-1]["data"]["text/plain"]
    assert shown.splitlines()[-1] == "The ranks are in no process group."
    ok(kernel.execute("%ranks stop"))
