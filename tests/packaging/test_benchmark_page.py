"""The page of the benchmarks, its charts and README's table are what is drawn from the data; and how data are kept."""

from __future__ import annotations

import copy
import json
import re
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "benchmarks"))

import page  # noqa: E402
import samples  # noqa: E402
import waits  # noqa: E402
from samples import Missing, Quantity, Record, Task  # noqa: E402

MACHINE = {"date": "2026-01-01", "cores": 2, "python": "3.11.7", "commit": "abc", "versions": {}}


def test_the_page_its_charts_and_the_readme_are_drawn_from_the_data() -> None:
    drawn = page.draw(page.load(), page.README.read_text())
    assert set(page.CHARTS.glob("*.svg")) == {path for path in drawn if path.suffix == ".svg"}
    for path, text in drawn.items():
        assert path.read_text() == text, f"python tests/benchmarks/page.py has not been run: {path.name}"


def test_each_row_of_the_readme_has_our_figure_and_a_peers() -> None:
    for line in page.Page(page.load()).readme().splitlines()[2:]:
        ours, *peers = [cell.strip() for cell in line.split("|")[2:-1]]
        assert ours[0].isdigit() and any(peer[:1].isdigit() for peer in peers), line


def test_charts_are_well_formed_and_have_no_colour_for_one_background() -> None:
    for path in page.CHARTS.glob("*.svg"):
        root = xml.etree.ElementTree.fromstring(path.read_text())
        colours = {value for one in root.iter() for key, value in one.attrib.items() if key in ("fill", "stroke")}
        assert colours <= {"none", "#787878", "#78787840", "#2f7fd1", "#909090"}


def test_data_are_small_rounded_and_name_no_folder() -> None:
    for name in page.BENCHMARKS:
        path = samples.RESULTS / f"{name}.json"
        text = path.read_text()
        assert path.stat().st_size < 60_000
        assert "/tmp" not in text and str(ROOT) not in text
        assert samples.written(name, samples.read(path)) == text
        for task in samples.read(path).values():
            assert {"date", "cores", "python", "commit", "versions"} <= set(task.machine)
            for quantity in task.quantities.values():
                values = [value for series in quantity.samples for value in quantity.values(series)]
                assert all(samples.rounded(value) == value for value in values)


def test_no_figure_of_the_page_is_typed_with_a_unit() -> None:
    """But for what was chosen, not measured: budgets, sizes of data, and times that are constants of the code or of a
    task."""
    chosen = {"400 MB", "200 MB", "2 GB", "1 MB", "250 ms", "3 s", "8 s"}
    prose = re.sub(r"\{\{.*?\}\}", "", page.TEMPLATE.read_text())
    prose = re.sub(r"^(\|[^|]*\|)[^|]*\|", r"\1", prose, flags=re.MULTILINE)  # without the budgets
    assert set(re.findall(r"[\d.,]+ (?:µs|ms|s|kB|MB|GB|%|times)\b", prose)) <= chosen


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="There is no compare.json in .*: run tests/benchmarks/all compare first"):
        page.load(tmp_path)


@pytest.mark.parametrize(
    "value, kept", [(0.0419375, 0.04194), (32243.7, 32240), (7156000.2, 7156000), (0.0, 0), (1.5, 1.5)]
)
def test_samples_have_four_digits(value: float, kept: float) -> None:
    assert samples.rounded(value) == kept


