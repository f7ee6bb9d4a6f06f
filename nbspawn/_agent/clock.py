"""The kernel's clock, as it is known on this node: from its answers to questions, of which the quickest are right."""

from __future__ import annotations

import math
import threading
import time
from collections import deque

from nbspawn._protocol.agents import ClockAsked, ClockTold

_QUESTIONS = 8  # at once, and so many answers are compared
_AFTER = 10.0  # seconds to the next question: clocks drift apart


class Clock:
    """The kernel's clock as this node knows it: ``offset`` plus this node's CLOCK_MONOTONIC, right to ``error``
    seconds."""

    def __init__(self) -> None:
        self.offset = self.error = 0.0
        self.known = threading.Event()
        self._answers: deque[tuple[float, float]] = deque(maxlen=_QUESTIONS)
        self._ask_at = 0.0

    def question(self) -> ClockAsked | None:
        """What to send to the kernel now, if anything."""
        now = time.monotonic()
        if now < self._ask_at:
            return None
        self._ask_at = math.inf
        return ClockAsked(now)

    def learn(self, answer: ClockTold) -> None:
        """The kernel's answer has come at this moment: it was given half-way, if both ways are as long."""
        now = time.monotonic()
        if now - answer.asked > _AFTER:  # the kernel was busy or idle for long: what was known before is old
            self._answers.clear()
        self._answers.append((now - answer.asked, answer.kernel - (answer.asked + now) / 2))
        shortest, self.offset = min(self._answers)
        self.error = shortest / 2
        self._ask_at = now + (_AFTER if len(self._answers) == _QUESTIONS else 0.0)
        self.known.set()
