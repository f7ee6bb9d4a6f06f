"""What is printed under the cell: marked, merged, in order, and never more than the budget."""

from __future__ import annotations

import re
import time

import pytest

from nbspawn._protocol.messages import Printed
from nbspawn._render.stream import MergedStream
from nbspawn._session.views import RankLines
from nbspawn._state.run import Run


def stream(nprocs: int = 4, budget: int = 200_000) -> MergedStream:
    return MergedStream(nprocs, lambda rank: f"/logs/rank-{rank}.log", budget)


def feed(merged: MergedStream, *output: tuple[int, str]) -> list[str]:
    """Lines given as (rank, "a b c"), one Printed each."""
    text = merged.feed([Printed(rank, tuple(lines.split()), "") for rank, lines in output])
    assert text == "" or text.endswith("\n")
    return text.splitlines()


def test_every_line_has_its_mark() -> None:
    assert feed(stream(), (1, "a b"), (3, "c")) == ["[1]   a", "[1]   b", "[3]   c"]
    assert feed(stream(1), (0, "a")) == ["[0] a"]
    assert feed(stream(12), (7, "a"), (11, "b")) == ["[7]    a", "[11]   b"]
    assert stream().feed([Printed(0, ("",), "bar")]) == "[0]\n"
    assert stream().feed([]) == ""


def test_what_all_print_is_shown_once() -> None:
    assert feed(stream(), *((rank, "loading ready") for rank in range(4))) == ["[0-3] loading", "[0-3] ready"]
    assert feed(stream(), (0, "x"), (2, "x"), (3, "x"), (1, "y")) == ["[0,2-3] x", "[1]   y"]
    assert feed(stream(2), (0, "x"), (0, "x"), (1, "x")) == ["[0-1] x", "[0]   x"]


def test_a_shared_line_comes_after_all_that_came_before_it() -> None:
    output = ((0, "loss=0.1 saved"), (1, "loss=0.2 saved"), (2, "loss=0.3 saved more"))
    assert feed(stream(3), *output) == [
        "[0]   loss=0.1",
        "[1]   loss=0.2",
        "[2]   loss=0.3",
        "[0-2] saved",
        "[2]   more",
    ]


def test_what_is_the_next_of_others_is_shown_once() -> None:
    """Wherever it stands in what each has printed: rank 0 alone reports the loss."""
    assert feed(stream(3), (0, "loss=0.1 bar"), (1, "bar"), (2, "bar")) == ["[0]   loss=0.1", "[0-2] bar"]
    assert feed(stream(2), (0, "a b"), (1, "b b")) == ["[0]   a", "[0-1] b", "[1]   b"]
    assert feed(stream(2), (0, "a b c"), (1, "c b")) == ["[0]   a", "[1]   c", "[0-1] b", "[0]   c"]


def test_a_line_stays_below_its_own_heading() -> None:
    def fed(heading: str) -> list[str]:
        lines = (heading, "tensor([[6.],", "        [6.]])", "x")
        printed = [Printed(rank, tuple(line.format(rank) for line in lines), "") for rank in range(2)]
        return stream().feed(printed).splitlines()

    assert fed("after:") == ["[0-1] after:", "[0-1] tensor([[6.],", "[0-1]         [6.]])", "[0-1] x"]
    own = [[f"[{rank}]   {rank}:", f"[{rank}]   tensor([[6.],", f"[{rank}]           [6.]])"] for rank in range(2)]
    assert fed("{}:") == [*own[0], *own[1], "[0-1] x"]


def test_what_gloo_says_of_each_rank_is_one_line() -> None:
    said = "[Gloo] Rank {} is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    printed = [Printed(rank, (said.format(rank),), "") for rank in range(2)]
    assert stream().feed(printed) == f"[0-1] {said.format('0–1')}\n"


def test_finished_bars_are_one_line() -> None:
    merged = stream(2)
    bars = ("100%|██| 5/5 [00:01<00:00, 3.1it/s]", "100%|██| 5/5 [00:02<00:00, 2.9it/s]")
    text = merged.feed([Printed(0, ("loss 0.1", bars[0]), ""), Printed(1, (bars[1],), "")])
    assert text.splitlines() == ["[0]   loss 0.1", "[0-1] 100%|██| 5/5 [00:01–00:02<00:00, 2.9–3.1it/s]"]


def test_up_to_the_last_line_of_one_rank() -> None:
    """What others have printed since may be that rank's next."""
    merged = stream(3)
    batch = [Printed(0, ("begun",), ""), Printed(1, ("begun", "more"), ""), Printed(2, ("own", "begun"), "")]
    text, rest = merged.feed_part(batch[:1], batch)
    assert text.splitlines() == ["[0-1] begun"]
    rest.append(Printed(0, ("more",), ""))
    assert merged.feed(rest).splitlines() == ["[0-1] more", "[2]   own", "[2]   begun"]


