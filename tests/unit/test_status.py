"""A run is what its events make of it: tested with scripted events and a scripted clock."""

from __future__ import annotations

import itertools

import pytest

from nbspawn._protocol.messages import (
    ClearOutput,
    DisplayData,
    Event,
    Exited,
    InputRequest,
    Leaving,
    Measured,
    Printed,
    Raised,
    Result,
    Returned,
    Started,
    Stopping,
)
from nbspawn._state.history import POINTS, extended
from nbspawn._state.run import FINAL, RankStatus, Run, answered, reduce
from nbspawn._state.wording import ranges


def answer(value: object) -> Result:
    return Result(repr=repr(value))


def raised(rank: int, time: float, name: str = "KeyError", message: str = "'hieght'", line: int | None = 8) -> Raised:
    return Raised(rank, time, name, message, "", (), line, 0)


def fold(*events: Event, nprocs: int = 2, now: float = 9.0) -> Run:
    run = Run.new(nprocs, "fork", "nothing stands against it", "/tmp/logs", 0.0)
    for event in events:
        run = reduce(run, [event], now)
    return run


def rank0(*events: Event) -> RankStatus:
    return fold(*events).ranks[0]


def test_a_new_run_is_starting() -> None:
    run = fold(nprocs=3)
    assert run.counts == {"starting": 3}
    assert [rank.rank for rank in run.ranks] == [0, 1, 2]
    assert not run.over and run.ended is None


def test_a_good_run() -> None:
    run = fold(
        *(Started(rank, 100 + rank, 1.0) for rank in (0, 1)),
        Printed(0, ("epoch 1", "  "), ""),
        Printed(1, ("epoch 1",), "\r50 %"),
        *(Returned(rank, 2.0 + rank, answer({"loss": rank}), 0) for rank in (0, 1)),
    )
    assert [(rank.pid, rank.state, rank.since, rank.line, rank.result) for rank in run.ranks] == [
        (100, "done", 2.0, "epoch 1", "{'loss': 0}"),
        (101, "done", 3.0, "\r50 %", "{'loss': 1}"),
    ]
    assert not run.over
    run = reduce(reduce(run, [Exited(1, 3.5, 0)], 9), [Exited(0, 3.25, 0)], 9)
    assert run.over and run.ended == 3.5 and run.counts == {"done": 2}


def test_the_line_is_the_current_one_or_the_last_that_is_not_empty() -> None:
    assert rank0(Printed(0, ("a", "b", ""), "")).line == "b"
    assert rank0(Printed(0, ("a",), "c")).line == "c"
    assert rank0(Printed(0, ("a",), ""), Printed(0, ("", ""), "")).line == "a"
    assert len(rank0(Printed(0, (), "x" * 70_000)).line) == 1000


def test_input_is_waited_for_until_it_is_answered() -> None:
    run = fold(Started(0, 1, 1.0), InputRequest(0, "? ", False, 0), Printed(0, ("from a thread",), ""), now=4.0)
    assert (run.ranks[0].state, run.ranks[0].since) == ("waiting for input", 4.0)
    run = answered(answered(run, 0, 5.0), 1, 6.0)
    assert [(rank.state, rank.since) for rank in run.ranks] == [("running", 5.0), ("starting", 0.0)]


