"""nbspawn beside its peers: start, data, output, errors, memory, training, growth; each from a cell of a real kernel.

    tests/benchmarks/compare [--tasks start,meet,...] [--rounds N] [--json PATH]

The script ``compare`` makes the peers' environment first; where they are installed already,
``python tests/benchmarks/compare.py`` does the same.

Each tool has a kernel of its own that has imported torch and the tool, and nothing runs in it but in its turn. In a
round every tool has one turn (A B C, then B C A, ...), so other load on the machine meets all of them. The rounds of a
task are spread over the whole run: it goes through all tasks SWEEPS times, with new kernels each time, since a shared
machine is faster or slower for minutes on end, and one kernel is not like the next. The first round of a task in
a sweep is not counted. Tools that need seconds to start ranks have their few turns in the first sweep.

Every time is the median of its turns, with the least and the greatest; every ratio is the median of the ratios of the
rounds in which both had a turn, with the quarter and three-quarter points.

A time begins when IPython begins with the cell (its ``pre_run_cell`` event, the same for all tools) unless the row says
otherwise. Moments in ranks are told by a file each (work.py). All clocks are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import psutil
from kernel import Kernel, Ran
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
    """``floor`` is the tool that ratios are to; ``scale`` makes the unit of seconds or bytes."""

    title: str
    unit: str = "ms"
    scale: float = 1000.0
    floor: str = FORK.name
    budget: str = ""


MB = ("MB", 1e-6)


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
    hangs = True
    try:
        ran = [kernel.try_(cell, look_for="ValueError") for cell in typed]
        hangs = False
        if any(one.error for one in ran) and not task.raises:
            message = "\n".join(one.text[-3000:] for one in ran)
            raise RuntimeError(f"{tool.name}, {task.name}: {ran[-1].error}\n{message}")
        values = tool.values if task.name.startswith("give") else ""
        if values:  # in the cell's time: a value that is not read may not be there yet
            ran.append(kernel.run(f"READ = [touched(one) for one in {values}]"))
        moments: Moments = {}
        for path in Path(folder).glob("*-*"):
            moments.setdefault(path.name.rpartition("-")[0], []).append(float(path.read_text()))
        try:
            return task.figures(Turn(ran[0], ran[-1], moments, kernel))
        except KeyError as absent:
            message = "\n".join(one.text[-3000:] for one in ran)
            raise RuntimeError(f"{tool.name}, {task.name}: no rank message {absent}\n{message}") from None
    finally:
        for path in Path(folder).iterdir():
            path.unlink()
        if not hangs:
            kernel.run(f"{tool.after if tool.slow else ''}\n{task.after}", silent=True)


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
    return {"stepped": max(turn.moments["stepped"]) - turn.called, "whole": turn.ran.replied - turn.first.sent}


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
    tool.name: replace(tool, cannot={"have": "not tried: minutes, to judge by 400 MB", **tool.cannot})
    if tool.slow
    else tool
    for tool in TOOLS
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
            "have": Row(
                f"closure of {title}: all ranks have read it",
                floor=floor.name,
                budget="" if title[0] == "1" else "3 x",
            ),
            "pss": Row(f"closure of {title}: memory of all ranks (PSS)", *MB, floor=floor.name),
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
                "first": Row("start: the last rank's first statement", budget="2 x, and 1/30 of spawn"),
                "whole": Row("start: the whole cell", budget="100 ms, less than accelerate"),
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
                "ranks": Row("memory: a rank that has done nothing (PSS)", *MB),
                "kernel": Row("memory: the kernel (PSS)", *MB),
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
                "printed": Row("flood of 4 x 20,000 lines: the last rank has printed", floor=FILE.name, budget="1.3 x"),
                "whole": Row("flood: the cell has ended", floor=FILE.name),
                "notebook": Row("flood: what the notebook gets", "kB", 1e-3, floor=FILE.name, budget="200 kB"),
                "kernel": Row("flood: resident memory of the kernel afterwards", *MB, floor=FILE.name),
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
                "visible": Row("error of a rank: seen under the cell", budget="200 ms"),
                "ended": Row("error of a rank: the cell has ended", budget="4 s"),
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
            {"whole": Row("a cell in ranks that live already", floor=EMPTY.name, budget="5 ms more")},
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
                    "seconds": Row(f"training, {what}: {steps} steps", "s", 1.0, "torchrun", "1.005 x"),
                    "processor": Row(f"training, {what}: processor time of a rank", "s", 1.0, "torchrun"),
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
                8,
                {
                    "ready": Row(f"{n} ranks: the last one's first all_reduce is done"),
                    "whole": Row(f"{n} ranks: the whole cell"),
                },
                group=True,
                ranks=n,
                tools=(FORK, AUTO),
            )
            for n in (1, 2, 4, 8, 16, 32, 64)
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
            {
                "whole": Row(
                    f"first training step, {what}: the whole cell, {when}",
                    "s",
                    1.0,
                    "torchrun",
                    budget="0.30 s, and 1/20 of torchrun" if fn == "step" else "",
                )
            },
            after=SETTLE if fresh else "",  # what nbspawn has learned is remembered for the next kernel
            fresh=fresh,
            needs=needs,
            tools=tuple(replace(tool, slow=False) for tool in TOOLS if tool.name in ("torchrun", FORK.name, AUTO.name)),
        )


def variant(tool: Tool, name: str, options: str) -> Tool:
    """nbspawn with more on the magic's line."""
    return replace(tool, name=name, cells=tuple(cell.replace(" -o", f" {options} -o", 1) for cell in tool.cells))


