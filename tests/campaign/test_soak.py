"""A long day: hundreds of cells in the same kept ranks, or on new ones, that fail or are stopped. Nothing may grow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from kernels import ExecutedKernel, Kernel, ok, prepare, wait_until
from leftovers import until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

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


@pytest.fixture
def executed_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A forked one grows by what it touches of the libraries that it was forked with."""
    with ExecutedKernel(tmp_path) as kernel:
        prepare(kernel)
        yield kernel


def test_five_hundred_cells(executed_kernel: Kernel) -> None:
    kernel = executed_kernel
    ok(kernel.execute("%%spawn 3 --keep -b gloo\nimport time, torch, torch.distributed as dist\ncount = 0"))
    counted = 0
    for number in range(CELLS):
        if number == SETTLED:
            settled = Footprint.of(kernel)
        if number % 50 == 7:  # one fails, the others wait for it
            reply = kernel.execute(f"%%ranks -g 60\nif rank == {number % 3}: 1 / 0\ndist.all_reduce(torch.ones(1))")
            assert reply.ename == "RankRaisedError" and f"rank {number % 3} of 3: ZeroDivisionError" in reply.traceback
        elif number % 100 == 20:  # Stop, while some compute and others wait
            cell = kernel.submit("%%ranks -g 60\nprint('begun')\ntime.sleep(600) if rank == 1 else dist.barrier()")
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
    assert max(grown) < 8, f"megabytes that the kernel and the ranks have grown by: {grown}"
    directory = os.path.dirname(ok(kernel.execute("%ranks logs 0")).text().strip())
    assert len(files := os.listdir(directory)) < 30, f"files pile up: {sorted(files)}"
    ok(kernel.execute("%ranks stop"))
    kernel.assert_no_rank()


STATE = """
def names_history(fd):  # IPython's own thread opens and closes its database's files as it likes
    import os
    try:
        return 'history.sqlite' in os.readlink('/proc/self/fd/' + fd)
    except FileNotFoundError:
        return True

def state_():
    import gc, glob, os, signal, tempfile, threading
    gc.collect()
    return {
        'fds': sum(not names_history(fd) for fd in os.listdir('/proc/self/fd')),
        'threads': len(os.listdir('/proc/self/task')),
        'files': len(glob.glob(tempfile.gettempdir() + '/**', recursive=True)),
        'signals': [repr(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n not in (9, 19)],
        'shm': len(os.listdir('/dev/shm')),
    }
"""
ENDS = {"ok": "rank", "raising": "1 / (rank - 1)", "exit": "import os; os._exit(rank)", "text": "print('x' * 300_000)"}


def test_nothing_grows_over_50_runs(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with ExecutedKernel(tmp_path, TMPDIR=str(tmp_path / "tmp")) as kernel:
        assert kernel.execute("%load_ext nbspawn\n" + STATE).status == "ok"

        def some(count: int) -> None:
            for i in range(count):
                end, body = list(ENDS.items())[i % 4]
                reply = kernel.execute(f"%%spawn 2 -m {('fork', 'forkserver')[i // 4 % 2]} -g 1\n{body}")
                assert reply.status == ("ok" if end in ("ok", "text") else "error"), str(reply)
            kernel.assert_no_rank()

        def unchanged() -> bool:
            nonlocal then
            then = kernel.value("state_()")
            return then["signals"] == first["signals"] and all(then[name] <= first[name] for name in counted)

        some(24)  # by then the logs of as many failed runs are kept as ever will be
        then = first = kernel.value("state_()")
        counted = first.keys() - {"signals"}
        some(50)
        # What a thread of the kernel has open for a moment (a fork server that is being replaced) goes by itself.
        assert until(unchanged), (first, then)
        assert len(list((tmp_path / "tmp").glob("nbspawn-*"))) <= 1
        kernel.shutdown()
        wait_until(lambda: not list((tmp_path / "tmp").glob("nbspawn-*")), "the kernel tidies up")
