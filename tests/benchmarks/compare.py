"""nbspawn beside its peers: start, data, output, errors, memory, training, growth; each from a cell of a real kernel.

    tests/benchmarks/compare [--tasks start,meet,...] [--rounds N] [--json PATH]

The script ``compare`` makes the peers' environment first; where they are installed already,
``python tests/benchmarks/compare.py`` does the same.

Each tool has a kernel of its own that has imported torch and the tool, and nothing runs in it but in its turn. In a
round every tool has one turn (A B C, then B C A, ...), so other load on the machine meets all of them. The rounds of a
task are spread over the whole run: it goes through all tasks SWEEPS times, with new kernels each time, since a shared
machine is faster or slower for minutes on end, and one kernel is not like the next. The first round of a task in
a sweep is not counted. Tools that need seconds to start ranks have their few turns in the first sweep.

Printed are medians with the least and the greatest, and the medians of the ratios of the rounds in which both had a
turn, with the quarter and three-quarter points. ``--json`` writes every sample, and what each tool that has none did:
with ``--tasks`` a run can be done in pieces, into the same file (samples.py).

A tool that fails is given another turn, and a new kernel: what a failure leaves decides nothing. The error of the task
"fail" leaves something, too, so there are new kernels after it.

A time begins when IPython begins with the cell (its ``pre_run_cell`` event, the same for all tools) unless the row says
otherwise. Moments in ranks are told by a file each (work.py). All clocks are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import samples
from kernel import PATIENCE, Kernel, Ran
from tools import AUTO, EMPTY, FORK, TOOLS, WARM, Tool

HERE = Path(__file__).resolve().parent
RANKS = 4
SWEEPS = 4
PAUSE = 0.1  # seconds between two turns

SETUP = """
import os, time
import torch

FOLDER = {folder!r}

def _note_call(info):
    if not any(name.startswith("called-") for name in os.listdir(FOLDER)):
        stamp(FOLDER, "called")

get_ipython().events.register("pre_run_cell", _note_call)
"""

# Silent cells fire no pre_run_cell event.
SETTLE = """
if "server" in globals():
    while server.bringing_up or not server.warm:
        time.sleep(0.02)
"""

Moments = dict[str, list[float]]


@dataclass(frozen=True)
class Turn:
    """What one turn left: ``moments`` by name, those of all ranks; ``ran`` is the last cell."""

    first: Ran
    ran: Ran
    moments: Moments
    kernel: Kernel

    @property
    def called(self) -> float:
        """When IPython began."""
        return self.moments["called"][0]


Figures = dict[str, float]


@dataclass(frozen=True)
class Task:
    """Something that is measured with every tool. ``figures`` are the rows' values of one turn."""

    name: str
    fn: str
    args: tuple[object, ...]
    figures: Callable[[Turn], Figures]
    rounds: int
    rows: Mapping[str, Row]
    before: str = ""
    after: str = ""
    group: bool = False
    """Ranks meet; ``port`` is what a tool gets that does not tell them where."""
    raises: bool = False
    fresh: bool = False
    """Each turn in a new kernel."""
    needs: str = "torch"
    ranks: int = RANKS
    tools: tuple[Tool, ...] = TOOLS
    slow_rounds: int | None = None

    @property
    def kind(self) -> str:
        """A tool that hangs in one task of a kind is not given the next."""
        return f"{self.fn} {self.name.split()[-1]}"


@dataclass(frozen=True)
class Row:
    """``floor`` is the tool that ratios are to."""

    title: str
    unit: str = "s"
    floor: str = FORK.name


class Name(str):
    """An argument that is an expression of the notebook."""

    __repr__ = str.__str__


def cells(tool: Tool, task: Task, folder: str, port: int) -> list[str]:
    """What the user types."""
    given = [port if arg is Port else arg for arg in task.args]
    args = [folder if tool.literal else Name("FOLDER"), *given]
    words = " ".join(shlex.quote(repr(arg)) for arg in args)
    shown = ", ".join(map(repr, args))
    made = [
        cell.format(fn=task.fn, args=shown, words=words, n=task.ranks, here=HERE) if "{" in cell else cell
        for cell in tool.cells
    ]
    if task.group and tool.needs == "nbspawn":
        made = [cell.replace(" -o VALUES", " -b gloo -o VALUES", 1) for cell in made]
    return made


class Port:
    """Stands for a free port, or 0 where the tool makes the group or sets the environment."""


