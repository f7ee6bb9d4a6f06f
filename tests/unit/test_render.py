"""The table as text and as HTML: the same rows, aligned, bounded, and safe."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from nbspawn._accelerators.accelerator import Load
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import (
    Event,
    Exited,
    Measured,
    Printed,
    Raised,
    Result,
    Returned,
    Sampled,
    Started,
    Stopping,
)
from nbspawn._render import html, text
from nbspawn._render.lines import strip_ansi
from nbspawn._session.views import Pace
from nbspawn._state.run import Run, reduce
from nbspawn._state.snapshot import Snapshot


def answer(value: object) -> Result:
    return Result(repr=repr(value))


def run_of(nprocs: int, *events: Event) -> Run:
    run = Run.new(nprocs, "fork server", "everything that the cell uses can travel.", "/tmp/logs", 100.0)
    for event in (*(Started(rank, 4000 + rank, 100.1) for rank in range(nprocs)), *events):
        run = reduce(run, [event], 101.0)
    return run


def a_run() -> Run:
    return run_of(
        4,
        Printed(0, (), "\x1b[32mepoch 2\x1b[0m:\t61 %"),
        Printed(1, ("オレンジ " * 40,), ""),
        Raised(2, 103.1, "KeyError", "'<b>hieght'", "", (), 8, 0),
        Returned(3, 102.5, answer(0.25), 0),
    )


def test_the_text_table() -> None:
    assert text.table(Snapshot(a_run(), 112.4), width=80).splitlines() == [
        "4 ranks · fork server: everything that the cell uses can travel · 12.4 s",
        "rank  state      at  last line, result or error",
        "   0  ● running      epoch 2: 61 %",
        "   1  ● running      オレンジ オレンジ オレンジ オレンジ オレンジ オレンジ オレ…",
        "   2  ✗ failed       KeyError: '<b>hieght' (line 8)",
        "   3  ✓ done         0.25",
    ]


def test_each_host_has_a_heading() -> None:
    snapshot = Snapshot(replace(a_run(), hosts=("host1", "host1", "<b>2", "<b>2")), 112.4)
    lines = text.table(snapshot, width=80).splitlines()
    assert [lines[2], lines[5]] == ["host1", "<b>2"] and len(lines) == 8
    drawn = html.table(snapshot)
    assert drawn.count("host1") == 1 and drawn.count("&lt;b&gt;2") == 1 and drawn.count("<tr") == 7


def test_colour_adds_nothing_but_colour() -> None:
    coloured = text.table(Snapshot(a_run(), 112.4), color=True)
    assert "\x1b[31m✗ failed " in coloured
    assert strip_ansi(coloured) == text.table(Snapshot(a_run(), 112.4))
    assert "\x1b" not in text.table(Snapshot(a_run(), 112.4))


@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_the_text_table_keeps_its_width(width: int) -> None:
    for line in text.table(Snapshot(a_run(), 112.4), width).splitlines()[2:]:
        assert sum(text._columns(character) for character in line) <= max(width, 27)


def test_what_a_rank_that_is_done_shows() -> None:
    run = run_of(
        3,
        *(Printed(rank, ("saved",), "") for rank in range(3)),
        Returned(0, 102.0, answer(None), 0),
        Returned(1, 102.0, answer([1]), 0),
        Returned(2, 102.0, answer([2]), 0),
        Exited(2, 103.0, -11),
    )
    assert [row.text for row in text.rows(Snapshot(run, 110.0))] == ["saved", "[1]", "SIGSEGV after it had returned"]


def test_the_clock_stops_when_a_rank_and_the_run_end() -> None:
    run = run_of(1, Returned(0, 102.0, answer(None), 0), Exited(0, 102.5, 0))
    assert text.rows(Snapshot(run, 200.0))[0].seconds == pytest.approx(2.0)
    assert text.heading(Snapshot(run, 200.0)) == (
        "1 rank",
        "fork server: everything that the cell uses can travel",
        "2.5 s",
    )


def big_run(nprocs: int = 64) -> Run:
    events: list[Event] = [Printed(rank, (f"line {rank}",), "") for rank in range(5)]
    events += [Raised(40, 104.0, "ValueError", "late", "", (), None, 0), Exited(40, 104.0, 1)]
    events += [Raised(20, 103.0, "KeyError", "first", "", (), None, 0), Exited(20, 103.0, 1)]
    events += [Stopping(3, 105.0, "SIGTERM"), Exited(3, 105.1, -15)]
    events += [Returned(rank, 102.0, answer(None), 0) for rank in range(5, nprocs) if rank not in (20, 40)]
    return run_of(nprocs, *events)


def test_many_ranks_share_rows() -> None:
    assert [(row.label, row.state, row.text) for row in text.rows(Snapshot(big_run(), 110.0))] == [
        ("20", "failed", "KeyError: first"),
        ("40", "failed", "ValueError: late"),
        ("0", "running", "line 0"),
        ("1", "running", "line 1"),
        ("2", "running", "line 2"),
        ("4", "running", "line 4"),
        ("3", "killed", "SIGTERM by nbspawn (a peer failed)"),
        ("5-19,… (57)", "done", ""),
    ]


@pytest.mark.parametrize("nprocs", [17, 64, 1000])
def test_no_table_is_higher_than_a_screen(nprocs: int) -> None:
    lines: list[Event] = [Printed(rank, (f"line {rank}",), "") for rank in range(nprocs)]
    failures: list[Event] = [Raised(r, 101.0 + r, "E", str(r), "", (), None, 0) for r in range(0, nprocs, 2)]
    results: list[Event] = [Returned(rank, 102.0, answer(rank), 0) for rank in range(nprocs)]
    for events in (lines, lines + failures, results, []):
        run = run_of(nprocs, *events)
        assert len(text.table(Snapshot(run, 110.0)).splitlines()) <= 20
        assert sum(len(row.ranks) for row in text.rows(Snapshot(run, 110.0))) == nprocs
        assert len(html.table(Snapshot(run, 110.0))) < 13_300


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0 ms"), (0.0312, "31 ms"), (0.9996, "1.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (125, "2 min 05 s"),
     (3599.6, "1 h 00 min"), (3725, "1 h 02 min")],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


class Cells(HTMLParser):
    """The text of every cell, and every tag and attribute that occurs."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_the_html_shows_what_the_text_shows() -> None:
    for run in (a_run(), big_run()):
        cells = Cells(html.table(Snapshot(run, 112.4))).cells
        assert cells[:4] == ["rank", "state", "at", "last line, result or error"]
        for index, row in enumerate(text.rows(Snapshot(run, 112.4)), start=1):
            label, state, at, last = cells[4 * index : 4 * index + 4]
            assert at == ""
            assert (label, state) == (row.label, f"{text.MARKS[row.state]} {row.state}")
            assert last.startswith(row.text[:70])


