"""When ranks are asked for their collectives: while they stand still, before they are stopped, and when one has raised
in a collective. What is wrong then takes the place of what the sampler guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbspawn._engine.base import Engine
from nbspawn._protocol.collectives import Collectives
from nbspawn._protocol.messages import Event, Raised
from nbspawn._session import views
from nbspawn._state.collectives import Reports, findings
from nbspawn._state.run import Run
from nbspawn._state.stall import overdue
from nbspawn.errors import root_cause_first

_LOOK = 1.0  # seconds between two looks whether ranks stand still
_AGAIN = 5.0  # seconds between two questions while they do
_UNRECORDED = 60.0  # the same where no rank has told anything
_WAITED = 1.0  # seconds that a rank has waited, at least, to be asked before it is stopped


class RecordedCollectives:
    """Of the ranks that run one command. ``sentences`` are what was wrong when they were stopped."""

    def __init__(self, engine: Engine) -> None:
        self.sentences: Sequence[str] = ()
        self._engine = engine
        self._raised: dict[int, Collectives] = {}
        self._look_at = 0.0
        self._ask_at = 0.0

    def fold(self, event: Event) -> None:
        """Take note of an error in a collective."""
        if isinstance(event, Raised) and event.collectives is not None:
            self._raised[event.rank] = event.collectives

    def watched(self, run: Run, now: float, at_rest: bool) -> Run:
        """The run with what its ranks tell if they stand still. ``at_rest``: they wait for the user, or end."""
        if now < self._look_at:
            return run
        self._look_at = now + _LOOK
        if at_rest or not overdue(views.snapshot(run, now)):
            self._ask_at = 0.0
            return replace(run, collectives={}) if run.collectives else run
        if now < self._ask_at:
            return run
        reports = self.asked()
        self._ask_at = now + (_AGAIN if reports else _UNRECORDED)
        return replace(run, collectives=reports)

    def note_end(self, run: Run, now: float) -> None:
        """The ranks are about to be stopped."""
        if self._engine.failures:
            if root_cause_first(self._engine.failures)[0].rank not in self._raised:
                return
            reports: Reports = {**self.asked(), **self._raised}
        elif run.collectives:
            reports = run.collectives
        elif any(rank.state == "waiting" and now - rank.called >= _WAITED for rank in run.ranks):
            reports = self.asked()
        else:
            return
        self.sentences = findings(views.snapshot(run, now), reports)

    def asked(self) -> Reports:
        """What the ranks tell that run."""
        return {rank: found for rank, found in self._engine.ask("collectives").items() if found is not None}
