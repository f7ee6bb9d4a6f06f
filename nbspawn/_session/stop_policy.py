"""When ranks are stopped, and how hard: after the user's Stop, after a failure, and when the timeout has passed; and
when those that stand still are shown.

Pure but for its own memory; the clock is passed in. The supervisor carries out what is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nbspawn._protocol.messages import Event, Stopped

_COLLECT = 0.25  # seconds: after a failure, for the others to report theirs, or a breakpoint; then they are interrupted
_KILL_AFTER = 2.0  # seconds between SIGTERM and SIGKILL
_ANSWER = 0.1  # seconds that a rank needs to report where it is
_KILLED = ("When they were killed:",)


class Signals(NamedTuple):
    """Seconds from now to each signal, None for one that is not sent: the arguments of ``Engine.stop_at``."""

    interrupt: float | None = None
    term: float | None = None
    kill: float | None = None


@dataclass(frozen=True)
class Decision:
    """Stop the ranks now, with these signals. ``reason`` is for the log."""

    reason: str
    signals: Signals
    stacks_first: Literal["", "main", "deep"] = ""
    """Take the ranks' stacks before the first signal: main threads' only, or other threads' and native code too."""
    title: tuple[str, ...] = ()
    """What stands above the stacks in the error."""


class StopPolicy:
    """The state of one command's end. ``now`` is when it began; all times are seconds."""

    def __init__(self, grace_period: float, timeout: float | None, now: float) -> None:
        self.stopped_by_user = False
        """Did the user stop the ranks, before any of them had failed?"""
        self.timed_out = False
        self._grace_period = grace_period
        self._deadline = math.inf if timeout is None else now + timeout
        self._collected_at = math.inf
        """When the ranks that are left are interrupted, after a failure."""
        self._presses = 0
        """How many presses of Stop have been handled."""
        self._examined: set[int] = set()
        """The ranks whose post-mortem has been opened."""

    def fold(self, event: Event) -> None:
        """Take note of a post-mortem."""
        if isinstance(event, Stopped) and event.post_mortem:
            self._examined.add(event.rank)

    def decide(
        self, now: float, presses: int, failed: Collection[int], asking: bool, stopping: bool
    ) -> Decision | None:
        """What has to be done at ``now``; None for nothing.

        ``presses`` counts the presses of Stop since the command began; ``failed`` are the ranks that failed by
        themselves; ``asking``: a rank's prompt is open, or will be in a moment; ``stopping``: ranks are being stopped.
        """
        if presses > self._presses:
            return self._press(presses, failed, stopping)
        if stopping:
            return None
        if failed and (self.examined(failed) or not asking):
            # Nothing is decided before that: a rank that comes to its breakpoint meanwhile may be debugged.
            return self._collect(now)
        self._collected_at = math.inf
        if now < self._deadline:
            return None
        self.timed_out = True
        # However short the grace period, ranks get the time that they need to report where they are.
        return Decision("the timeout has passed", _escalation(max(self._grace_period, _ANSWER)), "deep")

    def _press(self, presses: int, failed: Collection[int], stopping: bool) -> Decision:
        again = self._presses > 0 or stopping or presses > 1
        self._presses = presses
        self.stopped_by_user = self.stopped_by_user or not failed
        if again:
            return Decision("the user has pressed Stop again", Signals(kill=0.0), "main", _KILLED)
        return Decision("the user has pressed Stop", self.escalation)

    def _collect(self, now: float) -> Decision | None:
        collect = min(_COLLECT, self._grace_period)
        self._collected_at = min(self._collected_at, now + collect)
        if now < self._collected_at:
            return None
        return Decision("a rank has failed", _escalation(self._grace_period - collect))

    @property
    def escalation(self) -> Signals:
        """KeyboardInterrupt at once, SIGTERM after the grace period, then SIGKILL."""
        return _escalation(self._grace_period)

    def examined(self, failed: Collection[int]) -> bool:
        """Has the user left a failed rank's post-mortem? That ends those of its peers."""
        return any(rank in self._examined for rank in failed)

    def wait(self, now: float, at_most: float) -> float:
        """Seconds until something may have to be decided though nothing happens, at most so many."""
        left = min(self._deadline, self._collected_at) - now
        return min(at_most, left) if left > 0 else at_most

    def pause(self, seconds: float) -> None:
        """Pause the timeouts: so long the user was at a prompt."""
        self._deadline += seconds


def _escalation(term: float) -> Signals:
    return Signals(interrupt=0.0, term=term, kill=term + _KILL_AFTER)


LONG = 30.0  # seconds after a stall is first found: then it is shown where, while the ranks can still be looked at
_EVERY = 1.0  # seconds between two looks: each goes through all ranks


class Standstill:
    """When the stacks of ranks that stand still are shown unasked: once for each long stall. ``now`` is when the
    command began, in seconds."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._since: float | None = None
        self._shown = False

    def long(self, now: float, stalled: Callable[[], bool]) -> bool:
        """Are the stacks to be shown at ``now`` seconds? ``stalled`` is called about once a second."""
        if now - self._looked_at < _EVERY:
            return False
        self._looked_at = now
        if not stalled():
            self._since, self._shown = None, False
        elif self._since is None:
            self._since = now
        elif now - self._since >= LONG and not self._shown:
            self._shown = True
            return True
        return False
