"""How long a cell takes in ranks that live already: nbspawn's ``%%ranks`` against ipyparallel and nbdistributed.

    python tests/benchmarks/kept.py [--rounds N] [--ranks N] [--many N] [--json PATH]

Each tool has a real kernel and its ranks, all at the same time, and every case has its turn once a round: compare the
differences and ratios of one run, not the milliseconds of two. A time is the client's, from just before the
execute_request is sent until the execute_reply is there. The empty cell runs in nbspawn's kernel. What a case costs is
its time above the empty cell of the same round; ratios are medians of the rounds' own ratios. Between two turns nothing
is asked of anybody for 50 ms. A tool that is not installed is left out, and ``--many`` adds a session of so many ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from start import Kernel, spread

WARM_UP = 5  # rounds
PAUSE = 0.05  # seconds between two turns

IPYPARALLEL = """
import ipyparallel
cluster = ipyparallel.Cluster(n={ranks})
client = cluster.start_and_connect_sync()
client[:].activate()
"""
IPYPARALLEL_END = "cluster.stop_cluster_sync()"
NBDISTRIBUTED = "%load_ext nbdistributed\n%dist_init -n {ranks}"


@dataclass
class Case:
    """``took`` are the seconds of each round."""

    name: str
    kernel: Kernel
    cell: str
    took: list[float] = field(default_factory=list)


def made(make: Callable[[], Kernel], setup: str, needs: str) -> Kernel | None:
    """A kernel that is set up; None where the tool is not installed."""
    kernel = make()
    _, there = kernel.run("", f"__import__('importlib.util').util.find_spec({needs!r}) is not None", silent=True)
    if there:
        kernel.run(setup)
        return kernel
    kernel.close()
    return None


def table(cases: list[Case], ranks: int, many: int) -> str:
    """Aligned text, milliseconds."""
    empty, ours = cases[0].took, cases[1].took
    lines = [f"{'':32} {'whole cell':>10} {'(p10-p90)':>14}  {'above an empty cell':>19}  {'x %%ranks':>9}  above"]
    for case in cases:
        s = spread(case.took)
        above = [mine - nothing for mine, nothing in zip(case.took, empty, strict=True)]
        ratio = statistics.median(mine / our for mine, our in zip(case.took, ours, strict=True))
        cost = statistics.median(above)
        base = statistics.median(our - nothing for our, nothing in zip(ours, empty, strict=True))
        middle = f"({s['p10']:.1f}-{s['p90']:.1f})"
        lines.append(
            f"{case.name:32} {s['median']:>10.1f} {middle:>14}  {1000 * cost:>19.1f}  {ratio:>9.2f}  {cost / base:.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--many", type=int, default=16, help="ranks of a second session (0: none)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every sample there, in seconds")
    given = parser.parse_args()
    kernels: list[tuple[Kernel, str]] = []
    with tempfile.TemporaryDirectory() as modules:
        try:
            own = Kernel(modules)
            kernels.append((own, "%ranks stop"))
            own.run("%load_ext nbspawn\nimport torch")
            own.run(f"%%spawn {given.ranks} --keep\npass")
            cases = [Case("an empty cell", own, "pass"), Case(f"nbspawn %%ranks, {given.ranks}", own, "%%ranks\npass")]
            if given.many:
                own.run(f"%%spawn {given.many} --keep --name many\npass")
                cases.append(Case(f"nbspawn %%ranks, {given.many}", own, "%%ranks @many\npass"))
            for needs, setup, magic, end in (
                ("ipyparallel", IPYPARALLEL, "%%px", IPYPARALLEL_END),
                ("nbdistributed", NBDISTRIBUTED, "%%distributed", "%dist_shutdown"),
            ):
                kernel = made(lambda: Kernel(modules), setup.format(ranks=given.ranks), needs)
                if kernel is not None:
                    kernels.append((kernel, end))
                    cases.append(Case(f"{needs} {magic}, {given.ranks}", kernel, f"{magic}\npass"))
            for turn in range(-WARM_UP, given.rounds):
                first = turn % len(cases)
                for case in cases[first:] + cases[:first]:
                    time.sleep(PAUSE)
                    took, _ = case.kernel.run(case.cell)
                    if turn >= 0:
                        case.took.append(took)
        finally:
            for kernel, end in kernels:
                kernel.run(end)
                kernel.close()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; milliseconds")
    print(table(cases, given.ranks, given.many))
    if given.json is not None:
        given.json.write_text(json.dumps({case.name: case.took for case in cases}, indent=1))


if __name__ == "__main__":
    main()