# ---------------------------------------------------------------- running and telling


@dataclass
class Results:
    """``figures[row key][tool][round]``; ``missing[task][tool]`` says why."""

    figures: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)
    hung: set[tuple[str, str]] = field(default_factory=set)


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


def run(task: Task, kernels: Kernels, results: Results, rounds: range, slow_rounds: int) -> None:
    """Some rounds of one task."""
    missing = results.missing.setdefault(task.name, {})
    for tool in task.tools:
        if task.fn in tool.cannot:
            missing[tool.name] = tool.cannot[task.fn]
        elif (tool.name, task.kind) in results.hung:
            missing[tool.name] = "hangs (not tried again)"
        elif not (installed(tool.needs) and installed(task.needs)):
            missing[tool.name] = "not installed"
    there = [tool for tool in task.tools if tool.name not in missing]
    failed: Counter[str] = Counter()
    for number in (-1, *rounds):
        first = number % len(there)
        for tool in there[first:] + there[:first]:
            if tool.name in missing or (tool.slow and (number < 0 or number >= slow_rounds)):
                continue
            if task.fresh:
                kernels.end(tool)
            try:
                kernel, folder = kernels.get(tool)
                figures = turn(kernel, tool, task, folder)
            except (RuntimeError, TimeoutError) as error:
                print(f"\n{error}", file=sys.stderr)
                if isinstance(error, TimeoutError):
                    kernels.end(tool)
                    results.hung.add((tool.name, task.kind))
                failed[tool.name] += 1
                if failed[tool.name] == 2 or isinstance(error, TimeoutError):
                    missing[tool.name] = f"failed: {str(error).splitlines()[0]}"
                continue
            for name, value in figures.items() if number >= 0 else ():
                results.figures.setdefault(f"{task.name}/{name}", {}).setdefault(tool.name, {})[number] = value


def installed(package: str) -> bool:
    """Here, and so in the kernels."""
    from importlib.util import find_spec

    return find_spec(package) is not None


