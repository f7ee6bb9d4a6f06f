"""When ranks that are to end get which signal: an escalation from SIGINT to SIGKILL. Pure, with the clock passed in."""

from __future__ import annotations

import math
import signal

_AGAIN = 0.1  # seconds between SIGINT and the one that repeats it


class SignalSchedule:
    """The signals that are planned for the ranks of one command. All moments are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, signal.Signals]] = []
        self._again_at = math.inf

    def plan(
        self, now: float, interrupt: float | None = None, term: float | None = None, kill: float | None = None
    ) -> None:
        """Send SIGINT, SIGTERM and SIGKILL so many seconds from ``now`` each (None: never); replaces what was planned.
        A signal waits for those before it."""
        steps = ((interrupt, signal.SIGINT), (term, signal.SIGTERM), (kill, signal.SIGKILL))
        self._steps = [(now + delay, number) for delay, number in steps if delay is not None]

    @property
    def planned(self) -> bool:
        """Is there a signal that has not been due yet?"""
        return bool(self._steps)

    @property
    def next_due(self) -> float:
        """When there is something to send next; infinity if nothing is planned."""
        return min(self._again_at, *(moment for moment, _ in self._steps[:1]), math.inf)

    def due(self, now: float) -> list[signal.Signals]:
        """The planned signals that are to be sent now; each is given once."""
        due = []
        while self._steps and self._steps[0][0] <= now:
            due.append(self._steps.pop(0)[1])
        return due

    def interrupted(self, now: float) -> None:
        """SIGINT has been sent. The stack is asked for just before, and that signal restarts system calls: if SIGINT
        comes while it is handled, Python runs no handler until recv() returns. A second SIGINT a moment later ends the
        call, and has no other effect."""
        self._again_at = now + _AGAIN

    def again_due(self, now: float) -> bool:
        """Is SIGINT to be repeated now? Said once."""
        due = self._again_at <= now
        if due:
            self._again_at = math.inf
        return due
