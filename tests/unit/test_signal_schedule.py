"""The escalation schedule under a scripted clock: which signal is due when."""

from __future__ import annotations

import math
from signal import SIGINT, SIGKILL, SIGTERM

from nbspawn._engine.run.signal_schedule import SignalSchedule


def planned(now: float = 100.0, **delays: float) -> SignalSchedule:
    schedule = SignalSchedule()
    schedule.plan(now, **delays)
    return schedule


def test_nothing_is_planned_at_first() -> None:
    schedule = SignalSchedule()
    assert not schedule.planned and schedule.next_due == math.inf
    assert schedule.due(1e9) == [] and not schedule.again_due(1e9)


def test_each_signal_is_due_once_at_its_time() -> None:
    schedule = planned(interrupt=0.0, term=5.0, kill=7.0)
    assert schedule.next_due == 100.0
    assert schedule.due(100.0) == [SIGINT]
    assert schedule.due(104.9) == [] and schedule.next_due == 105.0
    assert schedule.due(105.0) == [SIGTERM] and schedule.planned
    assert schedule.due(200.0) == [SIGKILL]
    assert not schedule.planned and schedule.next_due == math.inf


def test_signals_that_were_missed_come_in_their_order() -> None:
    assert planned(interrupt=0.0, term=5.0, kill=7.0).due(1000.0) == [SIGINT, SIGTERM, SIGKILL]


def test_a_signal_waits_for_those_before_it() -> None:
    schedule = planned(term=5.0, kill=1.0)
    assert schedule.next_due == 105.0 and schedule.due(104.0) == []
    assert schedule.due(105.0) == [SIGTERM, SIGKILL]


def test_a_new_plan_replaces_the_old_one() -> None:
    schedule = planned(interrupt=0.0, term=5.0, kill=7.0)
    schedule.plan(101.0, kill=0.0)
    assert schedule.next_due == 101.0
    assert schedule.due(101.0) == [SIGKILL] and not schedule.planned


def test_sigint_is_repeated_once_a_moment_later() -> None:
    schedule = planned(interrupt=0.0, term=5.0)
    assert schedule.due(100.0) == [SIGINT]
    schedule.interrupted(100.0)
    assert schedule.next_due == 100.1
    assert not schedule.again_due(100.05)
    assert schedule.again_due(100.11) and not schedule.again_due(100.2)
    assert schedule.next_due == 105.0


def test_a_repetition_outlives_a_new_plan_and_is_no_planned_signal() -> None:
    schedule = SignalSchedule()
    schedule.interrupted(100.0)
    schedule.plan(100.0)
    assert schedule.next_due == 100.1 and not schedule.planned