def free_port() -> int:
    """Of the loopback; nobody else is likely to take it meanwhile."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def turn(kernel: Kernel, tool: Tool, task: Task, folder: str) -> Figures:
    """One turn: its rows' values."""
    kernel.run(f"{SETTLE}\n{task.before}", silent=True)
    time.sleep(PAUSE)
    typed = cells(tool, task, folder, 0 if tool.own_group else free_port())
    try:
        ran = [kernel.try_(cell, look_for="ValueError") for cell in typed]
        error = next((one.error for one in ran if one.error), "")
        if error and not task.raises:
            raise Failed(error, ran)
        values = tool.values if task.name.startswith("give") else ""
        if values:  # in the cell's time: a value that is not read may not be there yet
            ran.append(kernel.run(f"READ = [touched(one) for one in {values}]"))
        moments: Moments = {}
        for path in Path(folder).glob("*-*"):
            moments.setdefault(path.name.rpartition("-")[0], []).append(float(path.read_text()))
        try:
            return task.figures(Turn(ran[0], ran[-1], moments, kernel))
        except KeyError as absent:
            raise Failed(f"no rank told {absent}", ran) from None
    except TimeoutError:
        raise Hangs(kernel) from None
    finally:
        for path in Path(folder).iterdir():
            path.unlink()


class Failed(RuntimeError):
    """A turn without a figure; the first line of the message is the one that tells most."""

    def __init__(self, what: str, ran: list[Ran]) -> None:
        text = "\n".join(one.text[-3000:] for one in ran)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"(Error|Exception)\b.*: \S", line)]
        last = (errors or lines or [""])[-1]
        super().__init__(f"{last if what in last else f'{what}: {last}'}\n{text}")


class Hangs(TimeoutError):
    """``how`` it hangs: a tool whose processes compute may only be slow."""

    def __init__(self, kernel: Kernel) -> None:
        busy = kernel.busy()
        self.how = "hangs" if busy < 0.1 else f"> {PATIENCE:.0f} s"
        super().__init__(f"no end after {PATIENCE:.0f} s, when its processes use {busy:.1f} cores")


# ---------------------------------------------------------------- the tasks


def _start(turn: Turn) -> Figures:
    return {"first": max(turn.moments["first"]) - turn.called, "whole": turn.ran.replied - turn.first.sent}


def _meet(turn: Turn) -> Figures:
    return {"ready": max(turn.moments["ready"]) - turn.called}


def _live(turn: Turn) -> Figures:
    return {"ranks": sum(turn.moments["pss"]) / RANKS, "kernel": _pss(turn.kernel.pid)}


def _have(turn: Turn) -> Figures:
    return {"have": max(turn.moments["have"]) - turn.called, "pss": sum(turn.moments.get("pss", [0.0]))}


def _give(turn: Turn) -> Figures:
    return {"given": turn.ran.replied - max(turn.moments["made"])}


def _flood(turn: Turn) -> Figures:
    moments = turn.moments
    return {
        "printed": max(moments["printed"]) - min(moments["first"]),
        "whole": turn.ran.replied - min(moments["first"]),
        "notebook": turn.ran.output,
        "kernel": psutil.Process(turn.kernel.pid).memory_info().rss,
    }


def _fail(turn: Turn) -> Figures:
    raised = min(turn.moments["raised"])
    found = {"ended": turn.ran.replied - raised}
    return {**found, "visible": turn.ran.visible - raised} if turn.ran.visible else found


def _step(turn: Turn) -> Figures:
    return {"whole": turn.ran.replied - turn.first.sent}


def _train(turn: Turn) -> Figures:
    return {
        "seconds": statistics.mean(turn.moments["seconds"]),
        "processor": statistics.mean(turn.moments["processor"]),
    }


def _pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


MEMCPY = Tool("one memcpy of it", ("copy = {data}; stamp(FOLDER, 'have')",))
FILE = Tool("a flushed file, bare torch, fork", tuple(cell.replace("{fn}", "write") for cell in FORK.cells), FORK.setup)

