"""Whose turn it is at the person's one prompt: with a scripted clock, no process and no kernel."""

from __future__ import annotations

import pytest

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Event, Exited, InputReply, InputRequest, Resumed, Sampled, Started, Stopped
from nbspawn._session.prompts import Turns
from nbspawn._state.run import Run, answered, reduce

SOURCE = ("%%spawn 3", "x = 1", "dist.barrier()")


class Play:
    """A run and its turns, fed with the same events."""

    def __init__(self, nprocs: int = 3) -> None:
        self.run = Run.new(nprocs, "fork", "", "/tmp/logs", 0.0, "cell", SOURCE)
        self.turns = Turns()
        self.feed(0.0, *(Started(rank, 100 + rank, 0.0) for rank in range(nprocs)))

    def feed(self, now: float, *events: Event) -> None:
        for event in events:
            self.run = reduce(self.run, event, now)
            self.turns.fold(event, now)

    def stop(self, now: float, *ranks: int, line: int = 2) -> None:
        for rank in ranks:
            stopped = Stopped(rank, now, Frame("cell", line, "<module>"), False)
            self.feed(now, stopped, InputRequest(rank, "ipdb> ", False, 0))

    def due(self, now: float) -> int | None:
        request = self.turns.due(self.run, now)
        return None if request is None else request.rank

    def say(self, now: float, text: str) -> tuple[dict[int, str], str]:
        """The person's answer to the question that is due."""
        request = self.turns.due(self.run, now)
        assert request is not None
        self.turns.question(request, self.run)
        replies, told = self.turns.answers(request, InputReply("text", text), self.run, now, lambda frame: "")
        for rank in replies:
            self.run = answered(self.run, rank, now)
        return {rank: reply.text for rank, reply in replies.items()}, told


def test_input_is_asked_at_once_and_in_the_order_of_the_questions() -> None:
    play = Play()
    play.feed(1.0, InputRequest(2, "name? ", False, 0), InputRequest(0, "name? ", False, 0))
    assert play.due(1.0) == 2
    assert play.turns.question(play.turns.pending[2], play.run) == ("", "[2] name? ")
    assert play.say(1.0, "ranks") == ({2: "ranks"}, "")
    assert play.say(1.0, "all") == ({0: "all"}, "")
    assert play.due(1.0) is None and not play.turns.open


def test_a_first_stop_waits_a_moment_for_ranks_that_may_stop_too() -> None:
    play = Play()
    play.stop(1.0, 1)
    assert play.due(1.1) is None
    play.stop(1.15, 0)
    assert play.due(1.4) is None
    assert play.due(1.5) == 1
    assert play.turns.question(play.turns.pending[1], play.run) == (
        "Rank 0 has stopped too: `rank 0` turns there, `all n` steps all.",
        "[1] ipdb> ",
    )
    assert play.turns.question(play.turns.pending[1], play.run)[0] == "", "said once"


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
    assert play.say(2.0, "n") == ({1: "n"}, "")
    play.feed(2.0, Resumed(1, 2.0, soon=True))
    assert play.due(3.0) is None and play.turns.open
    play.stop(3.1, 1, line=3)
    assert play.due(3.1) == 1
    play.say(3.1, "n")
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
    play.say(2.0, "c")
    play.feed(2.1, Resumed(1, 2.0, soon=True), event)
    assert play.due(2.2) == 0


def test_ranks_that_step_over_a_collective_together_are_asked_together() -> None:
    play = stopped(0, 1, 2)
    play.say(2.0, "all n")
    waits = Position((Frame("cell", 3, "<module>"),), "all_reduce", True)
    for rank in range(3):
        play.feed(2.3, Resumed(rank, 2.0, soon=True), Sampled(rank, 2.3, waits, 2.3, ()))
    play.stop(2.5, 0, line=3)
    assert play.due(2.5) is None
    play.stop(2.6, 1, 2, line=3)
    assert play.say(2.6, "")[0] == {0: "", 1: "", 2: ""}


def test_a_rank_that_waits_for_one_at_the_prompt_holds_nobody_up_twice() -> None:
    play = stopped(0, 1)
    play.say(2.0, "n")
    waits = Position((Frame("cell", 3, "<module>"),), "barrier", True)
    play.feed(2.3, Resumed(0, 2.0, soon=True), Sampled(0, 2.3, waits, 2.3, ()))
    assert play.due(2.3) == 1, "it has been there for long"
    play.say(2.4, "n")
    play.stop(2.5, 1, line=3)
    assert play.due(2.5) == 1


def test_all() -> None:
    play = stopped(0, 1, 2)
    assert play.say(2.0, "all p x") == ({0: "p x", 1: "p x", 2: "p x"}, "")
    assert play.due(2.0) is None
    play.feed(2.1, *(InputRequest(rank, "ipdb> ", False, 0) for rank in (2, 1)))
    assert play.due(2.1) is None, "rank 0 is still to come"
    play.feed(2.2, InputRequest(0, "ipdb> ", False, 0))
    assert play.say(2.2, "") == ({2: "", 1: "", 0: ""}, ""), "an empty line says it again, to all"
    play.feed(2.3, *(InputRequest(rank, "ipdb> ", False, 0) for rank in (0, 1, 2)))
    assert play.say(2.3, "p y") == ({0: "p y"}, "")
    assert "all what?" in play.say(2.3 + 20, "all")[1]


def test_turning_to_another_rank() -> None:
    play = stopped(1, 0)
    assert play.say(2.0, "rank 0") == ({}, "[0] debugging, line 2: x = 1")
    assert play.say(2.0, "p x") == ({0: "p x"}, "")
    play.feed(2.1, InputRequest(0, "ipdb> ", False, 0))
    assert play.due(2.1) == 0
    assert play.say(2.1, "rank 2")[1] == "[2] running: the debugger has not stopped it. Stopped: 0-1."
    assert play.say(2.1, "rank 7")[1] == "there is no rank 7: the last is 2."
    assert play.say(2.1, "ranks")[1].splitlines() == [
        "[0] debugging, line 2: x = 1",
        "[1] debugging, line 2: x = 1",
        "[2] running",
    ]
    assert play.say(2.1, "ranks_of = 3")[0] == {0: "ranks_of = 3"}, "a statement, for pdb"


def test_a_failed_peer_is_told() -> None:
    play = stopped(1)
    play.feed(2.0, Exited(0, 2.0, -11))
    assert play.turns.question(play.turns.pending[1], play.run)[0] == "Rank 0 has failed: SIGSEGV."


def test_a_rank_that_ends_asks_no_more() -> None:
    play = stopped(1)
    play.feed(2.0, Exited(1, 2.0, -9))
    assert play.due(2.0) is None and not play.turns.open
