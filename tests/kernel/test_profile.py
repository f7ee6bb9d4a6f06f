"""Where the time went: samples added up by line, and drawn as text and HTML."""

from __future__ import annotations

import re
from dataclasses import replace

from kernels import Kernel

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Sampled
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


def at(run: Run) -> Snapshot:
    return Snapshot(run, 0.0, source)


def spent(rank: int, *parts: tuple[Position, float]) -> Sampled:
    return Sampled(rank, 0.0, parts[-1][0], 0.0, parts)


def run_of(nprocs: int, cell: str | None = "cell") -> Run:
    return replace(Run.new(nprocs, "fork", "", "/tmp", 0.0), cell=cell, source=SOURCE if cell else ())


def two_ranks() -> Profile:
    profile = Profile("cell")
    profile.add([spent(0, (WORK, 1.0), (BARRIER, 3.0)), spent(1, (WORK, 3.0), (WORK_LATE, 0.9))])
    profile.add([spent(0, (BARRIER, 0.0), (BEFORE, 0.0)), spent(1, (BARRIER, 0.1))])
    return profile


def test_text() -> None:
    assert drawing.text(two_ranks(), at(run_of(2))).splitlines()[1:] == [
        "line  rank 0  rank 1",
        "   1                  %%spawn 2 --profile",
        "   2                  for step in range(9):",
        "   3    25 %    98 %      work(step)",
        "        25 %    75 %    work, line 7: line 7 of helpers",
        "        25 %    75 %      inner, line 2: line 2 of helpers",
        "                22 %    work, line 8: line 8 of helpers",
        "   4  75 % w   2 % w      dist.barrier()",
    ]


def test_html_folds_the_functions_below_their_line() -> None:
    drawn = drawing.html(two_ranks(), at(run_of(2)), open_=False)
    assert drawn.startswith("<details style") and drawn.count("<details>") == 1
    assert "    work(step)</summary>" in drawn
    assert drawing.html(two_ranks(), at(run_of(2)), open_=True).startswith("<details open")
    assert "<script" not in drawn and len(drawn) < 6_000


def test_what_is_not_in_the_cell_comes_last() -> None:
    profile = two_ranks()
    profile.add([spent(0, (BEFORE, 4.0))])
    assert drawing.text(profile, at(run_of(2))).splitlines()[-1] == (
        "      50 % w          (outside of the cell's code)"
    )


def test_many_ranks_are_summed_up() -> None:
    profile = Profile("cell")
    profile.add([spent(rank, (WORK_LATE, 1.0 + (rank == 5) * 7), (BARRIER, 1.0)) for rank in range(64)])
    lines = drawing.text(profile, at(run_of(64))).splitlines()
    assert lines[1] == "line   least  middle    most  of rank"
    assert lines[4] == "   3    50 %    50 %    89 %        5      work(step)"
    assert lines[6] == "   4  11 % w  50 % w  50 % w       63      dist.barrier()"


def test_a_function_has_no_cell() -> None:
    profile = Profile(None)
    profile.add([spent(0, (WORK_LATE, 2.0), (BARRIER, 1.0))])
    assert drawing.text(profile, at(run_of(1, cell=None))).splitlines()[2:] == [
        "   3    67 %  line 3 of cell",
        "        67 %    work, line 8: line 8 of helpers",
        "   4  33 % w  line 4 of cell",
    ]


def test_of_a_long_cell_only_the_lines_that_took_time() -> None:
    run = replace(run_of(2), source=SOURCE[:4] + ("pass",) * 100 + ("end()",))
    profile = two_ranks()
    profile.add([spent(0, (Position((Frame("cell", 105, "<module>"),)), 4.0))])
    lines = drawing.text(profile, at(run)).splitlines()[2:]
    assert [line[:4].strip() for line in lines if line[:4].strip()] == ["3", "4", "…", "105"]


def test_a_short_run_has_been_looked_at_too_seldom() -> None:
    profile = Profile("cell")
    assert not drawing.worth_showing(profile)
    profile.add([spent(0, (WORK, 0.5))])
    assert not drawing.worth_showing(profile)
    profile.add([spent(0, (WORK, 0.6))])
    assert drawing.worth_showing(profile)


# ---------------------------------------------------------------- in a notebook


CELL = "{first}\nimport time\ntime.sleep(1.5 if rank else 0.2)\nif rank == 0:\n    time.sleep(1.3)"


def test_lines(kernel: Kernel) -> None:
    reply = kernel.execute(CELL.format(first="%%spawn 2 --profile"))
    assert reply.status == "ok"
    message = reply.table["text/plain"].partition("Where the time went")[2].splitlines()
    shares = {line.split()[0]: line for line in message[2:]}
    assert "time.sleep(1.3)" in shares["5"] and "time.sleep(1.5 if rank else 0.2)" in shares["3"]
    first, second = re.findall(r"(\d+) %", shares["3"])
    assert int(first) < 40 < 80 < int(second)
    assert "<details open" in reply.table["text/html"]


def test_the_fold(kernel: Kernel) -> None:
    reply = kernel.execute(CELL.format(first="%%spawn 2"))
    assert "Where the time went" not in reply.table["text/plain"]
    assert "<details style" in reply.table["text/html"]
    short = kernel.execute("%%spawn 2 --profile\nrank")
    assert "Where the time went" not in str(short.table)


def test_the_reason_of_a_stall_stays(kernel: Kernel) -> None:
    first = "%%spawn 2 -b gloo -t 6 -g 1 --profile\nimport time, torch.distributed as dist\n"
    cell = first + "if rank: time.sleep(600)\ndist.barrier()"
    reply = kernel.execute(cell)
    assert reply.ename == "RunTimeoutError"
    assert (
        "When the ranks were stopped: Rank 0 has waited 6 s in barrier (line 4). Rank 1 is at line 3:"
        in (reply.table["text/plain"])
    )
