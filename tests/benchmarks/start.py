"""How long a start of four ranks takes, from a cell of a real kernel: nbspawn against what a person would use today.

    python tests/benchmarks/start.py [--rounds N] [--json PATH]

One kernel with torch imported and nbspawn loaded runs every case once a round, in turn, so that other load on the
machine meets them all alike: compare the ratios, not the milliseconds. A ratio is the median of the rounds' own ratios:
the machine may be half as fast in one round as in another. Each round begins with another case, so that no
case always follows the same one. Two rounds go first and are not counted (every case has then made its imports and
caches, and the fork server is warm and stays as it is). torch's ``spawn`` takes seconds, so it has a turn only every
``--spawn-every`` rounds. Between two turns nothing runs: the benchmark waits for the cell's output, for a fork server
that is still being replaced, and then for 100 ms.

Two times are taken of each turn. Both clocks are CLOCK_MONOTONIC, which the processes of one machine share.

first statement
    From the moment at which IPython begins with the cell (its ``pre_run_cell`` event, the same for all cases) to the
    last rank's first statement, which asks for the time. nbspawn's ranks return it as the cell's value. The peers
    return no values, so each rank of theirs stores it in a shared ``multiprocessing.RawArray`` that was made
    beforehand: that takes microseconds, and nothing of what a rank does afterwards is in the time.
whole cell
    In the client: from just before the execute_request is sent until the execute_reply is there. nbspawn's includes
    packing, the live view and the Results; the peers' includes no values, and no output but what they print themselves.

All run the same function on the CPU with their defaults. ``bare torch, fork`` is the floor, ratio 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 2  # rounds
PAUSE = 0.1  # seconds between two turns

# mp.spawn's ranks import the function, so it cannot be a cell's: torch pickles it by name.
MODULE = """
import os, time

def first(rank, began):
    began[rank] = time.monotonic()

def first_of_torchrun(began):  # accelerate passes no rank: it is where torchrun has it
    now = time.monotonic()
    began[int(os.environ["LOCAL_RANK"])] = now
"""

SETUP = """
import multiprocessing, sys, time
import torch, torch.multiprocessing, torch.distributed
from torch.multiprocessing import start_processes
from nbspawn_benchmark import first, first_of_torchrun
try:
    from accelerate import notebook_launcher
except ImportError:
    pass
%load_ext nbspawn
BEGAN = multiprocessing.RawArray("d", {ranks})
CALLED = 0.0

def _note_call(info):
    global CALLED
    CALLED = time.monotonic()
    BEGAN[:] = [0.0] * {ranks}

get_ipython().events.register("pre_run_cell", _note_call)
"""

# Silent cells fire no pre_run_cell event.
SETTLE = """
def _settle():
    from nbspawn.engine.forkserver import server
    end = time.monotonic() + 60
    while time.monotonic() < end and (not server.warm or server._warming is not None and server._warming.is_alive()):
        time.sleep(0.02)
_settle()
"""

NBSPAWN = "import time\ntime.monotonic()"


@dataclass(frozen=True)
class Case:
    """``began`` is an expression for the ranks' moments, '' if nothing is started. ``budget`` is DESIGN's, as a ratio
    of first statements."""

    name: str
    cell: str
    began: str = "list(BEGAN)"
    slow: bool = False
    needs: str = "sys"
    budget: float | None = None


def cases(ranks: int) -> list[Case]:
    """The floor comes first."""
    return [
        Case("bare torch, fork", f"start_processes(first, (BEGAN,), nprocs={ranks}, start_method='fork')"),
        Case(
            "accelerate.notebook_launcher",
            f"notebook_launcher(first_of_torchrun, (BEGAN,), num_processes={ranks})",
            needs="accelerate",
        ),
        Case("torch.multiprocessing.spawn", f"torch.multiprocessing.spawn(first, (BEGAN,), nprocs={ranks})", slow=True),
        Case("nbspawn -m fork", f"%%spawn {ranks} -m fork -o RANKS\n{NBSPAWN}", "list(RANKS)", budget=1.3),
        Case(
            "nbspawn -m forkserver, warm", f"%%spawn {ranks} -m forkserver -o RANKS\n{NBSPAWN}", "list(RANKS)", budget=2
        ),
        Case("nbspawn (auto)", f"%%spawn {ranks} -o RANKS\n{NBSPAWN}", "list(RANKS)", budget=2),
        Case("an empty cell", "pass", ""),
    ]


class Kernel:
    """A kernel of this Python that sees this tree."""

    def __init__(self, path: str) -> None:
        self._manager = KernelManager()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=argv, display_name="benchmark", language="python")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), path])}
        self._manager.start_kernel(env=environment, stderr=subprocess.DEVNULL)
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code: str, expression: str = "", silent: bool = False) -> tuple[float, Any]:
        """Seconds from request to reply, and the value of ``expression`` afterwards. Raises if the cell fails."""
        expressions = {"it": f"__import__('json').dumps({expression})"} if expression else {}
        sent = time.monotonic()
        ident = self._client.execute(code, silent=silent, store_history=not silent, user_expressions=expressions)
        reply = self._client.get_shell_msg(timeout=120)
        took = time.monotonic() - sent
        output = self._output(ident)
        content = reply["content"]
        if content["status"] != "ok":
            raise RuntimeError("\n".join([f"this cell failed:\n{code}\n", *content.get("traceback", ()), output]))
        return took, json.loads(_unquoted(content["user_expressions"]["it"])) if expression else None

    def _output(self, ident: str) -> str:
        told = []
        while True:
            message = self._client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != ident:
                continue
            if message["msg_type"] == "stream":
                told.append(message["content"]["text"])
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return "".join(told)

    def close(self) -> None:
        """End it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _unquoted(shown: dict[str, Any]) -> str:
    """The text that a user expression showed as its repr."""
    if shown["status"] != "ok":
        raise RuntimeError(f"{shown['ename']}: {shown['evalue']}")
    text: str = shown["data"]["text/plain"]
    return text[1:-1]


