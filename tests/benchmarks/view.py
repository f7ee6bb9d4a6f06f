"""What the live view and the samplers cost: many ranks that move from line to line and draw progress bars.

    python tests/benchmarks/view.py [--ranks 64,256] [--steps N] [--rounds N] [--json PATH]

Each round runs the same cell with the view and with ``--view quiet`` (no table, all else the same), in turn, in one
kernel. Shown are the kernel's processor time, of all its threads, as a share of one core, from the first step of rank 0
to its last, and the bytes that go to the front end each second (a Jupyter server's limit is 1,000,000); and the
processor time of the threads that sample the ranks' positions, of all ranks together. The ranks sleep most of the time:
they share this machine with the kernel.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import samples
from kernels import ExecutedKernel

# Twice a second every rank changes its bar, comes to five other lines, and waits for the others.
CELL = """%%spawn {ranks} -b gloo --view {view}
import threading, time, torch, torch.distributed as dist
from tqdm.auto import tqdm
dist.barrier()
bar = tqdm(desc="epoch 2", total=1000, mininterval=0)
if rank == 0: print("begin")
(thread,) = (one for one in threading.enumerate() if one.name == "nbspawn-sampler")
clock = time.pthread_getcpuclockid(thread.ident)
began, before = time.monotonic(), time.clock_gettime(clock)
for step in range({steps}):
    if rank % 4: time.sleep(0.2)
    else: time.sleep(0.3)
    bar.update()
    time.sleep(0.15)
    dist.barrier()
if rank == 0: print("end")
share = torch.tensor([(time.clock_gettime(clock) - before) / (time.monotonic() - began)])
dist.all_reduce(share)
if rank == 0: print("samplers:", share.item())
dist.barrier()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256", help="numbers of ranks, with commas")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=4)
    samples.add_option(parser)
    given = parser.parse_args()
    record = samples.Record("view", given.json)
    for ranks in map(int, given.ranks.split(",")):
        measure(record, ranks, given.rounds, given.steps)


def measure(record: samples.Record, ranks: int, rounds: int, steps: int) -> None:
    """With so many ranks."""
    with (
        record.measuring(f"{ranks} ranks", rounds=rounds, steps=steps) as task,
        tempfile.TemporaryDirectory() as folder,
        ExecutedKernel(Path(folder)) as kernel,
    ):
        task.quantity("kernel", "processor time of the kernel, share of a core", "cores", "--view quiet")
        task.quantity("sent", "to the front end", "B/s", "--view quiet")
        task.quantity("samplers", "processor time of all ranks' samplers, share of a core", "cores")
        assert kernel.execute("%load_ext nbspawn\nimport torch").status == "ok"
        process = psutil.Process(kernel.pid)

        def used() -> tuple[float, float]:
            times = process.cpu_times()
            return time.monotonic(), times.user + times.system

        for _ in range(rounds):
            for view in ("auto", "quiet"):
                cell = kernel.submit(CELL.format(ranks=ranks, steps=steps, view=view))
                began, before = cell.until("begin") and used()
                sent = cell.reply.sent
                ended, after = cell.until("end") and used()
                task.add("kernel", f"--view {view}", (after - before) / (ended - began))
                task.add("sent", f"--view {view}", (cell.reply.sent - sent) / (ended - began))
                assert cell.wait(120).status == "ok", cell.reply
                (share,) = re.findall(r"samplers: ([\d.e-]+)", cell.reply.text())
                task.add("samplers", f"--view {view}", float(share))


if __name__ == "__main__":
    main()
