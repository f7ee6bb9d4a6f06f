"""When ranks are stopped, and how hard: with a scripted clock, no process and no engine."""

from __future__ import annotations

from functools import partial

import pytest

from nbspawn._protocol.frames import Frame
from nbspawn._protocol.messages import Stopped
from nbspawn._session.stop_policy import LONG, Decision, Signals, Standstill, StopPolicy

GENTLY = Signals(interrupt=0.0, term=3.0, kill=5.0)
KILL = Signals(kill=0.0)


class Play:
    """A policy, and what it is given beside the time. ``at`` gives the signals that it decides on."""

    def __init__(self, grace: float = 3.0, timeout: float | None = None) -> None:
        self.policy = StopPolicy(grace, timeout, 100.0)
        self.presses = 0
        self.failed: list[int] = []
        self.asking = False
        self.stopping = False
        self.decision: Decision | None = None

    def at(self, now: float) -> Signals | None:
        decision = self.policy.decide(now, self.presses, self.failed, self.asking, self.stopping)
        if decision is None:
            return None
        self.stopping, self.decision = True, decision
        return decision.signals

    @property
    def stacks(self) -> str:
        assert self.decision is not None
        return self.decision.stacks_first


def test_nothing_happens_for_ever() -> None:
    play = Play()
    assert play.at(100.0) is None and play.at(1e9) is None
    assert play.policy.wait(1e9, 0.5) == 0.5
    assert not play.policy.stopped_by_user and not play.policy.timed_out


def test_one_press_is_handled_once() -> None:
    play = Play()
    play.presses = 1
    assert play.at(101.0) == GENTLY and play.stacks == ""
    assert play.at(101.5) is None
    assert play.policy.stopped_by_user


@pytest.mark.parametrize("grace", [0.0, 0.1, 20.0])
def test_the_grace_period_lies_between_the_interrupt_and_the_term_signal(grace: float) -> None:
    play = Play(grace)
    play.presses = 1
    assert play.at(101.0) == (0.0, grace, grace + 2.0)


def test_a_second_press_kills() -> None:
    play = Play()
    play.presses = 1
    play.at(101.0)
    play.presses = 2
    assert play.at(101.5) == KILL and play.stacks == "main"
    play.presses = 3
    assert play.at(102.0) == KILL


def test_a_second_press_kills_even_if_no_rank_was_there_for_the_first() -> None:
    play = Play()
    play.presses = 1
    play.at(101.0)
    play.presses, play.stopping = 2, False
    assert play.at(101.5) == KILL


def test_two_presses_before_anybody_has_looked_kill() -> None:
    play = Play()
    play.presses = 2
    assert play.at(101.0) == KILL


def test_a_press_while_a_failure_stops_the_ranks_kills_and_the_failure_stays_the_cause() -> None:
    play = Play()
    play.failed, play.stopping, play.presses = [1], True, 1
    assert play.at(101.0) == KILL
    assert not play.policy.stopped_by_user


def test_a_press_between_a_failure_and_the_end_of_its_collecting_time() -> None:
    play = Play()
    play.failed = [1]
    assert play.at(101.0) is None
    play.presses = 1
    assert play.at(101.1) == GENTLY
    assert not play.policy.stopped_by_user


def test_failures_are_collected_for_a_moment_which_the_grace_period_contains() -> None:
    play = Play()
    play.failed = [1]
    assert play.at(101.0) is None
    assert play.policy.wait(101.0, 0.5) == pytest.approx(0.25)
    play.failed = [1, 0]
    assert play.at(101.24) is None, "a second one does not prolong it"
    assert play.at(101.25) == (0.0, 2.75, 4.75)
    assert not play.policy.timed_out and not play.policy.stopped_by_user


def test_with_no_grace_period_nothing_is_collected() -> None:
    play = Play(grace=0.0)
    play.failed = [1]
    assert play.at(101.0) == (0.0, 0.0, 2.0)


def test_a_failure_waits_for_a_rank_at_a_breakpoint() -> None:
    play = Play()
    play.failed = [1]
    assert play.at(101.0) is None
    play.asking = True
    assert play.at(101.2) is None and play.at(500.0) is None
    assert play.policy.wait(500.0, 0.5) == 0.5
    play.asking = False
    assert play.at(501.0) is None, "the time begins anew: others may have come meanwhile"
    assert play.at(501.25) == (0.0, 2.75, 4.75)


def test_after_the_post_mortem_of_a_failed_rank_its_peers_are_not_waited_for() -> None:
    play = Play()
    play.asking = True
    play.policy.fold(Stopped(1, 101.0, Frame("cell", 2, "f"), post_mortem=True))
    assert play.at(101.0) is None, "it has not failed before it has left that"
    play.failed = [0]
    assert play.at(102.0) is None, "one that was not examined"
    play.failed = [0, 1]
    assert play.policy.examined(play.failed)
    assert play.at(103.0) is None and play.at(103.25) == (0.0, 2.75, 4.75)


def test_a_breakpoint_is_no_post_mortem() -> None:
    play = Play()
    play.policy.fold(Stopped(1, 101.0, Frame("cell", 2, "f"), post_mortem=False))
    assert not play.policy.examined([1])


def test_timeout() -> None:
    play = Play(timeout=10.0)
    assert play.policy.wait(109.8, 0.5) == pytest.approx(0.2)
    assert play.at(109.9) is None and not play.policy.timed_out
    assert play.at(110.0) == GENTLY and play.stacks == "deep"
    assert play.policy.timed_out and not play.policy.stopped_by_user
    assert play.policy.wait(110.1, 0.5) == 0.5, "the loop does not spin afterwards"


def test_timeout_without_a_grace_period_leaves_time_to_answer() -> None:
    play = Play(grace=0.0, timeout=0.0)
    assert play.at(100.0) == (0.0, 0.1, 2.1)


def test_a_prompt_pauses_the_timeout() -> None:
    play = Play(timeout=10.0)
    play.policy.pause(60.0)
    assert play.at(169.9) is None and play.at(170.0) == GENTLY


def test_a_failure_comes_before_the_timeout() -> None:
    play = Play(timeout=10.0)
    play.failed = [1]
    assert play.at(109.9) is None and play.at(110.1) is None
    assert play.at(110.2) == (0.0, 2.75, 4.75) and not play.policy.timed_out


def test_ranks_that_are_stopping_are_stopped_by_nothing_but_the_user() -> None:
    play = Play(timeout=10.0)
    play.stopping, play.failed = True, [1]
    assert play.at(200.0) is None


# ---------------------------------------------------------------- standing still


def test_a_long_stall_is_shown_once() -> None:
    standstill = Standstill(0.0)
    shown = [now for now in range(1, 200) if standstill.long(now, lambda: True)]
    assert shown == [1 + LONG]


def test_each_long_stall_is_shown() -> None:
    standstill = Standstill(0.0)
    shown = [now for now in range(1, 200) if standstill.long(now, partial(bool, now % 50))]
    assert shown == [1 + LONG, 51 + LONG, 101 + LONG, 151 + LONG]


def test_a_stall_is_looked_for_once_a_second() -> None:
    looked = []
    standstill = Standstill(0.0)
    for tick in range(1, 101):
        standstill.long(tick / 10, lambda: bool(looked.append(1)))  # type: ignore[func-returns-value]
    assert 9 <= len(looked) <= 10