def test_in_the_end_each_rank_has_its_time() -> None:
    run = run_of(2, *(Returned(rank, 102.0 + rank, answer(rank), 0) for rank in range(2)))
    run = reduce(reduce(run, [Exited(0, 103.5, 0)], 103.5), [Exited(1, 103.5, 0)], 103.5)
    assert text.table(Snapshot(run, 112.4)).splitlines()[1:] == [
        "rank  state    time  last line, result or error",
        "   0  ✓ done  2.0 s  0",
        "   1  ✓ done  3.0 s  1",
    ]
    parsed = Cells(html.table(Snapshot(run, 112.4))).cells
    assert parsed == [
        "rank",
        "state",
        "time",
        "last line, result or error",
        "0",
        "✓ done",
        "2.0 s",
        "0",
        "1",
        "✓ done",
        "3.0 s",
        "1",
    ]


@pytest.mark.parametrize("bar", ["|██████▎   |", "|######3   |", "||"])
def test_of_a_progress_bar_the_numbers_are_shown(bar: str) -> None:
    run = run_of(1, Printed(0, (), f"epoch 2:  61%{bar} 61/100 [00:09<00:05,  6.7it/s]"))
    assert text.rows(Snapshot(run, 105.0))[0].text == "epoch 2:  61% 61/100 [00:09<00:05,  6.7it/s]"


WORKING = (
    Sampled(0, 103.0, Position((Frame("cell", 2, "<module>"),), "all_reduce", True), 102.0, ()),
    Measured(0, 103.0, 0.5, 412_300_000, 500_000_000, -1, -1),
    Measured(0, 104.0, 1.49, 412_300_000, 500_000_000, 1_300_000_000, 2_000_000_000),
    Sampled(1, 103.0, Position((Frame("cell", 3, "<module>"), Frame("other", 7, "f")), "forward"), 103.0, ()),
    Returned(2, 102.5, answer(1), 0),
    Returned(3, 102.5, answer(1), 0),
)


