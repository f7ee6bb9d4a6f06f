"""What nbspawn says of collectives that do not fit, beside torch's own torchfrtrace on the same records; and how long
the question takes. gloo's records lack the groups' ranks, without which torchfrtrace fails: it gets them, too.

    python tests/benchmarks/flight_recorder.py [--ranks 64] [--json PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1] / "support"
sys.path.insert(0, str(SUPPORT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])

import mismatches  # noqa: E402
import samples  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import nbspawn  # noqa: E402
from nbspawn._protocol.questions import COLLECTIVES  # noqa: E402
from nbspawn._state.collectives import findings  # noqa: E402
from nbspawn._state.run import Run, reduce  # noqa: E402
from nbspawn._state.snapshot import Snapshot  # noqa: E402

PROGRAMS = ("another_collective", "another_dtype", "one_call_behind", "never_called", "other_order_of_groups")
_SETTLED = 3.0  # seconds after which the ranks stand where they stay


def recorded(rank: int, name: str, folder: str) -> None:
    """A program of mismatches.py; after a while its record is written as torch's watchdog does."""

    def write() -> None:
        time.sleep(_SETTLED)
        record = torch._C._distributed_c10d._dump_fr_trace(True, True, False)  # type: ignore[attr-defined]
        (Path(folder) / f"_rank_{rank}").write_bytes(record)

    threading.Thread(target=write, daemon=True).start()
    getattr(mismatches, name)(rank)


def beside_torch(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context: Any = nbspawn.spawn(recorded, (name, folder), nprocs=3, backend="gloo", join=False)
        run = Run.new(3, "", "", "", time.monotonic())
        end = time.monotonic() + 60
        while len(list(Path(folder).glob("_rank_*"))) < 3 and time.monotonic() < end:
            run = reduce(run, context.poll(0.1), time.monotonic())
        reports = {rank: found for rank, found in context.ask(COLLECTIVES).items() if found}
        told = {name: ranks for report in reports.values() for name, _, ranks, _ in report.groups}
        theirs = [_torchfrtrace(folder)]
        for file in Path(folder).glob("_rank_*"):
            record = pickle.loads(file.read_bytes())
            groups = {name: {"name": name, "desc": name, "ranks": str(list(ranks))} for name, ranks in told.items()}
            file.write_bytes(pickle.dumps({**record, "pg_config": groups}))
        theirs.append(_torchfrtrace(folder))
        said = findings(Snapshot(run, time.monotonic()), reports)
        context.close()
    print(f"\n## {name}\nnbspawn:\n    {' '.join(said)}")
    print(f"torchfrtrace:\n    {theirs[0]}\nwith the groups' ranks:\n    {theirs[1]}")


def _torchfrtrace(folder: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-p", "_rank_"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stderr.replace("tabulate is not installed. Proceeding without it.\n", "").split(
        "collective stack trace"
    )[0]
    lines = said.strip().splitlines()
    return "\n    ".join(lines[-1:] if done.returncode else lines) or "(nothing)"


def calls(rank: int, count: int) -> None:
    for _ in range(count):
        dist.all_reduce(torch.ones(4))
    time.sleep(600 if rank == 0 else 0)
    dist.barrier()


def how_long(task: samples.Task, nprocs: int, count: int) -> None:
    context: Any = nbspawn.spawn(calls, (count,), nprocs=nprocs, backend="gloo", join=False)
    with contextlib.closing(context):
        done = 0
        while done < nprocs:
            context.poll(0.1)
            found = [report for report in context.ask(COLLECTIVES).values() if report]
            done = sum(bool(report.groups[0].calls) and report.groups[0].calls[-1].number >= count for report in found)
        for _ in range(5):
            before = time.perf_counter()
            answers = context.ask(COLLECTIVES)
            task.add("answered", f"{nprocs} ranks after {count:,} calls", time.perf_counter() - before)
            assert len(answers) == nprocs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--times", action="store_true", help="only how long the question takes")
    samples.add_option(parser)
    given = parser.parse_args()
    for program in () if given.times else PROGRAMS:
        beside_torch(program)
    with samples.Record("flight_recorder", given.json).measuring("ask", ranks=given.ranks) as found:
        found.quantity("answered", "until all ranks have told their last collectives")
        for made in (10, 2000):
            how_long(found, 4, made)
            how_long(found, given.ranks, made)
