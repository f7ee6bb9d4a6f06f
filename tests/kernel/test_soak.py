"""A long day: hundreds of cells in the same kept ranks, some of which fail or are stopped. Nothing may grow."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
from kernels import Kernel, ok

CELLS = 500
SETTLED = 100
"""Cells after which caches are full: from there on nothing may grow."""


@dataclass
class Footprint:
    """What the kernel and its ranks hold: the ranks' pids, descriptors, threads and resident megabytes of each."""

    pids: list[int]
    descriptors: list[int]
    threads: list[int]
    memory: list[float]

    @staticmethod
    def of(kernel: Kernel) -> Footprint:
        ranks = sorted(kernel.ranks(), key=lambda process: process.pid)
        all_ = [psutil.Process(kernel.pid), *ranks]
        return Footprint(
            [process.pid for process in ranks],
            [process.num_fds() for process in all_],
            [process.num_threads() for process in all_],
            [process.memory_info().rss / 1e6 for process in all_],
        )


def test_five_hundred_cells(own_kernel: Kernel) -> None:
    kernel = own_kernel
    ok(kernel.execute("%%spawn 3 --keep -b gloo\nimport time, torch, torch.distributed as dist\ncount = 0"))
    counted = 0
    for number in range(CELLS):
        if number == SETTLED:
            settled = Footprint.of(kernel)
        if number % 50 == 7:  # one fails, the others wait for it
            reply = kernel.execute(f"%%ranks\nif rank == {number % 3}: 1 / 0\ndist.all_reduce(torch.ones(1))")
            assert reply.ename == "RankRaisedError" and f"rank {number % 3} of 3: ZeroDivisionError" in reply.traceback
        elif number % 100 == 20:  # Stop, while some compute and others wait
            cell = kernel.submit("%%ranks\nprint('begun')\ntime.sleep(600) if rank == 1 else dist.barrier()")
            cell.until("begun")
            kernel.interrupt()
            assert cell.wait().ename == "KeyboardInterrupt"
        elif number % 10 == 3:
            ok(kernel.execute(f"value = {number}"))
            reply = ok(kernel.execute("%%ranks 1: --push value\nprint('line', value)\nvalue"))
            assert reply.result == f"[1-2] {number}" and f"line {number}" in reply.text()
        else:
            counted += 1
            reply = ok(
                kernel.execute(
                    f"%%ranks\ncount += 1\ndef f{number}(): return count\nt = torch.ones(1)\n"
                    f"dist.all_reduce(t)\n(f{number}(), t.item())"
                )
            )
            assert reply.result == f"[0-2] ({counted}, 3.0)"
    now = Footprint.of(kernel)
    assert now.pids == settled.pids and len(now.pids) == 3, "no rank was lost"
    # The group that was broken last may live on, in a traceback: sockets, pipes and a thread of gloo's.
    for before, after in ((settled.descriptors, now.descriptors), (settled.threads, now.threads)):
        assert all(more - less <= 8 for less, more in zip(before, after, strict=True)), (settled, now)
    grown = [after - before for before, after in zip(settled.memory, now.memory, strict=True)]
    assert max(grown) < 15, f"megabytes that the kernel and the ranks have grown by: {grown}"
    directory = os.path.dirname(ok(kernel.execute("%ranks logs 0")).text().strip())
    assert len(os.listdir(directory)) < 20, "no files pile up"
    ok(kernel.execute("%ranks stop"))
    kernel.assert_no_rank()
