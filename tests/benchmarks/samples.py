"""What a benchmark has measured, as a file: every sample, on what machine, and why something is missing.

A file has the tasks of one benchmark. A task that is measured again replaces itself alone, so a long run can be done in
pieces: each task has the date, the versions and the commit with which it ran. Samples are in seconds, bytes, or shares
of one core, with four significant digits. A list has an item a round, null where a tool had no turn.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "torch", "ipykernel", "accelerate", "torchrunx", "ipyparallel", "nbdistributed", "ray", "transformers", "lightning",
    "torch_xla",
)  # fmt: skip
ALL = "*"
"""Instead of a series' name: what all of a task's series miss that have no samples."""

Samples = list[float | None]
Machine = dict[str, Any]


@dataclass
class Missing:
    """Why a series lacks samples. ``how`` is a word or two: hangs, fails, cannot, not tried, not installed, > 60 s."""

    how: str
    why: str
    turns: int = 1


@dataclass
class Quantity:
    """``samples`` by series: a tool, or a way to do something. ``base`` is the series that ratios are to, round by
    round."""

    title: str
    unit: str = "s"
    base: str = ""
    samples: dict[str, Samples] = field(default_factory=dict)

    def values(self, series: str) -> list[float]:
        """Of the rounds in which it had a turn."""
        return [value for value in self.samples.get(series, ()) if value is not None]

    def ratios(self, series: str, base: str = "") -> list[float]:
        """Of the rounds in which both had a turn."""
        pairs = zip(self.samples.get(series, ()), self.samples.get(base or self.base, ()), strict=False)
        return [one / other for one, other in pairs if one is not None and other]


@dataclass
class Task:
    """What was measured together."""

    machine: Machine
    settings: dict[str, Any] = field(default_factory=dict)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    missing: dict[str, Missing] = field(default_factory=dict)

    def quantity(self, key: str, title: str, unit: str = "s", base: str = "") -> Quantity:
        """The one of that key; it is made when it is first asked for."""
        return self.quantities.setdefault(key, Quantity(title, unit, base))

    def add(self, key: str, series: str, value: float, number: int | None = None) -> None:
        """One sample: of that round, or of the next one."""
        samples = self.quantities[key].samples.setdefault(series, [])
        number = len(samples) if number is None else number
        samples += [None] * (number + 1 - len(samples))
        samples[number] = rounded(value)

    def miss(self, series: str, how: str, why: str) -> Missing:
        """A turn without samples; the last one's reason stays."""
        before = self.missing[series].turns if series in self.missing else 0
        self.missing[series] = Missing(how, why, before + 1)
        return self.missing[series]

    def turns(self, series: str) -> int:
        """That had samples."""
        return max((len(quantity.values(series)) for quantity in self.quantities.values()), default=0)

    def reason(self, key: str, series: str) -> Missing:
        """Why that series has no sample of that quantity."""
        if series in self.missing:
            return self.missing[series]
        if self.turns(series):
            return Missing("–", "none of its turns had this figure", self.turns(series))
        return self.missing.get(ALL, Missing("not measured", "no run had it", 0))


