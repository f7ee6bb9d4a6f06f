"""What the front end's debugger costs ranks, while it is on and nothing stops; and what it costs a notebook's own cell.

    python tests/benchmarks/gutter.py [--rounds N] [--steps N] [--json PATH]

Of two kernels one has the debugger on, with a breakpoint in each loop, on a line that is never reached. Each
round sends every cell to both, in turn. The peer is ipykernel's debugger, in a cell without ranks that trains the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import samples
from debugged import Debugged
from kernels import ExecutedKernel, ok

MODEL = """import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
"""
LOOP = """optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    if step < 0:
        print(loss)
"""
IN_STEP = "model = DistributedDataParallel(model)\n"
CELLS = {
    "a cell that trains": "%%spawn 2 -b gloo\n" + MODEL + IN_STEP + LOOP,
    "the same in kept ranks": "%%ranks\n" + MODEL + IN_STEP + LOOP,
    "a cell without ranks that trains": MODEL + LOOP,
    "an empty cell": "%%spawn 2\npass",
    "an empty cell in kept ranks": "%%ranks\npass",
}


def measure(task: samples.Task, rounds: int, steps: int) -> None:
    """Seconds of each cell."""
    with ExitStack() as open_:
        kernels = {}
        for name in ("off", "on"):
            folder = open_.enter_context(tempfile.TemporaryDirectory())
            kernels[name] = open_.enter_context(ExecutedKernel(Path(folder)))
        debugged = open_.enter_context(Debugged(kernels["on"]))
        debugged.switch_on()
        for title, cell in CELLS.items():
            code = cell.format(steps=steps)
            if (lines := code.splitlines())[-1].startswith("        "):
                debugged.breakpoints(code, len(lines))
            task.quantity(title, title, "s", "off")
        for kernel in kernels.values():
            ok(kernel.execute("%load_ext nbspawn"))
        for number in range(-1, rounds):  # the first makes ready what later cells have
            for kernel in kernels.values():
                ok(kernel.execute("%%spawn 2 --keep -b gloo\npass"))
            for title, cell in CELLS.items():
                for name, kernel in kernels.items():
                    began = time.monotonic()
                    ok(kernel.execute(cell.format(steps=steps)))
                    if number >= 0:
                        task.add(title, name, time.monotonic() - began, number)
            for kernel in kernels.values():
                ok(kernel.execute("%ranks stop"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    samples.add_option(parser)
    given = parser.parse_args()
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    with samples.Record("gutter", given.json).measuring(python, rounds=given.rounds, steps=given.steps) as found:
        measure(found, given.rounds, given.steps)
