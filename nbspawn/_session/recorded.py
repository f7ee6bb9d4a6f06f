"""When ranks are asked for their collectives: while they stand still, before they are stopped, and when one has raised
in a collective. What is wrong then takes the place of what the sampler guesses."""

from __future__ import annotations

import signal
from dataclasses import replace

from nbspawn._engine.base import Engine
from nbspawn._protocol.collectives import Collectives
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.messages import Aborting, Event, Raised, Returned
from nbspawn._protocol.questions import COLLECTIVES
from nbspawn._session import views
from nbspawn._state.collectives import Reports, findings, mismatches, stands_still
from nbspawn._state.run import Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.stall import overdue
from nbspawn.errors import root_cause_first

_LOOK = 1.0  # seconds between two looks whether ranks stand still
_AHEAD = 2.0  # seconds, more than between two looks: the first sentence that is shown is then the recorder's
_AGAIN = 5.0  # seconds between two questions while they do
_UNRECORDED = 60.0  # the same where no rank has told anything


class RecordedCollectives:
    """The recorded collectives of the ranks that run one command."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._end: tuple[Snapshot, Reports] | None = None
        self._returned: dict[int, Collectives] = {}
        self._raised: dict[int, Collectives] = {}
        self._aborted: set[int] = set()
        self._look_at = 0.0
        self._ask_at = 0.0

    def fold(self, event: Event) -> None:
        """Take note of what a rank tells of its collectives at its end: after an error in one, or a good end."""
        if not isinstance(event, (Raised, Aborting, Returned)) or event.collectives is None:
            return
        told = self._returned if isinstance(event, Returned) else self._raised
        told[event.rank] = event.collectives
        if isinstance(event, Aborting):
            self._aborted.add(event.rank)

    def watched(self, run: Run, now: float, at_rest: bool) -> Run:
        """The run with what its ranks tell if they stand still. ``at_rest``: they wait for the user, or end."""
        if now < self._look_at:
            return run
        self._look_at = now + _LOOK
        if at_rest or not overdue(views.snapshot(run, now + _AHEAD)):
            self._ask_at = 0.0
            return replace(run, collectives={}) if run.collectives else run
        if now < self._ask_at:
            return run
        reports = self.asked()
        self._ask_at = now + (_AGAIN if reports else _UNRECORDED)
        return replace(run, collectives=reports)

    def note_end(self, run: Run, now: float) -> None:
        """The ranks are about to be stopped, or have ended."""
        if self._engine.failures:
            if not self._failed_in_collective(root_cause_first(self._engine.failures)[0]):
                return
            reports = self.asked()
        elif run.collectives:
            reports = run.collectives
        elif any(stands_still(views.snapshot(run, now), rank.rank) for rank in run.ranks if rank.state == "waiting"):
            reports = self.asked()
        else:
            return
        self._end = views.snapshot(run, now), reports

    @property
    def sentences(self) -> list[str]:
        """What was wrong then."""
        if self._end is None:
            return []
        seen, reports = self._end
        if not self._engine.failures:  # those that are being stopped raise
            return findings(seen, {**reports, **self._returned})
        # A call that ends with an error seems to have ended well, until it has raised.
        return findings(seen, {**reports, **self._returned, **self._raised}, self._raised, self._aborted)

    def mismatches(self, run: Run) -> list[str]:
        """What did not match, of ranks that have all ended well: a backend may take it, and give wrong values."""
        return [] if self._end is not None else mismatches(run, self._returned)

    def _failed_in_collective(self, failure: Failure) -> bool:
        """gloo aborts the process that is sent more than it expects."""
        return failure.rank in self._raised or failure.exitcode == -signal.SIGABRT

    def asked(self) -> Reports:
        """What the ranks tell that run, and what those that have ended told then."""
        asked = self._engine.ask(COLLECTIVES)
        return {**self._returned, **{rank: found for rank, found in asked.items() if found is not None}}
