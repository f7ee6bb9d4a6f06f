"""The kernel's clock, as it is known on another node."""

from __future__ import annotations

import pytest

from nbspawn._agent import clock
from nbspawn._protocol.agents import ClockTold


class Time:
    """This node's clock, which the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock.time, "monotonic", lambda: self.now)


def exchange(asking: clock.Clock, time: Time, there: float, back: float, ahead: float = 500.0) -> bool:
    """Ask a kernel whose clock is that much ahead, with these delays in seconds; False if nothing was to be asked."""
    question = asking.question()
    if question is None:
        return False
    time.now += there
    answered = time.now + ahead
    time.now += back
    asking.learn(ClockTold(question.time, answered))
    return True


def test_the_quickest_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    time, asking = Time(monkeypatch), clock.Clock()
    assert not asking.known.is_set()
    for there, back in ((0.2, 0.001), (0.001, 0.001), (0.001, 0.3)):
        assert exchange(asking, time, there, back)
    assert asking.known.is_set()
    assert asking.offset == pytest.approx(500.0)
    assert asking.error == pytest.approx(0.001)


def test_it_asks_often_at_first_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    time, asking = Time(monkeypatch), clock.Clock()
    assert [exchange(asking, time, 0.001, 0.001) for _ in range(10)] == [True] * 8 + [False] * 2
    time.now += 10
    assert exchange(asking, time, 0.001, 0.001) and not exchange(asking, time, 0.001, 0.001)


def test_nothing_is_asked_while_an_answer_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is idle for hours answers once, then."""
    time, asking = Time(monkeypatch), clock.Clock()
    assert asking.question() is not None
    time.now += 3600
    assert asking.question() is None


def test_after_a_long_wait_the_old_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks have drifted apart meanwhile."""
    time, asking = Time(monkeypatch), clock.Clock()
    for _ in range(8):
        exchange(asking, time, 0.0001, 0.0001)
    time.now += 10
    assert exchange(asking, time, 3600, 0.001, ahead=500.2)
    for _ in range(7):
        assert exchange(asking, time, 0.001, 0.001, ahead=500.2)
    assert asking.offset == pytest.approx(500.2)