class Record:
    """The results of one benchmark; ``path`` is None if they are only printed."""

    def __init__(self, benchmark: str, path: Path | None = None) -> None:
        self.benchmark = benchmark
        self.path = path
        self.tasks = read(path) if path is not None and path.exists() else {}

    def begin(self, name: str, **settings: Any) -> Task:
        """What an earlier run had of this task goes."""
        self.tasks[name] = Task(machine(), settings)
        return self.tasks[name]

    @contextmanager
    def measuring(self, name: str, **settings: Any) -> Iterator[Task]:
        """A task: an error is its result, and the benchmark goes on. It is saved and printed in the end."""
        task = self.begin(name, **settings)
        try:
            yield task
        except Exception as error:  # whatever fails, and for whatever reason: the page says so
            traceback.print_exc()
            task.miss(ALL, "fails", brief(f"{type(error).__name__}: {error}"))
        self.save()
        print("\n" + "\n".join(told(name, task)), flush=True)

    def save(self) -> None:
        """The file is whole at any moment."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(written(self.benchmark, self.tasks))
        os.replace(new, self.path)


def add_option(parser: ArgumentParser) -> None:
    """``--json``, which every benchmark has."""
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write every sample there; other tasks in that file stay"
    )


# ---------------------------------------------------------------- files


def read(path: Path) -> dict[str, Task]:
    """The tasks of a file, by name."""
    return {
        name: Task(
            task["machine"],
            task["settings"],
            {key: Quantity(**quantity) for key, quantity in task["quantities"].items()},
            {series: Missing(**missing) for series, missing in task["missing"].items()},
        )
        for name, task in json.loads(path.read_text())["tasks"].items()
    }


def written(benchmark: str, tasks: Mapping[str, Task]) -> str:
    """JSON with a line for each series."""
    return _lines({"benchmark": benchmark, "tasks": {name: asdict(task) for name, task in tasks.items()}}, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    if not isinstance(value, dict) or not any(isinstance(one, dict | list) for one in value.values()):
        return json.dumps(value, ensure_ascii=False)
    if "cores" in value:  # the machine
        return json.dumps(value, ensure_ascii=False)
    deeper = indent + " "
    lines = [f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_lines(one, deeper)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def rounded(value: float) -> float:
    """To four significant digits."""
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def machine() -> Machine:
    """What the samples belong to."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": versions,
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", os.fspath(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "nbspawn")
        return git("rev-parse", "--short=7", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.+~-]+/)+")


def brief(text: str) -> str:
    """One line of an error: the first, without colours and folders."""
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    line = _PATH.sub("", lines[0]) if lines else "no message"
    return line if len(line) <= 160 else line[:159] + "…"


# ---------------------------------------------------------------- telling


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quarter point, the median and the three-quarter point."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, method="inclusive")
    return low, statistics.median(values), high


def cost(ratios: Sequence[float], often: int, ranks: int) -> tuple[float, float]:
    """By how much a part slows a loop at its usual pace, and the standard error, from turns in which it works
    ``often`` times as often. Of a median, by the middle half: a few turns are far off. The ranks' turns are the same
    ones."""
    low, middle, high = quartiles(ratios)
    return (middle - 1) / often, 0.93 * (high - low) / (len(ratios) / ranks) ** 0.5 / often


_UNITS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "cores": ((1e-2, "%"),),
    "x": ((1.0, "times"),),
}


def shown(value: float, unit: str) -> str:
    """Three digits, with the unit that suits."""
    scale, name = next((one for one in _UNITS[unit] if abs(value) >= one[0]), _UNITS[unit][-1])
    return f"{digits(value / scale)} {name}"


def digits(value: float) -> str:
    """Three of them."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def told(name: str, task: Task) -> Iterator[str]:
    """A line for each series: the median, the least and the greatest, and the ratio to the base with its quartiles."""
    settings = "".join(f", {key} {value}" for key, value in task.settings.items())
    yield f"{name}{settings}"
    for series, missing in task.missing.items():
        if series == ALL:
            yield f"  {missing.how}: {missing.why}"
    for key, quantity in task.quantities.items():
        yield f"  {quantity.title}" + (f" [ratio to {quantity.base}]" if quantity.base else "")
        for series in [*quantity.samples, *(one for one in task.missing if one not in {ALL, *quantity.samples})]:
            values = quantity.values(series)
            if not values:
                missing = task.reason(key, series)
                yield f"    {series:34} {missing.how}: {missing.why}"
                continue
            middle, *ends = (shown(of(values), quantity.unit) for of in (statistics.median, min, max))
            line = f"    {series:34} {middle:>12}  ({ends[0]} to {ends[1]}, n={len(values)})"
            ratios = quantity.ratios(series) if quantity.base else []
            if ratios:
                low, median, high = quartiles(ratios)
                line += f"  {median:.3f} x ({low:.3f} to {high:.3f})"
            if series in task.missing:
                line += f"  {task.missing[series].turns} without: {task.missing[series].how}"
            yield line


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        for title, found in read(file).items():
            print("\n" + "\n".join(told(title, found)))
