"""Which rank's prompt is put to the user: with a scripted clock, no process and no kernel."""

from __future__ import annotations

import pytest

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Event, Exited, InputReply, InputRequest, Resumed, Sampled, Started, Stopped
from nbspawn._session.prompts import BreakRequests, PromptQueue, late_text
from nbspawn._state.run import Run, answered, reduce
from nbspawn._state.snapshot import Snapshot

SOURCE = ("%%spawn 3", "x = 1", "dist.barrier()")


class Play:
    """A run and its prompts, fed with the same events."""

    def __init__(self, nprocs: int = 3) -> None:
        self.run = Run.new(nprocs, "fork", "", "/tmp/logs", 0.0, "cell", SOURCE)
        self.prompts = PromptQueue()
        self.feed(0.0, *(Started(rank, 100 + rank, 0.0) for rank in range(nprocs)))

    def feed(self, now: float, *events: Event) -> None:
        for event in events:
            self.run = reduce(self.run, [event], now)
            self.prompts.fold(event, now)

    def stop(self, now: float, *ranks: int, line: int = 2) -> None:
        for rank in ranks:
            stopped = Stopped(rank, now, Frame("cell", line, "<module>"), False)
            self.feed(now, stopped, InputRequest(rank, "ipdb> ", False, 0))

    def due(self, now: float) -> int | None:
        request = self.prompts.due(self.run, now)
        return None if request is None else request.rank

    def answer(self, now: float, text: str) -> tuple[dict[int, str], str]:
        """The user's answer to the question that is due."""
        request = self.prompts.due(self.run, now)
        assert request is not None
        self.prompts.question(request, self.run)
        replies, shown = self.prompts.answers(request, InputReply("text", text), Snapshot(self.run, now))
        for rank in replies:
            self.run = answered(self.run, rank, now)
        return {rank: reply.text for rank, reply in replies.items()}, shown


def test_input_is_asked_at_once_and_in_the_order_of_the_questions() -> None:
    play = Play()
    play.feed(1.0, InputRequest(2, "name? ", False, 0), InputRequest(0, "name? ", False, 0))
    assert play.due(1.0) == 2
    assert play.prompts.question(play.prompts.pending[2], play.run) == ("", "[2] name? ")
    assert play.answer(1.0, "ranks") == ({2: "ranks"}, "")
    assert play.answer(1.0, "all") == ({0: "all"}, "")
    assert play.due(1.0) is None and not play.prompts.open


def test_a_first_stop_waits_a_moment_for_ranks_that_may_stop_too() -> None:
    play = Play()
    play.stop(1.0, 1)
    assert play.due(1.1) is None
    play.stop(1.15, 0)
    assert play.due(1.4) is None
    assert play.due(1.5) == 1
    assert play.prompts.question(play.prompts.pending[1], play.run) == (
        "Rank 0 has stopped too: `rank 0` switches to that rank, `all n` steps all.",
        "[1] ipdb> ",
    )
    assert play.prompts.question(play.prompts.pending[1], play.run)[0] == "", "shown once"


def test_ranks_that_start_are_waited_for() -> None:
    play = Play(2)
    play.run = Run.new(2, "spawn", "", "/tmp/logs", 0.0, "cell", SOURCE)
    play.feed(0.5, Started(0, 100, 0.5))
    play.stop(1.0, 0)
    assert play.due(3.0) is None and play.due(7.0) == 0


def test_nobody_waits_for_ranks_that_wait_themselves() -> None:
    play = Play()
    waits = Position((Frame("cell", 3, "<module>"),), "barrier", True)
    play.feed(1.0, *(Sampled(rank, 1.0, waits, 1.0, ()) for rank in (0, 2)))
    play.stop(1.1, 1)
    assert play.due(1.1) == 1


def stopped(*ranks: int) -> Play:
    play = Play()
    play.stop(1.0, *ranks)
    assert play.due(2.0) == ranks[0]
    return play


def test_a_rank_that_steps_keeps_its_turn() -> None:
    play = stopped(1, 0)
    assert play.answer(2.0, "n") == ({1: "n"}, "")
    play.feed(2.0, Resumed(1, 2.0, soon=True))
    assert play.due(3.0) is None and play.prompts.open
    play.stop(3.1, 1, line=3)
    assert play.due(3.1) == 1
    play.answer(3.1, "n")
    assert play.due(14.0) == 0, "it does not come back"


@pytest.mark.parametrize(
    "event",
    [
        Resumed(1, 2.1, soon=False),
        Sampled(1, 2.1, Position((), "all_reduce", True), 2.1, ()),
        Exited(1, 2.1, -9),
    ],
)
def test_a_rank_that_goes_on_gives_the_turn_away(event: Event) -> None:
    play = stopped(1, 0)
    play.answer(2.0, "c")
    play.feed(2.1, Resumed(1, 2.0, soon=True), event)
    assert play.due(2.2) == 0