def ratio(mine: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Median and the middle half of the rounds' own ratios."""
    each = sorted(mine[number] / other[number] for number in mine.keys() & other.keys() if other[number])
    if not each:
        return None
    return each[len(each) // 4], statistics.median(each), each[-1 - len(each) // 4]


def section(task: Task, key: str, row: Row, results: Results) -> list[str]:
    """One row of the suite: a line a tool."""
    found = results.figures.get(f"{task.name}/{key}", {})
    floor = found.get(row.floor, {})
    budget = f"; budget {row.budget}" if row.budget else ""
    lines = [f"{row.title} [{row.unit}; ratio to {row.floor}{budget}]"]
    for tool in task.tools:
        values = found.get(tool.name)
        if not values:
            why = results.missing[task.name].get(tool.name, "does not show")
            lines.append(f"  {tool.name:34} {why}")
            continue
        shown = sorted(row.scale * value for value in values.values())
        spread = f"({_number(shown[0])}-{_number(shown[-1])})"
        line = f"  {tool.name:34} {_number(statistics.median(shown)):>9} {spread:>19} n={len(shown):<3}"
        of_floor = ratio(values, floor)
        if of_floor is not None:
            low, middle, high = of_floor
            line += f" {middle:>8.3f} x ({low:.3f}-{high:.3f})"
        lines.append(line)
    return lines


def matrix(todo: list[Task], results: Results) -> str:
    """All rows as one table in Markdown: medians, by tool."""
    names = [AUTO.name, *(tool.name for tool in TOOLS if tool is not AUTO)]
    lines = [f"| | {' | '.join(names)} | floor |", "|---" * (len(names) + 2) + "|"]
    for task in todo:
        for key, row in task.rows.items():
            found = results.figures.get(f"{task.name}/{key}", {})
            if task.tools is WARM or not found:
                continue
            floor = "" if row.floor in names else row.floor
            message = []
            for name in [*names, *filter(None, [floor])]:
                values = [row.scale * value for value in found.get(name, {}).values()]
                missing = results.missing.get(task.name, {}).get(name, "")
                hangs, fails = "hang" in missing or "no word" in missing, missing.startswith("failed")
                why = "hangs" if hangs else "fails" if fails else "–"
                message.append(_number(statistics.median(values)) if values else why)
            lines.append(f"| {row.title}, {row.unit} | {' | '.join(message)} {'' if floor else '|'} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def machine() -> str:
    """What the figures belong to."""
    names = ("torch", "ipykernel", "accelerate", "torchrunx", "ipyparallel", "nbdistributed", "ray")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names if installed(name))
    cores = len(os.sched_getaffinity(0))
    return f"{time.strftime('%Y-%m-%d')}: {cores} cores, Python {platform.python_version()}, {versions}"


def main() -> None:
    """Measure, print, write."""
    todo = tasks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", metavar="A,B", default="", help="only tasks whose names begin so")
    parser.add_argument("--tools", metavar="A,B", default="", help="only tools whose names begin so")
    parser.add_argument("--rounds", type=float, default=1.0, metavar="X", help="times the usual number of rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there, in seconds and bytes")
    parser.add_argument("--matrix", type=Path, metavar="PATH", help="show such a file as one table; measure nothing")
    given = parser.parse_args()
    if given.matrix is not None:
        message = json.loads(given.matrix.read_text())
        print(message["machine"], matrix(todo, Results(message["figures"], message["missing"])), sep="\n\n")
        return
    wanted = tuple(given.tasks.split(","))
    chosen = tuple(given.tools.split(","))
    results = Results()
    print(machine(), flush=True)
    todo = [
        replace(task, tools=tuple(tool for tool in task.tools if tool.name.startswith(chosen)))
        for task in todo
        if task.name.startswith(wanted)
    ]
    for sweep in range(SWEEPS):
        with ExitStack() as stack:
            kernels = Kernels(stack)
            for task in todo:
                began = time.monotonic()
                total = max(1, round(task.rounds * given.rounds))
                rounds = range(total * sweep // SWEEPS, total * (sweep + 1) // SWEEPS)
                if rounds:
                    run(task, kernels, results, rounds, task.slow_rounds or total)
                    print(f"  sweep {sweep + 1}, {task.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
                if given.json is not None:
                    message = {"machine": machine(), "figures": results.figures, "missing": results.missing}
                    given.json.write_text(json.dumps(message, indent=1))
    for task in todo:
        for key, row in task.rows.items():
            print("\n" + "\n".join(section(task, key, row, results)))


if __name__ == "__main__":
    main()