def test_what_was_printed_last_waits_for_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all that follows would be a line apart; also where one call of the view takes longer than that time."""
    now, written = [0.0], list[str]()
    monkeypatch.setattr("nbspawn._session.views.time.monotonic", lambda: now[0])
    lines = RankLines(lambda text: written.extend(text.splitlines()))
    lines.open(Run.new(2, "fork", "", "/tmp", 0.0))

    def show(at: float, *printed: Printed, seconds: float = 0.0) -> list[str]:
        now[0] = at
        lines.add(printed)
        now[0] += seconds
        written.clear()
        lines.flush(if_due=True)
        return list(written)

    assert show(0.0, Printed(0, ("a",), ""), seconds=0.2) == []
    assert show(0.26, Printed(1, ("a", "b"), "")) == ["[0-1] a"]
    assert show(0.30, Printed(0, ("b", "c"), "")) == []
    assert show(0.355) == []
    assert show(0.40) == ["[0-1] b", "[0]   c"]
    assert show(0.50) == []


def test_a_block_of_one_rank_stays_together() -> None:
    assert feed(stream(2), (0, "a b c"), (1, "d e f")) == [f"[0]   {line}" for line in "abc"] + [
        f"[1]   {line}" for line in "def"
    ]


def test_the_order_of_each_rank_is_kept_whatever_is_merged() -> None:
    state = 1
    for _ in range(300):
        output: dict[int, list[str]] = {}
        for rank in range(4):
            for _ in range(6):
                state = state * 48271 % 2147483647
                output.setdefault(rank, []).append("abc"[state % 3])
        lines = feed(stream(), *((rank, " ".join(lines)) for rank, lines in output.items()))
        for rank, expected in output.items():
            assert [line.split()[1] for line in lines if rank in ranks_of(line)] == expected


def ranks_of(line: str) -> set[int]:
    ranks: set[int] = set()
    for part in re.findall(r"[\d-]+", line.split()[0]):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks


def test_marks_stay_short() -> None:
    lines = feed(stream(64), *((rank, "x") for rank in range(0, 64, 2)))
    assert lines == ["[0,2,4,6,8,10,12,… (32)] x"]


def test_a_flood_of_blocks_is_merged_in_linear_time() -> None:
    """A tuple of all lines for each line would need gigabytes."""
    merged = stream(2, budget=10_000_000)
    lines = tuple(f"line {index}" for index in range(50_000))
    text = merged.feed([Printed(0, lines, ""), Printed(1, lines, "")], blocks=True)
    assert text.splitlines() == [f"[0-1] {line}" for line in lines]


def test_at_the_end_few_ranks_are_shown_and_those_that_failed_first() -> None:
    merged = stream(100, budget=100)
    merged.feed([Printed(rank, ("x" * 50, f"last of {rank}"), "") for rank in range(100)])
    text = merged.finish(failed=[99])
    assert "[99]" in text and "last of 99" in text and "last of 20" in text and "last of 40" not in text
    assert text.splitlines()[-1].endswith("lines left out, which only the logs have")


def test_over_the_budget_the_rest_is_counted_and_its_end_is_shown() -> None:
    merged = stream(2, budget=2000)
    lines = merged.feed([Printed(0, tuple(f"line {index}" for index in range(1000)), "")]).splitlines()
    assert lines[-1] == "… output is over 2 kB: the rest is in /logs; the last lines of each rank follow at the end"
    shown = len(lines) - 1
    assert lines[:shown] == [f"[0]   line {index}" for index in range(shown)]
    assert merged.feed([Printed(1, ("late",), "")]) == ""
    end = merged.finish(failed=()).splitlines()
    assert re.fullmatch(rf"\[0\]   … {1000 - shown} lines \(\d kB\) left out, the last 10:", end[0])
    assert end[1:11] == [f"[0]   line {index}" for index in range(990, 1000)]
    assert end[11:] == ["[1]   … 1 line (5 bytes) left out, the last 1:", "[1]   late"]
    assert merged.finish(failed=()) == ""


def test_nothing_more_is_said_when_all_was_shown() -> None:
    merged = stream()
    feed(merged, (0, "a"))
    assert merged.finish(failed={0}) == ""


def test_a_rank_that_failed_shows_more() -> None:
    merged = stream(4, budget=1000)
    merged.feed([Printed(rank, tuple(f"line {index}" for index in range(500)), "") for rank in range(4)])
    end = merged.finish(failed={2}).splitlines()
    assert [sum(line.startswith(f"[{rank}]") for line in end) for rank in range(4)] == [11, 11, 41, 11]
    assert "[2]   line 499" in end


def test_a_huge_line_is_cut() -> None:
    text = stream().feed([Printed(1, ("\x1b[31m" + "x" * 50_000 + "\x1b[0m",), "")])
    assert text.endswith("\x1b[0m… (40,009 more characters in /logs/rank-1.log)\n")
    assert len(text) < 10_100
    assert stream().feed([Printed(1, ("y" * 9_997 + "\x1b[31mz",), "")]).startswith("[1]   " + "y" * 9_997 + "…")


def test_the_whole_is_bounded() -> None:
    """The worst that was thought of: 64 ranks, all failed, endless wide lines, short lines, blank lines."""
    for line in ("🔥" * 20_000, "x" * 1_000, "step", ""):
        merged = stream(64)
        size = 0
        count = 10_000 // (len(line) + 1) + 1
        for _ in range(10):
            batch = [Printed(rank, (f"{line}{rank}" if line else "",) * count, "") for rank in range(64)]
            size += len(merged.feed(batch).encode())
        size += len(merged.finish(failed=range(64)).encode())
        assert size <= 240_000


def test_a_flood_is_cheap() -> None:
    batch = [Printed(rank, tuple(f"step {index} loss 0.123456" for index in range(60_000)), "") for rank in range(4)]
    merged = stream()
    begin = time.process_time()
    merged.feed(batch)
    assert time.process_time() - begin < 0.5  # seconds; measured: 0.1
