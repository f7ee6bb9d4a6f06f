"""Draws docs/benchmarks.md, its charts, and README's table, from page.md and the files in results/.

    python tests/benchmarks/page.py

In page.md, ``{{...}}`` is a Python expression with the methods of ``Page``. The same data give the same bytes.
"""

from __future__ import annotations

import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import charts
from samples import RESULTS, ROOT, Missing, Quantity, Task, cost, digits, quartiles, read, shown
from tools import AUTO, FORK, TOOLS
from waits import BEFORE

BENCHMARKS = ("compare", "waits", "hosts", "overhead", "view", "diff", "xla", "scale", "flight_recorder", "gutter")
TEMPLATE = Path(__file__).with_name("page.md")
PAGE = ROOT / "docs" / "benchmarks.md"
CHARTS = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
MARKS = "<!-- benchmarks -->", "<!-- /benchmarks -->"

OURS = AUTO.name
ORDER = [OURS, *(tool.name for tool in TOOLS if tool is not AUTO)]
UNKNOWN = ("not measured", "not installed")
"""There may be a figure, but not in these data."""

Cell = tuple[str, str]
"""``benchmark/task/quantity``, and the series."""


class Page:
    """The functions of the template. A path is ``benchmark/task/quantity``. A figure that is missing is replaced by how
    it is missing: hangs, fails, not measured."""

    def __init__(self, data: Mapping[str, Mapping[str, Task]]) -> None:
        self._data = data
        self.charts: dict[str, str] = {}

    # ------------------------------------------------------------ figures

    def _task(self, path: str) -> Task:
        benchmark, name, *_ = path.split("/")
        empty = Task({}, missing={})
        return self._data[benchmark].get(name, empty)

    def _quantity(self, path: str) -> Quantity:
        known, key = self._task(path).quantities, path.rpartition("/")[2]
        return known[key] if known else Quantity("", "s")  # a wrong name raises

    def _values(self, path: str, series: str) -> list[float]:
        return self._quantity(path).values(series)

    def _missing(self, path: str, series: str) -> Missing:
        return self._task(path).reason(path.rpartition("/")[2], series)

    def _inline(self, path: str, *series: str) -> str:
        lacks = [self._missing(path, one) for one in series if not self._values(path, one)]
        return f"({lacks[0].how if lacks else 'not measured'})"

    def value(self, path: str, series: str = OURS) -> str:
        """The median."""
        values = self._values(path, series)
        return shown(statistics.median(values), self._quantity(path).unit) if values else self._inline(path, series)

    def spread(self, path: str, series: str = OURS) -> str:
        """The median, with the least and the greatest."""
        values = self._values(path, series)
        if len(values) < 2:
            return self.value(path, series)
        unit = self._quantity(path).unit
        return f"{self.value(path, series)} ({shown(min(values), unit)} to {shown(max(values), unit)})"

    def ratio(self, path: str, series: str, base: str) -> str:
        """The median of the rounds' ratios, with the quartiles."""
        ratios = self._quantity(path).ratios(series, base)
        if not ratios:
            return self._inline(path, series, base)
        low, middle, high = quartiles(ratios)
        spread = f"{low:.3g} to {high:.3g}, {len(ratios)} rounds" if len(ratios) > 1 else "one round"
        return f"{middle:.3g} times ({spread})"

    def times(self, path: str, series: str, base: str) -> str:
        """How many times as long, of medians: where the turns are not those of the same rounds."""
        ours, theirs = self._values(path, series), self._values(path, base)
        if not ours or not theirs:
            return self._inline(path, series, base)
        return f"{digits(statistics.median(ours) / statistics.median(theirs))} times"

    def cost(self, path: str, part: str) -> str:
        """What a part of nbspawn slows a loop by, with the standard error."""
        ratios, settings = self._values(path, part), self._task(path).settings
        if not ratios:
            return self._inline(path, part)
        slower, error = cost(ratios, settings["often"], settings["ranks"])
        return f"{slower:+.2%} (standard error {error:.2%})".replace("%", " %")

    def setting(self, path: str, key: str) -> str:
        """With what a task ran."""
        value = self._task(path).settings.get(key, "(not measured)")
        return f"{value:,g}" if isinstance(value, int | float) else value

    def if_hangs(self, path: str, series: str, text: str) -> str:
        """A sentence that explains why that hangs, if it does."""
        return text if not self._values(path, series) and self._missing(path, series).how == "hangs" else ""

    def cores(self) -> str:
        """Of all machines."""
        machines = [task.machine for tasks in self._data.values() for task in tasks.values()]
        return " or ".join(map(str, sorted({machine["cores"] for machine in machines})))

    # ------------------------------------------------------------ tables

    def tools(self, columns: Mapping[str, str], only: Sequence[str] = ORDER) -> str:
        """A row for each tool, a column for each path that was measured."""
        columns = {title: path for title, path in columns.items() if self._task(path).quantities}
        rows = {name: [(path, name) for path in columns.values()] for name in only}
        return self.table(["", *columns, "turns"], rows, turns=True)

    def table(self, header: Sequence[str], rows: Mapping[str, Sequence[Cell]], turns: bool = False) -> str:
        """Medians, and below them why some are missing. Rows that were not measured are left out."""
        lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
        without: dict[tuple[str, str, str], list[str]] = {}
        absent = []
        for name, cells in rows.items():
            counts = [len(self._values(*cell)) for cell in cells]
            lacks = [None if count else self._missing(*cell) for cell, count in zip(cells, counts, strict=True)]
            if all(one is not None and one.how in UNKNOWN for one in lacks):
                absent.append(name)
                continue
            figures = []
            titles = header[1 : len(cells) + 1]
            for title, cell, missing in zip(titles, cells, lacks, strict=True):
                figures.append(
                    self.value(*cell) if missing is None else "–" if missing.how == "cannot" else missing.how
                )
                if missing is not None and missing.how != "not measured":
                    without.setdefault((name, missing.how, missing.why), []).append(title)
            if turns:
                some = [count for count in counts if count] or [0]
                figures.append(f"{min(some)}" + (f" to {max(some)}" if max(some) > min(some) else ""))
            lines.append(f"| {name} | {_unbroken(' | '.join(figures))} |")
        same: dict[tuple[str, str, str], list[str]] = {}
        for (name, how, why), titles in without.items():
            about = f" ({', '.join(titles)})" if len(titles) < len(header) - 1 - turns else ""
            same.setdefault((about, how, why), []).append(name)
        notes = [
            _item(f"{'; '.join(names)}{about}: {how}; {self._escaped(why)}")
            for (about, how, why), names in same.items()
        ]
        if absent:
            notes.append(_item(f"Not measured: {'; '.join(absent)}"))
        if len(lines) == 2:
            return "\n".join(notes)
        return "\n".join(lines + ["", *notes] * bool(notes))

    @staticmethod
    def _escaped(text: str) -> str:
        return re.sub(r"([\\`*_<>\[\]|{}$])", r"\\\1", text)

    def series(self, path: str, first: str = "") -> str:
        """A row for each series of one quantity: the median, the least, the greatest."""
        quantity = self._quantity(path)
        lines = [f"| {first} | median | least | greatest | turns |", "| --- |" + " ---: |" * 4]
        for name in quantity.samples:
            values = quantity.values(name)
            three = [shown(one(values), quantity.unit) for one in (statistics.median, min, max)]
            lines.append(f"| {name} | {_unbroken(' | '.join(three))} | {len(values)} |")
        missing = [
            _item(f"{name}: {one.how}; {self._escaped(one.why)}")
            for name, one in self._task(path).missing.items()
            if not quantity.values(name)
        ]
        return "\n".join(lines * (len(lines) > 2) + [""] * (len(lines) > 2 and bool(missing)) + missing) or (
            "- not measured"
        )

    def waits(self) -> str:
        """What a user waits for, beside another commit and what is done without nbspawn."""
        lines = ["| | nbspawn | before | without nbspawn | nbspawn takes |", "| --- |" + " ---: |" * 4]
        for name, task in self._data["waits"].items():
            for key, quantity in task.quantities.items():
                path = f"waits/{name}/{key}"
                ours, before = (self.spread(path, series) for series in (OURS, BEFORE))
                without = f"{self.value(path, quantity.base)}, {quantity.base}"
                ratio = self.ratio(path, OURS, quantity.base)
                lines.append(f"| {quantity.title} | {_unbroken(' | '.join((ours, before, without, ratio)))} |")
        return "\n".join(lines)

    def by_ranks(self) -> str:
        """The growth of the start."""
        columns = [(name, key) for name in (OURS, FORK.name) for key in ("ready", "whole")]
        titles = [f"{name}, {'first all_reduce' if key == 'ready' else 'whole cell'}" for name, key in columns]
        rows = {
            str(count): [(f"compare/grow {count}/{key}", name) for name, key in columns] for count in self._counts()
        }
        return self.table(["ranks", *titles], rows) if rows else "- not measured"

    def _counts(self) -> list[int]:
        return sorted(int(name.split()[1]) for name in self._data["compare"] if name.startswith("grow "))

    def scale(self) -> str:
        """The simulated nodes."""
        path = "scale/lines alike/"
        per_node = self._task(path).settings.get("ranks_of_a_node", 1)
        nodes = self._quantity(f"{path}started").samples
        rows = {
            f"{int(count):,} nodes, {int(count) * per_node:,} ranks": [
                (path + key, count) for key in ("started", "kernel", "sent", "memory")
            ]
            for count in nodes
        }
        header = ["", "first line", "kernel, share of a core", "to the front end, each second", "kernel's memory"]
        return self.table(header, rows) if rows else self._inline(f"{path}started", OURS)

    def machines(self) -> str:
        """What ran when, and on what."""
        groups: dict[str, list[str]] = {}
        for benchmark in BENCHMARKS:
            tasks = self._data[benchmark]
            known: dict[str, list[str]] = {}
            for name, task in tasks.items():
                about = task.machine
                versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
                line = (
                    f"{about['date']}, commit {about['commit']}, {about['cores']} cores, Python {about['python']}, "
                    f"{versions}"
                )
                known.setdefault(line, []).append(name)
            for line, names in known.items():
                part = f" ({', '.join(names)})" if len(known) > 1 else ""
                groups.setdefault(line, []).append(f"`{benchmark}.py`{part}")
        return "\n".join(_item(f"{', '.join(names)}: {line}.") for line, names in groups.items())

    # ------------------------------------------------------------ charts

    def chart(self, name: str, title: str, path: str) -> str:
        """The tools, on a logarithmic axis."""
        rows: dict[str, Sequence[float] | str] = {}
        for tool in ORDER:
            values, missing = self._values(path, tool), self._missing(path, tool)
            if values or missing.how not in UNKNOWN:
                rows[tool] = values or ("cannot" if missing.how == "cannot" else missing.how)
        self.charts[f"{name}.svg"] = charts.dots(title, rows, self._quantity(path).unit, OURS)
        return f"![{title}, by tool; the figures are in the table](benchmarks/{name}.svg)"

    def growth(self) -> str:
        """The start with more and more ranks."""
        title = "Start with more ranks: median times"
        lines: dict[str, dict[int, float]] = {}
        for tool in (OURS, FORK.name):
            for key, what in (("ready", "first all_reduce"), ("whole", "whole cell")):
                found = {count: self._values(f"compare/grow {count}/{key}", tool) for count in self._counts()}
                line = {count: statistics.median(values) for count, values in found.items() if values}
                if line:
                    lines[f"{tool}, {what}"] = line
        self.charts["growth.svg"] = charts.growth(title, "ranks", lines, OURS)
        return f"![{title}; the figures are in the table](benchmarks/growth.svg)"

    # ------------------------------------------------------------ the README

    def readme(self) -> str:
        """A few rows, and columns as in the table above them."""
        rows = {
            "An empty cell on 4 ranks": "compare/start/whole",
            "4 ranks have finished their first `all_reduce`": "compare/meet/ready",
            "4 ranks have a tensor of 400 MB": "compare/have 400 MB tensor/have",
            "The error of a rank is shown": "compare/fail/visible",
            "4 ranks have printed 20,000 lines each": "compare/flood/whole",
            "A training loop on 2 ranks": "compare/train computing/seconds",
        }
        columns = [OURS, "accelerate", "torchrun", "ipyparallel"]
        lines = [
            "| Median time | nbspawn | accelerate's `notebook_launcher` | torchrun from a cell | ipyparallel |",
            "|---|---:|---:|---:|---:|",
        ]
        for title, path in rows.items():
            cells = []
            for tool in columns:
                how = self._missing(path, tool).how
                lacking = "" if how in UNKNOWN else how.replace("cannot", "–")
                cells.append(self.value(path, tool) if self._values(path, tool) else lacking)
            lines.append(f"| {title} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _unbroken(figures: str) -> str:
    """A number stays in one line with its unit, in a narrow column too."""
    return re.sub(r"(?<=\w) (?=\w)", "\N{NO-BREAK SPACE}", figures)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return _wrapped(f"- {text}", indent="  ")


def filled(template: str, page: Page) -> str:
    """The template with its figures; lines of prose are broken again."""
    names: dict[str, Callable[..., str]] = {
        name: getattr(page, name) for name in dir(page) if not name.startswith("_") and name != "charts"
    }
    blocks = []
    for block in template.strip().split("\n\n"):
        text = re.sub(r"\{\{(.*?)\}\}", lambda found: eval(found[1].strip(), dict(names)), block, flags=re.DOTALL)
        if not re.match(r"[|#!`<-]", text):
            text = _wrapped(" ".join(text.split()))
        if text.strip():
            blocks.append(text.rstrip())
    return "\n\n".join(blocks) + "\n"


def load(folder: Path = RESULTS) -> dict[str, dict[str, Task]]:
    """All files."""
    for name in BENCHMARKS:
        if not (folder / f"{name}.json").exists():
            sys.exit(f"There is no {name}.json in {folder.name}/: run tests/benchmarks/all {name} first.")
    return {name: read(folder / f"{name}.json") for name in BENCHMARKS}


def draw(data: Mapping[str, Mapping[str, Task]], readme: str) -> dict[Path, str]:
    """Each file and its text."""
    page = Page(data)
    text = filled(TEMPLATE.read_text(), page)
    before, mark, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        sys.exit(f"README.md lacks {' or '.join(MARKS)}.")
    return {
        PAGE: text,
        **{CHARTS / name: chart for name, chart in page.charts.items()},
        README: f"{before}{mark}\n\n{page.readme()}\n\n{end}{after}",
    }


def main() -> None:
    """Draw; charts that the page no longer has go."""
    files = draw(load(), README.read_text())
    CHARTS.mkdir(exist_ok=True)
    for old in CHARTS.glob("*.svg"):
        if old not in files:
            old.unlink()
    for path, text in files.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