def test_ranks_that_step_over_a_collective_together_are_asked_together() -> None:
    play = stopped(0, 1, 2)
    play.answer(2.0, "all n")
    waits = Position((Frame("cell", 3, "<module>"),), "all_reduce", True)
    for rank in range(3):
        play.feed(2.3, Resumed(rank, 2.0, soon=True), Sampled(rank, 2.3, waits, 2.3, ()))
    play.stop(2.5, 0, line=3)
    assert play.due(2.5) is None
    play.stop(2.6, 1, 2, line=3)
    assert play.answer(2.6, "")[0] == {0: "", 1: "", 2: ""}


def test_a_rank_that_waits_for_one_at_the_prompt_holds_nobody_up_twice() -> None:
    play = stopped(0, 1)
    play.answer(2.0, "n")
    waits = Position((Frame("cell", 3, "<module>"),), "barrier", True)
    play.feed(2.3, Resumed(0, 2.0, soon=True), Sampled(0, 2.3, waits, 2.3, ()))
    assert play.due(2.3) == 1, "it has been there for long"
    play.answer(2.4, "n")
    play.stop(2.5, 1, line=3)
    assert play.due(2.5) == 1


def test_all() -> None:
    play = stopped(0, 1, 2)
    assert play.answer(2.0, "all p x") == ({0: "p x", 1: "p x", 2: "p x"}, "")
    assert play.due(2.0) is None
    play.feed(2.1, *(InputRequest(rank, "ipdb> ", False, 0) for rank in (2, 1)))
    assert play.due(2.1) is None, "rank 0 is still to come"
    play.feed(2.2, InputRequest(0, "ipdb> ", False, 0))
    assert play.answer(2.2, "") == ({2: "", 1: "", 0: ""}, ""), "an empty line repeats it, to all"
    play.feed(2.3, *(InputRequest(rank, "ipdb> ", False, 0) for rank in (0, 1, 2)))
    assert play.answer(2.3, "p y") == ({0: "p y"}, "")
    assert "needs a command" in play.answer(2.3 + 20, "all")[1]


def test_turning_to_another_rank() -> None:
    play = stopped(1, 0)
    assert play.answer(2.0, "rank 0") == ({}, "[0] debugging, line 2: x = 1")
    assert play.answer(2.0, "p x") == ({0: "p x"}, "")
    play.feed(2.1, InputRequest(0, "ipdb> ", False, 0))
    assert play.due(2.1) == 0
    assert play.answer(2.1, "rank 2")[1] == "[2] running: the debugger has not stopped it. Stopped: 0-1."
    assert play.answer(2.1, "rank 7")[1] == "there is no rank 7: the last is 2."
    assert play.answer(2.1, "ranks")[1].splitlines() == [
        "[0] debugging, line 2: x = 1",
        "[1] debugging, line 2: x = 1",
        "[2] running",
    ]
    assert play.answer(2.1, "ranks_of = 3")[0] == {0: "ranks_of = 3"}, "a statement, for pdb"


def test_a_failed_peer_is_named() -> None:
    play = stopped(1)
    play.feed(2.0, Exited(0, 2.0, -11))
    assert play.prompts.question(play.prompts.pending[1], play.run)[0] == "Rank 0 has failed: SIGSEGV."


def test_a_rank_that_ends_asks_no_more() -> None:
    play = stopped(1)
    play.feed(2.0, Exited(1, 2.0, -9))
    assert play.due(2.0) is None and not play.prompts.open


# ---------------------------------------------------------------- ranks that are asked into the debugger


def test_a_rank_at_a_prompt_is_broken_into_when_it_has_left_that() -> None:
    play, breaks = stopped(1), BreakRequests()
    breaks.add([0, 1])
    assert breaks.take_ready(play.run, 2.0) == [0]
    assert breaks.take_ready(play.run, 3.0) == []
    play.feed(3.5, Resumed(1, 3.5, soon=False))
    assert breaks.take_ready(play.run, 4.0) == [1]


def test_who_does_not_stop_within_a_second_is_late_once() -> None:
    play, breaks = Play(), BreakRequests()
    breaks.add([0, 1])
    assert sorted(breaks.take_ready(play.run, 2.0)) == [0, 1]
    breaks.fold(Stopped(0, 2.1, Frame("cell", 2, "<module>"), False))
    assert breaks.take_late(2.9) == []
    assert breaks.take_late(3.0) == [1]
    assert breaks.take_late(9.0) == []


def test_it_is_shown_where_those_are_that_are_late() -> None:
    play = Play()
    play.feed(1.0, Sampled(1, 1.0, Position((Frame("cell", 3, "<module>"),), "barrier", True), 1.0, ()))
    play.stop(1.0, 2)
    play.feed(1.0, Exited(0, 1.0, -9))
    assert late_text(Snapshot(play.run, 2.0), [0, 1, 2]).splitlines() == [
        "[1] waiting, line 3: dist.barrier()",
        "Rank 1 will stop at the next line of Python, when that call returns.",
    ]
    assert late_text(Snapshot(play.run, 2.0), [0, 2]) == ""


def test_a_rank_that_has_failed_says_how() -> None:
    play = stopped(1)
    play.feed(2.0, Exited(0, 2.0, -11))
    assert play.answer(2.0, "ranks")[1].splitlines()[0] == "[0] failed: SIGSEGV"
