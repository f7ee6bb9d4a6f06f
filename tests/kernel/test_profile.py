"""Where the time went: samples added up by line, and drawn as text and HTML; what each rank did when."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kernels import Kernel, ok

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Event, Sampled
from nbspawn._render import profile as drawing
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run
from nbspawn._state.snapshot import Snapshot

SOURCE = ("%%spawn 2 --profile", "for step in range(9):", "    work(step)", "    dist.barrier()", "", "")
WORK = Position((Frame("cell", 3, "<module>"), Frame("helpers", 7, "work"), Frame("helpers", 2, "inner")))
WORK_LATE = Position((Frame("cell", 3, "<module>"), Frame("helpers", 8, "work")))
BARRIER = Position((Frame("cell", 4, "<module>"),), "barrier", True)
BEFORE = Position((), "init_process_group", True)


def source(frame: Frame) -> str:
    return f"line {frame.line} of {frame.file}"


def at(run: Run, now: float = 4.0) -> Snapshot:
    return Snapshot(run, now, source)


def spent(rank: int, begin: float, *parts: tuple[Position, float]) -> Sampled:
    return Sampled(rank, begin + sum(seconds for _, seconds in parts), parts[-1][0], begin, parts)


def run_of(nprocs: int, cell: str | None = "cell") -> Run:
    return replace(Run.new(nprocs, "fork", "", "/tmp", 0.0), cell=cell, source=SOURCE if cell else ())


def profile_of(run: Run, *events: Event) -> Profile:
    profile = Profile(run)
    profile.add(events, 4.0)
    return profile


TWO_RANKS = (
    spent(0, 0.0, (WORK, 1.0), (BARRIER, 3.0)),
    spent(1, 0.0, (WORK, 3.0), (WORK_LATE, 0.9)),
    spent(0, 4.0, (BARRIER, 0.0), (BEFORE, 0.0)),
    spent(1, 3.9, (BARRIER, 0.1)),
)


def two_ranks(*more: Event) -> Profile:
    return profile_of(run_of(2), *TWO_RANKS, *more)


def table(profile: Profile, snapshot: Snapshot) -> list[str]:
    """The lines below the timeline."""
    lines = drawing.text(profile, snapshot).splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.lstrip().startswith("line ")) :]


def test_text() -> None:
    assert drawing.text(two_ranks(), at(run_of(2))).splitlines()[1:] == [
        "        0" + "4.0 s".rjust(57),
        "rank 0  " + "a" * 14 + "·" * 44,
        "rank 1  " + "a" * 57 + "·",
        "   line  rank 0  rank 1",
        "      1                  %%spawn 2 --profile",
        "      2                  for step in range(9):",
        "a     3    25 %    98 %      work(step)",
        "           25 %    75 %    work, line 7: line 7 of helpers",
        "           25 %    75 %      inner, line 2: line 2 of helpers",
        "                   22 %    work, line 8: line 8 of helpers",
        "      4  75 % w   2 % w      dist.barrier()",
    ]


def test_html() -> None:
    drawn = drawing.html(two_ranks(), at(run_of(2)), False, "name")
    assert drawn.startswith("<details style") and drawn.count("<details") == 1
    assert drawn.count('usemap="#name"') == 1 and drawn.count('<map name="name">') == 1
    assert drawing.html(two_ranks(), at(run_of(2)), True, "name").startswith("<details open")
    assert "<script" not in drawn and len(drawn) < 7_500


def test_the_html_shows_what_the_text_shows() -> None:
    drawn = drawing.html(two_ranks(), at(run_of(2)), False, "name")
    cells = [
        [re.sub("<[^>]*>", "", one) for one in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row)]
        for row in re.findall("<tr.*?</tr>", drawn)
    ]
    shown = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    lines = [re.split(r"  +", line[1:].strip()) for line in table(two_ranks(), at(run_of(2)))]
    assert shown == lines


def test_a_line_and_its_part_of_the_picture_have_the_same_colour() -> None:
    drawn = drawing.html(two_ranks(), at(run_of(2)), False, "name")
    (swatch,) = re.findall(r"<tr[^>]*><td[^>]*><span[^>]*background:(#\w+)[^>]*></span>3</td>", drawn)
    assert f"fill='%23{swatch[1:]}'" in drawn


def test_what_is_not_in_the_cell_comes_last() -> None:
    profile = two_ranks(spent(0, 4.0, (BEFORE, 4.0)))
    assert drawing.text(profile, at(run_of(2))).splitlines()[-1] == (
        "         50 % w          (outside of the cell's code)"
    )


def test_many_ranks_are_summed_up() -> None:
    run = run_of(64)
    events = [spent(rank, 0.0, (WORK_LATE, 1.0 + (rank == 5) * 7), (BARRIER, 1.0)) for rank in range(64)]
    lines = table(profile_of(run, *events), at(run, 9.0))
    assert lines[0] == "   line   least  middle    most  of rank"
    assert lines[3] == "a     3    50 %    50 %    89 %        5      work(step)"
    assert lines[5] == "      4  11 % w  50 % w  50 % w       63      dist.barrier()"


def test_a_function_has_no_cell() -> None:
    run = run_of(1, cell=None)
    assert table(profile_of(run, spent(0, 0.0, (WORK_LATE, 2.0), (BARRIER, 1.0))), at(run))[1:] == [
        "a     3    67 %  line 3 of cell",
        "           67 %    work, line 8: line 8 of helpers",
        "      4  33 % w  line 4 of cell",
    ]


def test_of_a_long_cell_only_the_lines_that_took_time() -> None:
    run = replace(run_of(2), source=SOURCE[:4] + ("pass",) * 100 + ("end()",))
    profile = two_ranks(spent(0, 4.0, (Position((Frame("cell", 105, "<module>"),)), 4.0)))
    lines = table(profile, at(run))[1:]
    assert [line[1:7].strip() for line in lines if line[1:7].strip()] == ["3", "4", "…", "105"]


def test_of_what_a_line_calls_a_twentieth_is_worth_showing() -> None:
    little = Position((Frame("cell", 3, "<module>"), Frame("helpers", 9, "little")))
    run = run_of(1)
    for seconds, shown in (0.3, True), (0.1, False):
        profile = profile_of(run, spent(0, 0.0, (WORK, 4.0), (little, seconds)))
        assert ("little, line 9" in drawing.text(profile, at(run))) == shown


def test_a_short_run_has_been_looked_at_too_seldom() -> None:
    profile = Profile(run_of(2))
    assert not drawing.worth_showing(profile)
    profile.add([spent(0, 0.0, (WORK, 0.5))], 0.5)
    assert not drawing.worth_showing(profile)
    profile.add([spent(0, 0.5, (WORK, 0.6))], 1.1)
    assert drawing.worth_showing(profile)


# ---------------------------------------------------------------- in a notebook


CELL = "{first}\nimport time\ntime.sleep(3.0 if rank else 0.6)\nif rank == 0:\n    time.sleep(2.4)"


def test_lines(kernel: Kernel) -> None:
    reply = kernel.execute(CELL.format(first="%%spawn 2 --profile"))
    assert reply.status == "ok"
    message = reply.table["text/plain"].partition("Where the time went")[2].splitlines()
    assert message[2].startswith("rank 0  ") and message[3].startswith("rank 1  "), "the timeline"
    shares = {line[1:7].strip(): line for line in message[5:]}
    assert "time.sleep(2.4)" in shares["5"] and "time.sleep(3.0 if rank else 0.6)" in shares["3"]
    first, second = re.findall(r"(\d+) %", shares["3"])
    assert int(first) < 40 < 80 < int(second)
    assert "<details open" in reply.table["text/html"]


def test_the_fold(kernel: Kernel) -> None:
    reply = kernel.execute(CELL.format(first="%%spawn 2"))
    assert "Where the time went" not in reply.table["text/plain"]
    assert "<details style" in reply.table["text/html"]
    assert reply.table["text/html"].count("data:image/svg+xml") == 1
    short = kernel.execute("%%spawn 2 --profile\nrank")
    assert "Where the time went" not in str(short.table)


@pytest.mark.extended
def test_the_reason_of_a_stall_stays(kernel: Kernel) -> None:
    first = (
        "%%spawn 2 -b gloo -t 6 -g 1 --profile --env TORCH_FR_BUFFER_SIZE=0\nimport time, torch.distributed as dist\n"
    )
    cell = first + "if rank: time.sleep(600)\ndist.barrier()"
    reply = kernel.execute(cell)
    assert reply.ename == "RunTimeoutError"
    told = r"When the ranks were stopped: Rank 0 has waited \d s in barrier \(line 4\)\. Rank 1 is at line 3:"
    assert re.search(told, reply.table["text/plain"]), str(reply)


TIMELINE = """import time, torch.distributed as dist
time.sleep(1 + 3 * rank)
dist.barrier()"""
Rows = list[dict[str, Any]]


def seconds_at(rows: Rows, rank: int, line: int, waiting: bool) -> float:
    return sum(row["seconds"] for row in rows if (row["rank"], row["line"], row["waiting"]) == (rank, line, waiting))


def assert_rank_1_came_late(rows: Rows) -> None:
    """To the barrier of ``TIMELINE``, for which rank 0 has waited."""
    assert seconds_at(rows, 0, 3, False) == pytest.approx(1, abs=0.75)
    assert seconds_at(rows, 0, 4, True) == pytest.approx(3, abs=1)
    assert seconds_at(rows, 1, 3, False) == pytest.approx(4, abs=0.75)
    assert seconds_at(rows, 1, 4, True) < 0.75
    assert {row["source"] for row in rows if row["line"] == 4} == {"dist.barrier()"}
    assert {row["waiting"] for row in rows if row["line"] == 3} == {False}
    assert 0 <= min(row["start"] for row in rows) < 1.25
    assert all(row["start"] < row["end"] for row in rows)


def test_results_tell_what_each_rank_did_when(kernel: Kernel) -> None:
    ok(kernel.execute(f"%%spawn 2 -b gloo -o r\n{TIMELINE}"))
    rows = kernel.value("r.timeline")
    assert_rank_1_came_late(rows)
    assert {row["file"] for row in rows} <= {f"Cell In[{kernel.value('len(In)') - 3}]", ""}


@pytest.mark.extended
def test_the_timeline_as_a_table(kernel: Kernel) -> None:
    pytest.importorskip("pandas")
    ok(kernel.execute(f"%%spawn 2 -b gloo -o r\n{TIMELINE}"))
    ok(kernel.execute("import pandas\ntable = pandas.DataFrame(r.timeline)"))
    assert kernel.value("list(table.columns)") == [
        *("rank", "start", "end", "seconds", "line", "file", "source", "waiting", "device"),
    ]
    ok(kernel.execute("rank, line = table[~table.waiting].groupby(['rank', 'source']).seconds.sum().idxmax()"))
    assert kernel.value("int(rank), line") == (1, "time.sleep(1 + 3 * rank)")


@pytest.fixture
def kept(kernel: Kernel) -> Iterator[Kernel]:
    """Two ranks that stay, and have computed for a while."""
    ok(kernel.execute("%%spawn 2 --keep -b gloo -o first\nimport time\ntime.sleep(1.5)"))
    yield kernel
    kernel.execute("%ranks stop")


@pytest.mark.extended
def test_each_cell_of_kept_ranks_has_its_own_timeline(kept: Kernel) -> None:
    ok(kept.execute(f"%%ranks -o second\n{TIMELINE}"))
    rows = kept.value("second.timeline")
    assert_rank_1_came_late(rows)
    assert max(row["end"] for row in rows) < 4 + 1.5
    assert {row["source"] for row in kept.value("first.timeline") if row["line"]} >= {"time.sleep(1.5)"}
    ok(kept.execute("%%ranks 1 -o third\ntime.sleep(1.2)"))
    rows = kept.value("third.timeline")
    assert {row["rank"] for row in rows} == {1}
    assert seconds_at(rows, 1, 2, False) == pytest.approx(1.2, abs=0.4)


@pytest.mark.extended
def test_a_run_in_the_background_has_a_timeline(kernel: Kernel) -> None:
    ok(kernel.execute(f"%%spawn 2 -b gloo --background -o handle\n{TIMELINE}"))
    assert_rank_1_came_late(kernel.value("handle.result().timeline"))


def test_a_run_that_is_over_at_once_has_no_timeline(kernel: Kernel) -> None:
    ok(kernel.execute("%%spawn 2 -o r\nrank"))
    assert sum(row["seconds"] for row in kernel.value("r.timeline")) < 1.0
    assert kernel.value("list(r)") == [0, 1]