def test_where_ranks_are_and_what_they_use() -> None:
    run = replace(run_of(4, *WORKING), cell="cell", source=("%%spawn 4", "dist.all_reduce(x)", "\ttrain(model)"))
    assert text.table(Snapshot(run, 106.5), width=104).splitlines()[1:] == [
        "rank  state            at                          cpu  memory  device  last line, result or error",
        "   0  ◍ waiting 4.5 s  2  dist.all_reduce(x)      99 %  412 MB  1.3 GB",
        "   1  ● running        3  train(model) · forward",
        "   2  ✓ done                                                            1",
        "   3  ✓ done                                                            1",
    ]
    assert "2  dist.all_reduce(x)" in Cells(html.table(Snapshot(run, 106.5))).cells


GPUS = (
    Measured(0, 103.0, 0.5, 412_300_000, 500_000_000, 1_300_000_000, 0, Load(1, 97, 3_120_000_000, 80_000_000_000)),
    Measured(1, 103.0, 0.5, 412_300_000, 500_000_000, 0, 0, Load(0)),  # without the driver's package
)


def test_which_gpus_ranks_have_and_how_busy_and_full_these_are() -> None:
    run = run_of(3, *GPUS)
    assert text.table(Snapshot(run, 104.0), width=110).splitlines()[1:] == [
        "rank  state      at  memory  device                 GPU  last line, result or error",
        "   0  ● running      412 MB  1.3 GB  1, 97 %, 3.1/80 GB",
        "   1  ● running      412 MB                           0",
        "   2  ● running",
    ]
    assert "GPU" not in text.table(Snapshot(run, 104.0), width=80), "a narrow terminal has no room"
    assert "1, 97 %, 3.1/80 GB" in Cells(html.table(Snapshot(run, 104.0))).cells
    shared = text.load([Load(0, 40, 10**9, 80 * 10**9), Load(1, 60, 2 * 10**9, 80 * 10**9), Load()])
    assert shared == "0-1, 50 %, 2.0/80 GB"
    assert "GPU" not in text.table(Snapshot(run_of(2, *WORKING[:1]), 104.0))


def measured(rank: int, *memory: int, device_peak: int = -1) -> list[Measured]:
    """Readings of its memory, in MB, a second after each other; 1 MB more was used between each two."""
    return [
        Measured(rank, 103.0 + second, 0.5, megabytes * 10**6, (max(memory[: second + 1]) + 1) * 10**6, -1, device_peak)
        for second, megabytes in enumerate(memory)
    ]


@pytest.mark.parametrize(
    ("points", "drawn"),
    [
        ((), ""),
        ((100, 900), ""),
        ((100, 500, 900), "▁▅█"),
        ((900, 800, 900, 500, 100), "█▇█▅▁"),
        ((1000, 1001, 1000, 1005), "▁▁▁▁"),
        ((1000, 1030, 1000, 1099), "▁▃▁▇"),
        ((0, 0, 0), "▁▁▁"),
    ],
)
def test_sparklines(points: tuple[int, ...], drawn: str) -> None:
    assert text.sparkline(points) == drawn


def test_the_course_of_the_memory_is_beside_it_while_ranks_run() -> None:
    run = run_of(2, *measured(0, 200, 300, 400), *measured(1, 300, 300), Printed(1, ("epoch 2",), ""))
    assert text.table(Snapshot(run, 106.0)).splitlines()[1:] == [
        "rank  state      at  cpu  memory            last line, result or error",
        "   0  ● running      0 %  400 MB  ▁▅█",
        "   1  ● running      0 %  300 MB            epoch 2",
    ]
    assert "▁" not in text.table(Snapshot(run, 106.0), width=99)
    cells = Cells(html.table(Snapshot(run, 106.0))).cells
    assert cells[:7] == ["rank", "state", "at", "cpu", "memory", "", "last line, result or error"]
    assert [cell.strip() for cell in cells[11:13]] == ["400 MB", "▁▅█"]


def test_no_column_moves_once_the_course_has_begun() -> None:
    events = measured(0, *(300 + 50 * second for second in range(30)))
    heads = set()
    for count in range(4, 30):
        snapshot = Snapshot(run_of(1, *events[:count]), 103.0 + count)
        heads.add((html.table(snapshot).split("<thead>")[1].split("<tbody>")[0], text.table(snapshot).splitlines()[1]))
    assert len(heads) == 1


def test_a_flat_course_has_no_column() -> None:
    snapshot = Snapshot(run_of(2, *measured(0, 300, 300, 301, 300), *measured(1, 700, 700, 700)), 110.0)
    assert "▁" not in html.table(snapshot) and "▁" not in text.table(snapshot)