DATA = {  # expressions: what is sent, and one copy of its memory
    "1 MB numpy": ("numpy.ones(131_072)", "torch.from_numpy(DATA).clone()"),
    "400 MB numpy": ("numpy.ones(50_000_000)", "torch.from_numpy(DATA).clone()"),
    "400 MB tensor": ("torch.ones(100_000_000)", "DATA.clone()"),
    "model, 200 MB": (
        "torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(512, 8, 2048) for _ in range(16)])",
        "[parameter.detach().clone() for parameter in DATA.parameters()]",
    ),
    "1,000,000 small objects": (
        "[(str(number), number, {'x': number}) for number in range(1_000_000)]",
        "pickle.loads(cloudpickle.dumps(DATA))",
    ),
    "2 GB tensor": ("torch.ones(500_000_000)", "DATA.clone()"),
}


_SMALLER = {
    tool.name: replace(tool, skips={"have": "takes minutes, to judge by 400 MB"} if tool.slow else {}) for tool in TOOLS
}


def _data_tasks() -> Iterator[Task]:
    for title, (made, copied) in DATA.items():
        objects = "objects" in title
        floor = replace(
            MEMCPY,
            cells=(MEMCPY.cells[0].replace("{data}", copied),),
            name="cloudpickle, there and back" if objects else MEMCPY.name,
        )
        rows = {
            "have": Row(f"closure of {title}: all ranks have read it", floor=floor.name),
            "pss": Row(f"closure of {title}: memory of all ranks (PSS)", "B", floor=floor.name),
        }
        yield Task(
            f"have {title}",
            "have",
            (RANKS, Name("DATA")),
            _have,
            8,
            rows,
            before=f"import numpy, pickle, cloudpickle\nDATA = {made}",
            after="DATA = copy = VALUES = ASKED = there = None",
            tools=(floor, *(_SMALLER[tool.name] if title.startswith("2 GB") else tool for tool in TOOLS)),
            slow_rounds=1,
        )


def tasks() -> list[Task]:
    """In the order of the table."""
    return [
        Task(
            "start",
            "start",
            (),
            _start,
            16,
            {
                "first": Row("start: the last rank's first statement"),
                "whole": Row("start: the whole cell"),
            },
            tools=(
                *TOOLS,
                variant(AUTO, "nbspawn -m fork", "-m fork"),
                variant(AUTO, "nbspawn --view quiet", "--view quiet"),
            ),
            slow_rounds=1,
        ),
        Task(
            "meet",
            "meet",
            (RANKS, Port),
            _meet,
            12,
            {"ready": Row("process group: the last rank's first all_reduce is done")},
            group=True,
            slow_rounds=1,
        ),
        Task(
            "live",
            "live",
            (RANKS,),
            _live,
            4,
            {
                "ranks": Row("memory: a rank that has done nothing (PSS)", "B"),
                "kernel": Row("memory: the kernel (PSS)", "B"),
            },
            slow_rounds=1,
        ),
        *_data_tasks(),
        Task(
            "give",
            "give",
            (100_000_000,),
            _give,
            8,
            {
                "given": Row(
                    "results: 400 MB from each rank, until all have been read in the kernel", floor="one memcpy of all"
                )
            },
            tools=(
                replace(
                    MEMCPY,
                    name="one memcpy of all",
                    cells=(
                        "stamp(FOLDER, 'made')\n"
                        "copy = [DATA.clone() for _ in range(4)]\n"
                        "READ = [touched(one) for one in copy]",
                    ),
                ),
                *TOOLS,
            ),
            before="DATA = torch.ones(100_000_000)",
            after="DATA = copy = VALUES = ASKED = READ = None",
            slow_rounds=1,
        ),
        Task(
            "flood",
            "flood",
            (20_000,),
            _flood,
            12,
            {
                "printed": Row("flood of 4 x 20,000 lines: the last rank has printed", floor=FILE.name),
                "whole": Row("flood: the cell has ended", floor=FILE.name),
                "notebook": Row("flood: what the notebook gets", "B", floor=FILE.name),
                "kernel": Row("flood: resident memory of the kernel afterwards", "B", floor=FILE.name),
            },
            # A forked rank prints through the kernel's own thread for output: 2 ms a line.
            tools=(FILE, *(replace(tool, slow=tool is not AUTO) for tool in TOOLS)),
            slow_rounds=1,
        ),
        Task(
            "fail",
            "fail",
            (),
            _fail,
            12,
            {
                "visible": Row("error of a rank: seen under the cell"),
                "ended": Row("error of a rank: the cell has ended"),
            },
            raises=True,
            slow_rounds=1,
        ),
        Task(
            "kept",
            "pass",
            (),
            lambda turn: {"whole": turn.ran.seconds},
            100,
            {"whole": Row("a cell in ranks that live already", floor=EMPTY.name)},
            tools=WARM,
        ),
        *(
            Task(
                f"train {what}",
                "train",
                (2, Port, steps, together),
                _train,
                8,
                {
                    "seconds": Row(f"training, {what}: {steps} steps", "s", "torchrun"),
                    "processor": Row(f"training, {what}: processor time of a rank", "s", "torchrun"),
                },
                group=True,
                ranks=2,
                tools=tuple(
                    replace(tool, slow=False)
                    for tool in TOOLS
                    if tool.name in ("torchrun", "accelerate", FORK.name, AUTO.name)
                ),
            )
            for what, steps, together in (("computing", 800, False), ("small collectives", 800, True))
        ),
        *(
            Task(
                f"grow {n}",
                "meet",
                (n, Port),
                lambda turn: {**_meet(turn), "whole": turn.ran.replied - turn.first.sent},
                8 if n < 256 else 2,
                {
                    "ready": Row(f"{n} ranks: the last one's first all_reduce is done"),
                    "whole": Row(f"{n} ranks: the whole cell"),
                },
                group=True,
                ranks=n,
                tools=(FORK, AUTO),
            )
            for n in (1, 2, 4, 8, 16, 32, 64, 256)
        ),
        *_step_tasks(),  # the last: from then on nbspawn's fork server has these libraries too
    ]


