"""What the live view costs the kernel: many ranks that move from line to line and draw progress bars.

    python tests/benchmarks/view.py [--ranks N] [--seconds S] [--rounds N]

Each round runs the same cell with the view and with ``--view quiet`` (no table, all else the same), in turn, in one
kernel. Shown are the kernel's processor time, of all its threads, as a share of one core, from the first step of rank 0
to its last, and the bytes that go to the front end each second (a Jupyter server's limit is 1,000,000). The ranks
sleep most of the time: 64 of them share this machine with the kernel.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from kernels import Kernel

# Twice a second every rank changes its bar, comes to five other lines, and waits for the others.
CELL = """%%spawn {ranks} -b gloo --view {view}
import time, torch.distributed as dist
from tqdm.auto import tqdm
dist.barrier()
bar = tqdm(desc="epoch 2", total=1000, mininterval=0)
if rank == 0: print("begin")
for step in range({steps}):
    if rank % 4: time.sleep(0.2)
    else: time.sleep(0.3)
    bar.update()
    time.sleep(0.15)
    dist.barrier()
if rank == 0: print("end")
dist.barrier()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    print(f"{given.ranks} ranks, {given.rounds} rounds of {given.steps} steps of about half a second")
    shares: dict[str, list[float]] = {"auto": [], "quiet": []}
    rates: dict[str, list[float]] = {"auto": [], "quiet": []}
    with tempfile.TemporaryDirectory() as folder, Kernel(Path(folder)) as kernel:
        assert kernel.execute("%load_ext nbspawn\nimport torch").status == "ok"
        process = psutil.Process(kernel.pid)

        def used() -> tuple[float, float]:
            times = process.cpu_times()
            return time.monotonic(), times.user + times.system

        for _ in range(given.rounds):
            for view in shares:
                cell = kernel.submit(CELL.format(ranks=given.ranks, steps=given.steps, view=view))
                began, before = cell.until("begin") and used()
                sent = cell.reply.sent
                ended, after = cell.until("end") and used()
                shares[view].append((after - before) / (ended - began))
                rates[view].append((cell.reply.sent - sent) / (ended - began))
                assert cell.wait().status == "ok", cell.reply
    for view in shares:
        each = ", ".join(f"{share:.1%}" for share in shares[view])
        print(
            f"--view {view:6} the kernel used {statistics.median(shares[view]):.1%} of a core ({each});"
            f" {statistics.median(rates[view]) / 1000:,.1f} kB/s to the front end"
        )


if __name__ == "__main__":
    main()