def test_a_task_that_is_measured_again_replaces_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "results" / "compare.json"
    first = Record("compare", path)
    for name in ("start", "meet"):
        first.begin(name).quantity("whole", "a cell")
        first.tasks[name].add("whole", "nbspawn", 1.0)
    first.tasks["start"].machine = first.tasks["meet"].machine = MACHINE
    first.tasks["start"].miss("Ray", "fails", "no")
    first.save()

    again = Record("compare", path)
    again.begin("start").quantity("whole", "a cell")
    again.tasks["start"].add("whole", "nbspawn", 2.0)
    again.save()

    found = samples.read(path)
    assert list(found) == ["start", "meet"]
    assert found["start"].quantities["whole"].samples == {"nbspawn": [2]} and not found["start"].missing
    assert found["start"].machine != MACHINE and found["meet"].machine == MACHINE
    assert found["meet"].quantities["whole"].samples == {"nbspawn": [1]}
    assert json.loads(path.read_text())["benchmark"] == "compare"
    assert [file.name for file in path.parent.iterdir()] == ["compare.json"]


def test_a_task_that_fails_says_so_and_keeps_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    with Record("hosts", path).measuring("start", ranks=4) as task:
        task.quantity("again", "a cell")
        task.add("again", "nbspawn", 0.123456)
        raise OSError("/some/where/else/ray is not\nthere")
    found = samples.read(path)["start"]
    assert found.quantities["again"].samples == {"nbspawn": [0.1235]}
    assert found.reason("again", "Ray") == Missing("fails", "OSError: ray is not")


def test_ratios_are_of_rounds_in_which_both_had_a_turn() -> None:
    task = Task(MACHINE)
    task.quantity("whole", "a cell", base="fork")
    for number, ours, theirs in ((0, 2.0, 1.0), (2, 9.0, 3.0)):
        task.add("whole", "nbspawn", ours, number)
        task.add("whole", "fork", theirs, number)
    task.add("whole", "fork", 5.0, 1)
    task.add("whole", "torchrun", 4.0, 0)
    whole = task.quantities["whole"]
    assert whole.samples["nbspawn"] == [2, None, 9] and whole.values("nbspawn") == [2, 9]
    assert whole.ratios("nbspawn") == [2, 3] and whole.ratios("torchrun") == [4]
    assert task.turns("nbspawn") == 2


def test_a_wait_has_become_slower_if_it_takes_longer_than_before_in_most_rounds() -> None:
    def measured(*ours: float) -> Task:
        task = Task(MACHINE, {"before": "abc1234"})
        task.quantity("4, pass", "a cell in kept ranks", base="an empty cell")
        for value in ours:
            task.add("4, pass", "nbspawn", value)
            task.add("4, pass", waits.BEFORE, 2.0)
        return task

    recorded = measured(2.0)
    for now in (measured(2.0, 2.1, 9.0, 9.0), measured(1.0, 1.0, 1.0)):
        assert not [*waits.slower("kept", recorded, now)]
    assert [*waits.slower("kept", recorded, measured(3.0, 3.0, 6.0))] == [
        "kept, a cell in kept ranks: 1.5 times as long as in abc1234"
    ]
    failed = Task(MACHINE)
    failed.miss(samples.ALL, "fails", "no kernel")
    assert [*waits.slower("kept", recorded, failed)] == ["kept, a cell in kept ranks: not measured: no kernel"]


def test_a_wait_must_be_slower_in_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    same = samples.read(samples.RESULTS / "waits.json")
    for task in same.values():
        for quantity in task.quantities.values():
            quantity.samples[waits.BEFORE] = quantity.samples["nbspawn"]
    slow = copy.deepcopy(same)
    for quantity in slow["kept"].quantities.values():
        quantity.samples["nbspawn"] = [2 * value for value in quantity.samples["nbspawn"] if value is not None]

    def runs(*found: dict[str, Task]) -> list[str]:
        """Which tasks are measured, one after the other; each run finds these."""
        measured: list[str] = []

        def measure(record: samples.Record, tasks: waits.Tasks, trees: waits.Trees, before: str) -> None:
            [name] = tasks
            record.tasks[name] = found[measured.count(name)][name]
            measured.append(name)

        monkeypatch.setattr(waits, "measure", measure)
        said = waits.check(waits.TASKS)
        assert (said is None) == (found[-1] is same)
        return measured

    every = [*waits.TASKS]
    assert runs(same) == every
    assert runs(slow, same) == runs(slow, slow) == [*every, "kept"]