def test_ranks_that_share_a_row_show_the_course_and_the_peak_of_the_one_with_most() -> None:
    place = Position((Frame("cell", 2, "<module>"),))
    events = [event for rank in range(20) for event in (Sampled(rank, 103.0, place, 102.0, ()),)]
    run = run_of(20, *events, *measured(3, 500, 600, 700), *measured(5, 800, 100, 100))
    (row,) = text.rows(Snapshot(run, 106.0))
    assert (row.memory, row.trend.strip(), row.peak) == ("700 MB", "▁▅█", "801 MB")


def test_in_the_end_each_rank_has_its_peak() -> None:
    run = run_of(3, *measured(0, 411, 300), *measured(1, 1299, device_peak=2_000_000_000))
    run = reduce(run, [Returned(rank, 105.0, answer(rank), 0) for rank in range(3)], 105.0)
    run = reduce(run, [Exited(rank, 105.0, 0) for rank in range(3)], 105.0)
    assert text.table(Snapshot(run, 112.4), width=80).splitlines()[1:] == [
        "rank  state    time    peak  device peak  last line, result or error",
        "   0  ✓ done  5.0 s  412 MB               0",
        "   1  ✓ done  5.0 s  1.3 GB       2.0 GB  1",
        "   2  ✓ done  5.0 s                       2",
    ]
    cells = Cells(html.table(Snapshot(run, 112.4))).cells
    assert cells[:6] == ["rank", "state", "time", "peak", "device peak", "last line, result or error"]
    assert cells[12:18] == ["1", "✓ done", "5.0 s", "1.3 GB", "2.0 GB", "1"]


def test_a_rank_that_waits_for_its_gpu() -> None:
    position = Position((Frame("cell", 2, "<module>"),), device=True)
    run = replace(run_of(1, Sampled(0, 103.0, position, 102.0, ())), cell="cell", source=("%%spawn", "loss.item()"))
    assert "  ◍ waiting for its GPU 4.5 s  2  loss.item()" in text.table(Snapshot(run, 106.5))


def test_the_call_is_in_sight() -> None:
    run = run_of(1, Sampled(0, 103.0, Position((Frame("cell", 1, "<module>"),), "all_reduce", True), 102.0, ()))
    for line, shown in (
        ("for p in model.parameters(): dist.all_reduce(p.grad)", "1  … dist.all_reduce(p.grad)"),
        ("    work = dist.all_reduce(p.grad)", "1  work = dist.all_reduce(p.grad)"),
        ("average(gradients)", "1  average(gradients) · all_reduce"),
        ("", "1 · all_reduce"),
    ):
        assert text.rows(Snapshot(replace(run, cell="cell", source=(line,)), 105.0))[0].at == shown


def test_a_silent_rank() -> None:
    run = run_of(1, Measured(0, 103.0, 0.5, 1, 1, -1, -1))
    assert "● silent 9.0 s" in text.table(Snapshot(run, 112.0))
    assert "silent" not in text.table(Snapshot(run, 105.0))


def test_the_html_is_plain_and_escaped() -> None:
    run = replace(a_run(), why='<script>alert("x")</script>', notes=("<i>note</i>",), log_dir="/tmp/<logs>")
    drawn = html.table(Snapshot(run, 112.4))
    parsed = Cells(drawn)
    assert parsed.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td", "b", "span"}
    assert parsed.attributes == {"style", "align", "title"}
    assert "http" not in drawn and "url(" not in drawn
    assert "&#x27;&lt;b&gt;hieght&#x27;" in drawn and "pid 4002" in drawn


def test_the_html_is_small() -> None:
    assert len(html.table(Snapshot(run_of(4, *(Printed(rank, ("x" * 60,), "") for rank in range(4))), 110.0))) < 5_000


# ---------------------------------------------------------------- how often


def test_lines_are_drawn_with_the_clock_and_what_becomes_of_a_rank_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds until a table is drawn again."""
    now = 100.0
    monkeypatch.setattr("nbspawn._session.views.time", SimpleNamespace(monotonic=lambda: now))
    run, pace = run_of(2), Pace()
    assert pace.due(run)
    assert pace.draw(run) == now
    printed, ended = (reduce(run, [event], 101.0) for event in (Printed(0, ("new",), ""), Exited(0, 101.0, 7)))
    for state, after in (run, 1.0), (printed, 1.0), (ended, 0.1):
        now = 100.0 + after - 0.001
        assert not pace.due(state)
        now = 100.0 + after + 0.001
        assert pace.due(state)
    pace.forget()
    assert pace.due(run)
