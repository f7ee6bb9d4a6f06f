"""When the logs are polled, under a scripted clock, and how far they are read; on files, without processes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbspawn._engine.kernel import descriptors
from nbspawn._engine.run import event_queue
from nbspawn._engine.run import logs as rank_logs
from nbspawn._engine.run.event_queue import EventQueue
from nbspawn._engine.run.logs import LogFollower
from nbspawn._protocol.messages import Event, Exited, Printed


class Logs:
    def __init__(self, folder: Path, nprocs: int) -> None:
        self.paths = [folder / f"rank-{rank}.log" for rank in range(nprocs)]
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.follower = LogFollower([descriptors.close_after_fork(os.open(path, flags)) for path in self.paths])

    def write(self, rank: int, text: str) -> None:
        with open(self.paths[rank], "a") as file:
            file.write(text)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    logs = Logs(tmp_path, 2)
    yield logs
    logs.follower.close()


def test_the_interval_grows_with_the_commands_age(logs: Logs) -> None:
    follower, began = logs.follower, 100.0
    for now, interval in (100.1, 0.05), (101.0, 0.1), (103.0, 0.3), (105.0, 0.5), (1000.0, 0.5):
        follower.poll_begins(now)
        assert follower.next_poll(began) == pytest.approx(now + interval)
    assert follower.next_poll(999.9) == pytest.approx(1000.05), "a new command is young again"


def test_whoever_is_awake_polls_when_half_the_interval_is_over(logs: Logs) -> None:
    follower, began = logs.follower, 0.0
    follower.poll_begins(1000.0)
    assert not follower.poll_is_due(1000.2, began) and follower.poll_is_due(1000.25, began)
    follower.poll_begins(0.1)
    assert not follower.poll_is_due(0.14, began) and follower.poll_is_due(0.16, began)


def test_after_an_early_read_peers_are_read_soon(logs: Logs) -> None:
    follower, began = logs.follower, 0.0
    follower.poll_begins(1000.0)
    assert follower.read_to(0, 0) == ([], 0) and follower.next_poll(began) == 1000.5
    logs.write(0, "loss 1\n")
    assert follower.read_to(0, 7) == ([Printed(0, ("loss 1",), "")], 7)
    assert follower.next_poll(began) == pytest.approx(1000.05)
    follower.poll_begins(1000.05)
    assert follower.next_poll(began) == pytest.approx(1000.55)


def test_nothing_beyond_the_ends_is_read(logs: Logs) -> None:
    follower = logs.follower
    logs.write(0, "one\ntw")
    ends = follower.ends([0, 1])
    logs.write(0, "o\n")
    logs.write(1, "late\n")
    assert ends == {0: 6, 1: 0}
    assert follower.read(ends) == [Printed(0, ("one",), "tw")]
    assert follower.read(follower.ends([0, 1])) == [Printed(0, ("two",), ""), Printed(1, ("late",), "")]


def test_the_rest_of_a_log_ends_with_a_line_that_has_no_end(logs: Logs) -> None:
    logs.write(1, "a\nb")
    assert logs.follower.read_to(1, None) == ([Printed(1, ("a",), "b")], 3)
    assert logs.follower.read_to(1, None) == ([Printed(1, ("b",), "")], 0)


def test_a_log_that_something_empties_is_read_on(logs: Logs) -> None:
    """``truncate``, and logrotate's copytruncate."""
    logs.write(0, "an early line\n")
    assert lines(logs.follower.read(logs.follower.ends([0]))) == ["an early line"]
    os.truncate(logs.paths[0], 0)
    logs.write(0, "late\n")
    assert lines(logs.follower.read(logs.follower.ends([0]))) == ["late"]
    os.truncate(logs.paths[0], 0)
    logs.write(0, "last")
    logs.follower.read_to(0, None)
    assert lines(logs.follower.read_to(0, None)[0]) == ["last"]


def test_where_reading_takes_long_it_is_left_and_all_ranks_have_their_turn(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view of eight ranks that print control characters heard Stop after six seconds."""
    for module in (rank_logs, event_queue):
        monkeypatch.setattr(module, "LONGEST", 0.0)
    text = "a line\n" * 100_000
    for rank in range(2):
        logs.write(rank, text)
    ends = logs.follower.ends([0, 1])
    turns = [[one.rank for one in logs.follower.read(ends)] for _ in range(4)]
    assert turns == [[0], [1], [0], [1]]
    queue = EventQueue(logs.follower)
    queue.add_printed(0)
    assert len(queue.take()) == 1 and queue


def test_an_event_waits_for_what_its_rank_printed_which_is_taken_in_pieces(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank had printed a gigabyte when it ended: read at once, it took the kernel's memory, and kept Stop out."""
    monkeypatch.setattr(event_queue, "LONGEST", math.inf)
    numbers = [f"{number:063}" for number in range(150_000)]  # 9.6 MB
    logs.write(0, "".join(f"{line}\n" for line in numbers) + "no end")
    logs.write(1, "a line\nlater\n")
    queue = EventQueue(logs.follower)
    first, last = Exited(0, 1.0, 0), Exited(1, 2.0, 0)
    queue.add_printed(0)
    queue.add(first)
    queue.add_printed(1, 7)
    queue.add(last)
    pieces: list[list[Event]] = []
    while queue:
        pieces.append(queue.take())
    events = [event for piece in pieces for event in piece]
    printed = [event for event in events if isinstance(event, Printed)]
    assert lines(printed) == [*numbers, "no end", "a line"]
    assert [event for event in events if event in (first, last) or printed[-1] is event] == [first, printed[-1], last]
    assert len(pieces) == 3 and pieces[-1][-1] is last
    assert logs.follower.read(logs.follower.ends([1])) == [Printed(1, ("later",), "")]


def lines(printed: list[Printed]) -> list[str]:
    return [line for one in printed for line in one.lines]