def test_a_missing_figure_has_the_reason_that_was_measured() -> None:
    task = Task(MACHINE)
    task.quantities["have"] = Quantity("data", "s", samples={"nbspawn": [0.1, 0.3]})
    task.miss("fork", "hangs", "no end after 60 s")
    task.miss("ipyparallel", "not installed", "no ipyparallel in the environment")
    task.miss("Ray", "fails", "first")
    assert task.miss("Ray", "fails", "No | module").turns == 2
    data = {**{name: {} for name in page.BENCHMARKS}, "compare": {"have": task}}
    drawn = page.Page(data)

    table = drawn.tools({"data": "compare/have/have", "more": "compare/other/have"}, ["nbspawn", "fork", "Ray", "x"])
    assert "| 200\N{NO-BREAK SPACE}ms |" in table
    table = table.replace("\N{NO-BREAK SPACE}", " ")
    assert "| nbspawn | 200 ms | 2 |" in table and "more" not in table
    assert "| fork | hangs | 0 |" in table
    assert "- fork: hangs; no end after 60 s" in table
    assert r"- Ray: fails; No \| module" in table
    assert table.endswith("- Not measured: x")
    task.quantities["pss"] = Quantity("memory", "B", samples={"fork": [1e6], "Ray": [2e6]})
    both = drawn.tools({"data": "compare/have/have", "memory": "compare/have/pss"}, ["nbspawn", "fork"])
    assert "- fork (data): hangs; no end after 60 s" in both
    del task.quantities["pss"]
    assert drawn.value("compare/have/have", "fork") == "(hangs)"
    assert drawn.ratio("compare/have/have", "nbspawn", "fork") == "(hangs)"
    assert drawn.if_hangs("compare/have/have", "fork", "Why.") == "Why."
    assert drawn.if_hangs("compare/have/have", "Ray", "Why.") == ""
    assert drawn.value("view/view/kernel") == "(not measured)"
    chart = drawn.chart("have", "Data", "compare/have/have")
    assert chart.startswith("![Data") and "nbspawn" in drawn.charts["have.svg"]


def test_a_page_can_be_drawn_when_nothing_was_measured() -> None:
    empty = page.draw({name: {} for name in page.BENCHMARKS}, "".join(page.MARKS))
    assert "not measured" in empty[page.PAGE] and "| An empty cell on 4 ranks |" in empty[page.README]


def test_a_page_keeps_its_bytes_for_the_same_data() -> None:
    data = page.load()
    readme = page.README.read_text()
    first = page.draw(data, readme)
    second = page.draw(page.load(), first[page.README])
    assert first == second
    changed = {**data, "diff": {name: replace(task, settings={"ranks": 7}) for name, task in data["diff"].items()}}
    assert not data["diff"] or page.draw(changed, readme)[page.PAGE] != first[page.PAGE]


def test_an_error_is_one_line_without_colours_and_folders() -> None:
    assert samples.brief("\n\x1b[31mOSError\x1b[0m: /tmp/x/y.py is not there\nmore") == "OSError: y.py is not there"
    assert samples.brief("see https://host.example/a/b/c") == "see https://host.example/a/b/c"
    assert samples.brief("") == "no message" and len(samples.brief("x" * 500)) == 160


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0.0419, "s", "41.9 ms"),
        (2.8, "s", "2.80 s"),
        (4.2e-5, "s", "42.0 µs"),
        (558e6, "B", "558 MB"),
        (7640, "B", "7.64 kB"),
        (4700, "B/s", "4.70 kB/s"),
        (0.0038, "cores", "0.38 %"),
        (0, "B", "0.00 B"),
    ],
)
def test_figures_have_three_digits_and_a_unit(value: float, unit: str, text: str) -> None:
    assert samples.shown(value, unit) == text
