"""What a run over many nodes costs the kernel: simulated agents say what real ones have said.

    python tests/benchmarks/scale.py [--nodes 8,64,512,2500] [--json PATH]

Two real agents of eight ranks each are recorded first, in a cell that trains: rank 0 computes for a second, the others
wait for it in an all_reduce, then all print a line. Then, for each number of nodes, one process plays that many agents
(support/simulated.py) to a real kernel, which runs the cell over them. Shown are, of the kernel, the time to the first
line, with the second that the cell itself takes to it, and from then on its processor time as a share of one core,
of all its threads, what goes to the front end, and its memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import samples
from kernels import ExecutedKernel
from simulated import MARK

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
PER_NODE = 8
STEPS = 14
MEASURED = 10.0  # seconds

CELL = """
import time, torch, torch.distributed as dist
for step in range({steps}):
    if rank == 0: time.sleep(1)
    dist.all_reduce(torch.ones(1))
    print({line})
rank
"""
LINES = {
    "alike": 'f"epoch 3, step {step}: loss {1 / (step + 1):.4f}"',
    "each its own": f'f"epoch 3, step {{step}}: loss {{1 / (step + rank + 1):.4f}} on {MARK}"',
}

RECORD = """
import pickle, sys
sys.path.insert(0, {support!r})
from nbspawn._engine.cluster.nodes import Nodes
from nodes import Processes
from simulated import Recording
note, recording = Nodes._received, Recording()
def received(self, link, message):
    recording.note(link.node, message)
    note(self, link, message)
Nodes._received = received
starter = Processes(2)
"""

RUN = """
from nbspawn._engine.jobs import CellJob
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.messages import RunCell
from nbspawn._session.pool import Pool
def run_on(starter, per_node, source):
    options = LaunchOptions(nprocs=starter.nodes * per_node, on=starter, backend="gloo")
    return Pool(options).run(CellJob(RunCell(source, "<cell>"), {}))
"""


def record_agents(folder: Path, source: str) -> Path:
    """The file with what two agents report."""
    path = folder / "recording"
    with ExecutedKernel(folder) as kernel:
        setup = RECORD.format(support=SUPPORT)
        assert kernel.execute(f"%load_ext nbspawn\n{setup}{RUN}").status == "ok"
        reply = kernel.execute(f"run_on(starter, {PER_NODE}, {source!r})", 300)
        assert reply.status == "ok", reply
        saved = f"open({str(path)!r}, 'wb').write(pickle.dumps(recording))\nfrom nbspawn._engine.cluster import agents"
        assert kernel.execute(f"{saved}\nagents.release()").status == "ok"
    return path


def play(task: samples.Task, folder: Path, path: Path, nodes: int) -> None:
    """Measure one run."""
    with ExecutedKernel(folder) as kernel:
        setup = f"import sys\nsys.path.insert(0, {SUPPORT!r})\nfrom simulated import Simulation"
        starter = f"starter = Simulation({nodes}, {str(path)!r})"
        assert kernel.execute(f"%load_ext nbspawn\nimport torch\n{setup}\n{starter}\n{RUN}").status == "ok"
        process = psutil.Process(kernel.pid)

        def used() -> tuple[float, float, int, int]:
            times = process.cpu_times()
            return time.monotonic(), times.user + times.system, cell.reply.sent, process.memory_info().rss

        began = time.monotonic()
        cell = kernel.submit(f"run_on(starter, {PER_NODE}, 'pass')").until("step 0")
        started, cpu, sent, memory = used()
        cell.read_until(lambda: time.monotonic() > started + MEASURED, "enough was measured", 300)
        ended, cpu_then, sent_then, memory_then = used()
        reply = cell.wait(300)
        assert reply.status == "ok", reply
        passed = ended - started
        task.add("started", str(nodes), started - began)
        task.add("kernel", str(nodes), (cpu_then - cpu) / passed)
        task.add("sent", str(nodes), (sent_then - sent) / passed)
        task.add("memory", str(nodes), memory)
        task.add("grown", str(nodes), memory_then - memory)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="8,64,512,2500", help="numbers of nodes, with commas")
    samples.add_option(parser)
    given = parser.parse_args()
    record = samples.Record("scale", given.json)
    for name, line in LINES.items():
        with (
            record.measuring(f"lines {name}", ranks_of_a_node=PER_NODE, seconds=MEASURED) as task,
            tempfile.TemporaryDirectory() as folder,
        ):
            task.quantity("started", "until the first line is shown, by nodes")
            task.quantity("kernel", "processor time of the kernel, share of a core", "cores")
            task.quantity("sent", "to the front end", "B/s")
            task.quantity("memory", "memory of the kernel", "B")
            task.quantity("grown", "what it has grown by in the end", "B")
            path = record_agents(Path(folder), CELL.format(steps=STEPS, line=line))
            for nodes in map(int, given.nodes.split(",")):
                play(task, Path(folder), path, nodes)


if __name__ == "__main__":
    main()