def measure(kernel: Kernel, case: Case) -> tuple[float | None, float]:
    """One turn: seconds to the last rank's first statement (None: nothing was started), and of the whole cell."""
    kernel.run("_settle()", silent=True)
    time.sleep(PAUSE)
    whole, _ = kernel.run(case.cell)
    if not case.began:
        return None, whole
    _, (called, began) = kernel.run("", f"[CALLED, {case.began}]", silent=True)
    if min(began) < called:
        raise RuntimeError(f"{case.name}: a rank did not say when it began: {began}, called at {called}")
    return max(began) - called, whole


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Median and the middle eighty per cent, in milliseconds."""
    ordered = sorted(1000 * second for second in seconds)
    tenth = round((len(ordered) - 1) / 10)
    return {"median": statistics.median(ordered), "p10": ordered[tenth], "p90": ordered[-1 - tenth]}


def _cell(measured: dict[int, float], floor: dict[int, float]) -> str:
    if not measured:
        return f"{'-':>8} {'':>17} {'':>7}"
    s = spread(measured.values())
    middle = f"({s['p10']:.1f}-{s['p90']:.1f})"
    ratio = statistics.median(seconds / floor[turn] for turn, seconds in measured.items())
    return f"{s['median']:>8.1f} {middle:>17} {ratio:>6.2f}x"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Aligned text, times in milliseconds."""
    floor = next(iter(results.values()))
    lines = [
        f"{'':29} {'first statement of the last rank, ms':^34}  {'whole cell, ms':^34}  {'':>5}",
        f"{'':29} {'median':>8} {'(p10-p90)':>17} {'ratio':>7}  {'median':>8} {'(p10-p90)':>17} {'ratio':>7}  {'n':>5}",
    ]
    for name, result in results.items():
        if not result["installed"]:
            lines.append(f"{name:29} not installed")
            continue
        row = f"{name:29} {_cell(result['first'], floor['first'])}  {_cell(result['whole'], floor['whole'])}"
        row += f"  {len(result['whole']):>5}"
        if result["budget"] is not None:
            row += f"  budget {result['budget']:g}x"
        lines.append(row)
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spawn-every", type=int, default=5, metavar="N", help="mp.spawn's turn comes every N rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every sample there, in seconds")
    given = parser.parse_args()
    todo = cases(given.ranks)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as modules:
        Path(modules, "nbspawn_benchmark.py").write_text(MODULE)
        kernel = Kernel(modules)
        try:
            kernel.run(SETUP.replace("{ranks}", str(given.ranks)))
            kernel.run(SETTLE)
            for case in todo:
                _, installed = kernel.run("", f"{case.needs!r} in sys.modules", silent=True)
                results[case.name] = {"installed": installed, "budget": case.budget, "first": {}, "whole": {}}
            for turn in range(-WARM_UP, given.rounds):
                first_up = turn % len(todo)
                for case in todo[first_up:] + todo[:first_up]:
                    result = results[case.name]
                    if not result["installed"] or (case.slow and turn % given.spawn_every):
                        continue
                    first, whole = measure(kernel, case)
                    if turn >= 0:
                        result["whole"][turn] = whole
                        if first is not None:
                            result["first"][turn] = first
        finally:
            kernel.close()
    print(f"{given.ranks} ranks, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps({"ranks": given.ranks, "rounds": given.rounds, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
