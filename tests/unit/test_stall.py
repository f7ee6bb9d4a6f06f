"""The stall rule, under a scripted clock: it names who waits for whom, and is silent on steps that are only long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbspawn._protocol.collectives import Call, Collectives, GroupCalls
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import (
    Event,
    Exited,
    InputRequest,
    Measured,
    Raised,
    Result,
    Returned,
    Sampled,
    Started,
    Stopping,
)
from nbspawn._state.run import Run, reduce
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.stall import PATIENCE, stall, stuck
from nbspawn._state.whereabouts import silent

CELL = ("%%spawn 4", "import time", "dist.all_reduce(x)", "time.sleep(50)", "dist.barrier()")


def source(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}"


def at(rank: int, line: int, since: float, call: str = "", collective: bool = True, *below: Frame) -> Sampled:
    """The rank is at a line of the cell, in a collective if ``call`` is one."""
    position = Position((Frame("cell", line, "<module>"), *below), call, bool(call) and collective)
    return Sampled(rank, since, position, since, ())


def run_of(*events: Event, nprocs: int = 4) -> Run:
    run = replace(Run.new(nprocs, "fork", "", "/tmp", 0.0), cell="cell", source=CELL)
    for event in (*(Started(rank, 100 + rank, 0.1) for rank in range(nprocs)), *events):
        run = reduce(run, [event], 0.0)
    return run


def sentence(run: Run, now: float) -> str:
    return stall(Snapshot(run, now, source))


WAIT = [at(rank, 3, 1.0, "all_reduce") for rank in (0, 2, 3)]


def test_ranks_that_are_worth_halting() -> None:
    """Those that wait long or do not answer, and do not compute."""
    alive = [Measured(rank, 11.0, 0.0, 0, 0, -1, -1) for rank in range(4)]
    computes = [Measured(2, moment, moment, 0, 0, -1, -1) for moment in (10.0, 11.0)]
    run = run_of(at(0, 3, 1.0, "all_reduce"), at(1, 3, 5.0, "all_reduce"), at(2, 4, 1.0), at(3, 4, 1.0))
    assert stuck(Snapshot(reduce(run, [*alive, *computes], 0.0), 11.5, source)) == [0, 3]
    assert stuck(Snapshot(reduce(run, [*alive[:1], *alive[2:], *computes], 0.0), 12.0, source)) == [0, 3]
    silent_soon = reduce(run, [Measured(1, 6.0, 0.0, 0, 0, -1, -1), alive[0], *computes, alive[3]], 0.0)
    assert stuck(Snapshot(silent_soon, 11.5, source)) == [0, 1, 3]


def on_gpu(rank: int, line: int, since: float) -> Sampled:
    event = at(rank, line, since)
    return replace(event, position=event.position._replace(call="", collective=False, device=True))


def test_ranks_that_wait_for_their_gpus() -> None:
    run = run_of(on_gpu(0, 3, 1.0), on_gpu(2, 3, 1.0), at(1, 4, 1.0), at(3, 5, 1.0, "barrier"))
    assert sentence(run, 15.0) == (
        "Ranks 0 and 2 have waited 14 s at line 3 (dist.all_reduce(x)) for their GPUs. Rank 3 has waited 14 s in "
        "barrier (line 5). Rank 1 is at line 4: time.sleep(50)."
    )
    assert sentence(run_of(on_gpu(0, 3, 1.0), nprocs=2), 15.0).startswith(
        "Rank 0 has waited 14 s at line 3 (dist.all_reduce(x)) for its GPU. Rank 1 "
    )


def test_gpus_that_compute() -> None:
    """The recorder has the same calls of all ranks."""
    calls = (Call(1, "all_reduce", "nccl:all_reduce", (), (), (), True, 14.0),)
    told = {rank: Collectives(rank, (GroupCalls("0", "default_pg", (0, 1), calls),), None) for rank in range(2)}
    run = run_of(on_gpu(0, 3, 1.0), at(1, 4, 1.0), nprocs=2)
    assert sentence(replace(run, collectives=told), 15.0) == ""
    assert sentence(run_of(on_gpu(0, 3, 1.0), on_gpu(1, 4, 1.0), nprocs=2), 15.0) == "", "they are at different lines"


def test_both_sides_are_named() -> None:
    run = run_of(*WAIT, at(1, 4, 1.0))
    assert sentence(run, 15.0) == (
        "Ranks 0 and 2-3 have waited 14 s in all_reduce (line 3). Rank 1 is at line 4: time.sleep(50)."
    )


def test_there_is_no_sentence_at_once() -> None:
    run = run_of(*WAIT, at(1, 4, 1.0))
    assert sentence(run, 1.0 + PATIENCE - 0.1) == ""
    assert sentence(run, 1.0 + PATIENCE + 0.1) != ""


def test_a_long_step_of_all_ranks_is_healthy() -> None:
    assert sentence(run_of(*(at(rank, 4, 1.0) for rank in range(4))), 1000.0) == ""


def test_ranks_that_all_wait_in_the_same_collective() -> None:
    assert sentence(run_of(*WAIT, at(1, 3, 2.0, "all_reduce")), 60.0) == ""


def test_many_short_collectives_are_no_long_one() -> None:
    """Each look finds the rank in another call of the same line."""
    run = run_of(at(1, 4, 1.0))
    for second in range(1, 100):
        run = reduce(run, [at(0, 3, float(second), "all_reduce")], second)
        assert sentence(run, second + 1.0) == ""


def test_waits_that_this_run_has_seen_end_are_normal() -> None:
    """Rank 1 saves a checkpoint for 20 s in every epoch."""
    run = run_of(*WAIT, at(1, 4, 1.0))
    assert sentence(run, 20.0)
    for rank in range(4):
        run = reduce(run, [at(rank, 2, 21.0)], 21.0)
    for event in (at(rank, 3, 30.0, "all_reduce") for rank in (0, 2, 3)):
        run = reduce(run, [event], 30.0)
    assert sentence(run, 50.0) == ""
    assert sentence(run, 71.0).startswith("Ranks 0 and 2-3 have waited 41 s")


def test_over_several_machines_the_rank_that_does_not_come_has_its_host() -> None:
    run = replace(run_of(*WAIT, at(1, 4, 1.0)), hosts=("host1", "host1", "host2", "host2"))
    assert " Rank 1 (host1) is at line 4" in sentence(run, 60.0)
    run = replace(run, hosts=())
    assert " Rank 1 is at line 4" in sentence(run, 60.0)


def test_a_rank_that_has_returned_will_never_arrive() -> None:
    run = run_of(*WAIT, Returned(1, 2.0, Result(), 0), Exited(1, 2.0, 0))
    assert sentence(run, 15.0).endswith("Rank 1 has finished.")


def test_a_rank_in_a_function_of_another_cell_is_at_the_line_that_called_it() -> None:
    run = run_of(*WAIT, at(1, 4, 1.0, "", False, Frame("helpers", 9, "slow")))
    assert sentence(run, 15.0).endswith("Rank 1 is at line 4: time.sleep(50).")


def test_a_rank_without_a_sign_of_life() -> None:
    run = run_of(*WAIT, at(1, 4, 1.0), Measured(1, 2.0, 0.5, 1, 1, -1, -1))
    assert sentence(run, 15.0).endswith(
        "Rank 1 has given no sign of life for 13 s, last seen at line 4: time.sleep(50)."
    )
    assert silent(run.ranks[1], 15.0) == 13.0
    assert silent(run.ranks[0], 15.0) == 0.0


def test_a_rank_that_starts() -> None:
    run = reduce(Run.new(2, "fork", "", "/tmp", 0.0), [Started(0, 1, 0.1)], 0.1)
    run = reduce(run, [Sampled(0, 1.0, Position((), "init_process_group", True), 1.0, ())], 1.0)
    assert sentence(run, 30.0) == "Rank 0 has waited 29 s in init_process_group. Rank 1 is starting."


def test_several_others_are_grouped() -> None:
    run = run_of(at(0, 3, 1.0, "all_reduce"), *(at(rank, 4, 1.0) for rank in (1, 2, 3)))
    assert (
        sentence(run, 15.0) == "Rank 0 has waited 14 s in all_reduce (line 3). Ranks 1-3 are at line 4: time.sleep(50)."
    )


def test_many_ranks_are_not_all_listed() -> None:
    events = (at(rank, 3, 1.0, "all_reduce") if rank % 2 else at(rank, 4, 1.0) for rank in range(64))
    assert sentence(run_of(*events, nprocs=64), 15.0) == (
        "32 ranks (1, 3, 5, 7, …) have waited 14 s in all_reduce (line 3). "
        "32 ranks (0, 2, 4, 6, …) are at line 4: time.sleep(50)."
    )


def test_divergence() -> None:
    run = run_of(*WAIT, at(1, 5, 3.0, "barrier"))
    assert sentence(run, 15.0) == (
        "The ranks have diverged. Ranks 0 and 2-3 have waited 14 s in all_reduce (line 3). Rank 1 has waited 12 s in "
        "barrier (line 5). All ranks have to make the same calls in the same order."
    )
    assert sentence(run, 7.0) == "", "rank 1 has only just arrived"


def test_a_backward_may_only_compute_on_a_device() -> None:
    assert sentence(run_of(*WAIT, at(1, 4, 1.0, "backward")), 60.0) == ""


def test_send_and_recv_belong_together() -> None:
    run = run_of(at(0, 3, 1.0, "send"), at(1, 5, 1.0, "recv"), nprocs=2)
    assert sentence(run, 60.0) == ""


@pytest.mark.parametrize(
    "event",
    [
        InputRequest(1, "? ", False, 0),
        Stopping(1, 2.0, "interrupt"),
        Raised(1, 2.0, "ValueError", "", "", (), 4, 0),
    ],
)
def test_there_is_no_sentence_while_the_user_is_asked_or_the_run_ends(event: Event) -> None:
    assert sentence(run_of(*WAIT, at(1, 4, 1.0), event), 15.0) == ""


def still(cpu: float = 0.0, line: int = 3, **fields: str) -> Run:
    """Ranks that stand at a line, and use so much of a processor."""
    events = [at(rank, line, 1.0) for rank in range(2)]
    measured = [Measured(rank, t, t * cpu, 1, 1, -1, -1) for rank in range(2) for t in (2.0, 12.0)]
    return replace(run_of(*events, *measured, nprocs=2), **fields)


def test_forked_ranks_that_compute_nothing() -> None:
    """A library may wait for threads that they do not have."""
    said = "Ranks 0-1 have computed nothing for 19 s at line 3. A library may wait there for threads of the notebook, "
    said += "which forked ranks do not have: -m forkserver does without fork."
    assert sentence(still(), 20.0) == said
    assert sentence(still(), 10.0) == "", "too early to tell"


@pytest.mark.parametrize("run", [still(cpu=0.5), still(line=4), still(method="fork server")])
def test_ranks_that_may_stand_still(run: Run) -> None:
    """They compute, sleep, or have the threads that they have started."""
    assert sentence(run, 20.0) == ""