@pytest.mark.parametrize(
    ("events", "state", "detail"),
    [
        ((raised(0, 2), Exited(0, 3, 1)), "failed", "KeyError: 'hieght' (line 8)"),
        ((raised(0, 2, "StopIteration", "", None), Exited(0, 3, 1)), "failed", "StopIteration"),
        ((raised(0, 2, "KeyboardInterrupt", ""),), "failed", "KeyboardInterrupt (line 8)"),
        ((Leaving(0, 2, 7, "", 0), Exited(0, 3, 7)), "failed", "exit code 7"),
        ((Leaving(0, 2, 1, "no data", 0), Exited(0, 3, 1)), "failed", "exit code 1: no data"),
        ((Exited(0, 3, -11),), "failed", "SIGSEGV"),
        ((Exited(0, 3, -64),), "failed", "SIGRTMAX"),
        ((Exited(0, 3, -50),), "failed", "signal 50"),
        ((Exited(0, 3, 0),), "failed", "exit code 0 before it had finished"),
        ((Exited(0, 3, 3),), "failed", "exit code 3"),
        ((Returned(0, 2, answer(1), 0), Exited(0, 3, -11)), "done", "SIGSEGV after it had returned"),
        ((Returned(0, 2, answer(1), 0), Stopping(0, 2, "SIGTERM"), Exited(0, 3, -15)), "done", ""),
        ((Stopping(0, 2, "SIGTERM"), Exited(0, 3, -15)), "killed", "SIGTERM by nbspawn (stop)"),
        (
            (Exited(1, 1, -11), Stopping(0, 2, "SIGTERM"), Stopping(0, 2, "SIGKILL"), Exited(0, 3, -9)),
            "killed",
            "SIGKILL by nbspawn (a peer failed)",
        ),
        (
            # A peer that fails because all are being stopped is not the reason for the stop.
            (Stopping(0, 1, "interrupt"), raised(1, 2), Stopping(0, 3, "SIGTERM"), Exited(0, 4, -15)),
            "killed",
            "SIGTERM by nbspawn (stop)",
        ),
        ((Stopping(0, 2, "SIGTERM"), Exited(0, 3, -11)), "killed", "SIGSEGV after SIGTERM by nbspawn (stop)"),
        ((Stopping(0, 2, "SIGTERM"), Exited(0, 3, 1)), "killed", "exit code 1 after SIGTERM by nbspawn (stop)"),
        (
            (Stopping(0, 1, "interrupt"), raised(0, 2, "KeyboardInterrupt", "")),
            "interrupted",
            "KeyboardInterrupt (line 8)",
        ),
        ((Stopping(0, 1, "interrupt"), Exited(0, 2, -2)), "interrupted", "stop"),
        ((Stopping(0, 1, "interrupt"), Exited(0, 2, 0)), "interrupted", "stop"),
        ((Stopping(0, 1, "interrupt"), raised(0, 2), Exited(0, 3, 1)), "failed", "KeyError: 'hieght' (line 8)"),
        ((raised(0, 2), Stopping(0, 3, "SIGKILL"), Exited(0, 4, -9)), "failed", "KeyError: 'hieght' (line 8)"),
        ((Exited(0, 3, 1), raised(0, 2)), "failed", "KeyError: 'hieght' (line 8)"),
    ],
)
def test_how_a_rank_ends(events: tuple[Event, ...], state: str, detail: str) -> None:
    rank = rank0(Started(0, 1, 0.5), *events)
    assert (rank.state, rank.detail) == (state, detail)


def test_stopping_shows_and_does_not_undo() -> None:
    rank = rank0(Started(0, 1, 0.5), Stopping(0, 2.0, "SIGTERM"))
    assert (rank.state, rank.since, rank.detail) == ("stopping", 2.0, "stop")
    assert rank0(Returned(0, 1, answer(1), 0), Stopping(0, 2, "SIGTERM")).state == "done"


def test_what_is_known_before_the_start_stays() -> None:
    """A reading, and Stop, may be quicker than the message of the start."""
    rank = rank0(Measured(0, 1.0, 0.1, 10, 20, -1, -1), Stopping(0, 1.5, "interrupt"), Started(0, 1, 0.9))
    assert (rank.peak_memory, rank.state, rank.pid) == (20, "stopping", 1)
    ended = rank0(Stopping(0, 0.5, "interrupt"), Started(0, 1, 0.9), raised(0, 2.0, "KeyboardInterrupt"))
    assert ended.state == "interrupted"


def test_any_order_gives_some_state() -> None:
    events: list[Event] = [
        Started(0, 1, 1.0),
        Stopping(0, 2.0, "interrupt"),
        raised(0, 3.0),
        Returned(0, 4.0, answer(None), 0),
        Exited(0, 5.0, -15),
        InputRequest(0, "? ", False, 0),
    ]
    for order in itertools.permutations(events):
        run = fold(*order, nprocs=1)
        assert run.over and run.ended == 5.0
        assert run.ranks[0].state in FINAL


def test_events_without_a_state_change_nothing() -> None:
    run = fold(Started(0, 1, 1.0))
    for event in (DisplayData(0, {}, {}, {}, False, 0), ClearOutput(0, True, 0), Exited(7, 2.0, 1)):
        assert reduce(run, [event], 3.0) == run


def test_the_last_reading_of_a_rank_that_has_ended_counts() -> None:
    rank = rank0(
        Started(0, 1, 1.0),
        Measured(0, 1.0, 0.1, 10, 10, -1, -1),
        Returned(0, 2.0, answer(1), 0),
        Measured(0, 2.0, 0.6, 20, 90, 3, 4),
        Exited(0, 2.5, 0),
    )
    assert (rank.memory, rank.peak_memory, rank.device_memory, rank.peak_device_memory) == (20, 90, 3, 4)
    assert rank.memory_history == (10, 20)


@pytest.mark.parametrize("count", [*range(1, 70), 1000, 86_400])
def test_a_history_is_of_bounded_size_and_loses_no_peak(count: int) -> None:
    """Each point is the maximum of as many values as any other, but for the last."""
    values = [(7 * index) % 101 for index in range(count)]
    points: tuple[int, ...] = ()
    for index, value in enumerate(values):
        points = extended(points, index, value)
    spacing = next(1 << power for power in range(20) if count <= POINTS << power)
    assert points == tuple(max(values[start : start + spacing]) for start in range(0, count, spacing))
    assert len(points) <= POINTS


def test_ranges() -> None:
    assert ranges([3, 0, 2, 2]) == "0,2-3"
    assert ranges(range(64)) == "0-63"
    assert ranges([]) == ""
