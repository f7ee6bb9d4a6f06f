"""How long ranks of torch_xla take to start: nbspawn's fork and fork server beside bare processes, in turns.

    PJRT_DEVICE=CPU .venv-colab/bin/python tests/benchmarks/xla.py [--rounds N] [--json PATH]

Four ranks on XLA's CPU device, from a cell of a real kernel that has imported torch_xla and never used its device. The
peer is ``torch.multiprocessing.start_processes`` by fork, whose function calls what torch_xla's own launcher calls in
each of its processes; the launcher itself has one process only here. Every rank multiplies two matrices on its device
and notes when (CLOCK_MONOTONIC); the second time is that of the whole cell. Medians, least and greatest; ratios are the
medians of those of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import samples
from kernels import ExecutedKernel, ok

RANKS = 4

SETUP = """
import time, torch, torch_xla, torch.multiprocessing
import nbspawn
from nbspawn._engine.start.forkserver import server

def compute(rank):
    x = torch.ones(64, 64, device="xla")
    (x @ x).sum().item()
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(time.monotonic()))

def bare(rank):
    import torch_xla.runtime
    from torch_xla._internal import pjrt
    pjrt.initialize_multiprocess(rank, ranks)
    torch_xla.runtime._init_world_size_ordinal()
    compute(rank)

def timed(run):
    began = time.monotonic()
    run()
    ended = time.monotonic()
    return max(float(open(f"{folder}/{rank}").read()) for rank in range(ranks)) - began, ended - began

server.get(["torch_xla"])
"""

TOOLS = {
    "bare torch, fork": "torch.multiprocessing.start_processes(bare, nprocs=ranks, start_method='fork')",
    "nbspawn, fork": "nbspawn.spawn(compute, nprocs=ranks, backend='xla', start_method='fork')",
    "nbspawn, fork server": "nbspawn.spawn(compute, nprocs=ranks, backend='xla', start_method='forkserver')",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    samples.add_option(parser)
    given = parser.parse_args()
    record = samples.Record("xla", given.json)
    with (
        record.measuring("start", ranks=RANKS) as task,
        tempfile.TemporaryDirectory() as folder,
        ExecutedKernel(Path(folder), PJRT_DEVICE="CPU") as kernel,
    ):
        task.quantity("first", "until the last rank has computed", "s", "bare torch, fork")
        task.quantity("whole", "the whole run", "s", "bare torch, fork")
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute(f"folder, ranks = {folder!r}, {RANKS}\n{SETUP}"))
        for number in range(given.rounds + 1):
            names = list(TOOLS)
            for name in names[number % 3 :] + names[: number % 3]:
                first, whole = kernel.value(f"timed(lambda: {TOOLS[name]})")
                if number > 0:
                    task.add("first", name, first)
                    task.add("whole", name, whole)


if __name__ == "__main__":
    main()