def _step_tasks() -> Iterator[Task]:
    ddp, transformers, lightning = "DistributedDataParallel", "a tiny BERT of transformers", "Lightning's Trainer"
    for name, fn, what, needs, fresh in (
        ("step", "step", ddp, "torch", False),
        ("step transformers", "step_transformers", transformers, "transformers", False),
        ("step lightning", "step_lightning", lightning, "lightning", False),
        ("step, new kernel", "step", ddp, "torch", True),
        ("step transformers, new kernel", "step_transformers", transformers, "transformers", True),
        ("step lightning, new kernel", "step_lightning", lightning, "lightning", True),
    ):
        when = "the first run of a new kernel" if fresh else "from the second run on"
        yield Task(
            name,
            fn,
            (RANKS,) if fn == "step_lightning" else (RANKS, Port),
            _step,
            4,
            {"whole": Row(f"first training step, {what}: the whole cell, {when}", "s", "torchrun")},
            after=SETTLE if fresh else "",  # what nbspawn has learned is remembered for the next kernel
            fresh=fresh,
            needs=needs,
            tools=tuple(replace(tool, slow=False) for tool in TOOLS if tool.name in ("torchrun", FORK.name, AUTO.name)),
        )


def variant(tool: Tool, name: str, options: str) -> Tool:
    """nbspawn with more on the magic's line."""
    return replace(tool, name=name, cells=tuple(cell.replace(" -o", f" {options} -o", 1) for cell in tool.cells))


# ---------------------------------------------------------------- running and telling


class Kernels:
    """One for each tool, started when it is first needed; tools that share what they need share it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_"))
        self._kernels: dict[str, tuple[Kernel, str]] = {}

    def get(self, tool: Tool) -> tuple[Kernel, str]:
        """The kernel and the folder of its moments."""
        key = tool.setup
        if key not in self._kernels:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench_"))
            kernel = Kernel(os.fspath(HERE), self._caches)
            self._stack.callback(kernel.close)
            kernel.run((HERE / "work.py").read_text())
            kernel.run(SETUP.format(folder=folder))
            kernel.run(tool.setup)
            self._kernels[key] = kernel, folder
        return self._kernels[key]

    def end(self, tool: Tool) -> None:
        """One that hangs, or has served."""
        if tool.setup in self._kernels:
            self._kernels.pop(tool.setup)[0].close()


class Run:
    """What the sweeps share."""

    def __init__(self, record: samples.Record) -> None:
        self._record = record
        self._begun: dict[str, samples.Task] = {}
        self._hung: dict[tuple[str, str], tuple[str, str]] = {}
        self._given_up: set[tuple[str, str]] = set()

    def rounds(self, task: Task, kernels: Kernels, rounds: range, slow_rounds: int) -> None:
        """Some rounds of one task."""
        found = self._begin(task)
        there = [tool for tool in task.tools if (tool.name, task.name) not in self._given_up]
        for number in (-1, *rounds) if there else ():
            first = number % len(there)
            for tool in there[first:] + there[:first]:
                if (tool.name, task.name) in self._given_up:
                    continue
                if tool.slow and (number < 0 or found.turns(tool.name) >= slow_rounds):
                    continue
                self._turn(tool, task, kernels, found, number)
        if task.raises:
            for tool in there:
                kernels.end(tool)

    def _begin(self, task: Task) -> samples.Task:
        """In the first sweep: what is known to have no figures has a reason."""
        if task.name in self._begun:
            return self._begun[task.name]
        found = self._begun[task.name] = self._record.begin(task.name, ranks=task.ranks)
        for key, row in task.rows.items():
            floor = row.floor if any(tool.name == row.floor for tool in task.tools) else ""
            found.quantity(key, row.title, row.unit, floor)
        for tool in task.tools:
            needed = next((name for name in (tool.needs, task.needs) if not installed(name)), "")
            if task.fn in tool.cannot:
                self._give_up(found, tool, task, "cannot", tool.cannot[task.fn])
            elif task.fn in tool.skips:
                self._give_up(found, tool, task, "not tried", tool.skips[task.fn])
            elif needed:
                self._give_up(found, tool, task, "not installed", f"no {needed} in the environment")
            elif (tool.name, task.kind) in self._hung:
                self._give_up(found, tool, task, *self._hung[tool.name, task.kind])
        return found

    def _turn(self, tool: Tool, task: Task, kernels: Kernels, found: samples.Task, number: int) -> None:
        if task.fresh:
            kernels.end(tool)
        figures: Figures = {}
        try:
            kernel, folder = kernels.get(tool)
            figures = turn(kernel, tool, task, folder)
            kernel.run(f"{tool.after if tool.slow else ''}\n{task.after}", silent=True)
        except Exception as error:  # a tool fails in its own way; the others go on, and the file says how
            print(f"\n{tool.name}, {task.name}: {error}", file=sys.stderr)
            kernels.end(tool)
            if not figures:  # else only what is not timed has failed
                self._note(tool, task, found, error)
        for key, value in figures.items() if number >= 0 else ():
            found.add(key, tool.name, value, number)

    def _note(self, tool: Tool, task: Task, found: samples.Task, error: Exception) -> None:
        how = error.how if isinstance(error, Hangs) else "fails"
        known = isinstance(error, Hangs | Failed)
        missing = found.miss(tool.name, how, samples.brief(f"{'' if known else f'{type(error).__name__}: '}{error}"))
        if how != "fails":
            self._hung[tool.name, task.kind] = how, f"in {task.name!r}: {missing.why}"
        if how != "fails" or missing.turns == 2:
            self._given_up.add((tool.name, task.name))

    def _give_up(self, found: samples.Task, tool: Tool, task: Task, how: str, why: str) -> None:
        found.miss(tool.name, how, why)
        self._given_up.add((tool.name, task.name))


def installed(package: str) -> bool:
    """Here, and so in the kernels."""
    from importlib.util import find_spec

    return find_spec(package) is not None


def main() -> None:
    """Measure, print, write."""
    todo = tasks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", metavar="A,B", default="", help="only tasks whose names begin so")
    parser.add_argument("--tools", metavar="A,B", default="", help="only tools whose names begin so")
    parser.add_argument("--rounds", type=float, default=1.0, metavar="X", help="times the usual number of rounds")
    samples.add_option(parser)
    given = parser.parse_args()
    wanted = tuple(given.tasks.split(","))
    chosen = tuple(re.split(r",(?! )", given.tools))
    record = samples.Record("compare", given.json)
    todo = [
        replace(task, tools=tuple(tool for tool in task.tools if tool.name.startswith(chosen)))
        for task in todo
        if task.name.startswith(wanted)
    ]
    measured = Run(record)
    for sweep in range(SWEEPS):
        with ExitStack() as stack:
            kernels = Kernels(stack)
            for task in todo:
                began = time.monotonic()
                total = max(1, round(task.rounds * given.rounds))
                rounds = range(total * sweep // SWEEPS, total * (sweep + 1) // SWEEPS)
                if rounds and task.tools:
                    measured.rounds(task, kernels, rounds, task.slow_rounds or total)
                    record.save()
                    print(f"  sweep {sweep + 1}, {task.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    for task in todo:
        if task.name in record.tasks:
            print("\n" + "\n".join(samples.told(task.name, record.tasks[task.name])))


if __name__ == "__main__":
    main()
