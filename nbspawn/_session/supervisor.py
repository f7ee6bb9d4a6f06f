"""One command, from its start to its results or its error: polls the engine, and carries out what has been decided."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from nbspawn._engine.base import Engine
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._protocol.messages import DisplayData, Event, InputRequest, Printed, Raised
from nbspawn._render import collectives, stacks, timeline, tracebacks
from nbspawn._render.report import Report
from nbspawn._render.text import duration
from nbspawn._results import Results
from nbspawn._session import hooks, stop_policy, views
from nbspawn._session.debugger_diff import StoppedComparison, asked_for
from nbspawn._session.options import CommandOptions
from nbspawn._session.prompts import BreakRequests, PromptQueue, late_text
from nbspawn._session.recorded import RecordedCollectives
from nbspawn._session.stop_policy import Decision, Signals, Standstill, StopPolicy
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run, answered, reduce
from nbspawn._state.stall import stall, stuck
from nbspawn.errors import (
    PayloadError,
    RunTimeoutError,
    SpawnError,
    StartError,
    UsageError,
    interrupt_error,
    rank_error,
    root_cause_first,
)

_log = logging.getLogger(__name__)

_FETCHED = 4  # logs of ranks on other machines, of those that failed first
REPORTS = ("stacks", "collectives")
"""Where the ranks stand, and which collectives they have called."""
_TICK = 0.5  # seconds: how late a click can be noticed


class Supervisor:
    """The loop. ``clock`` gives seconds on the engine's clock (CLOCK_MONOTONIC)."""

    def __init__(
        self,
        options: CommandOptions,
        engine: Engine,
        interrupts: InterruptFlag,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._engine = engine
        self._interrupts = interrupts
        self._clock = clock
        self._view = options.view if options.view is not None else hooks.make_default()
        self._policy = StopPolicy(options.grace_period, options.timeout, clock())
        self._prompts = PromptQueue()
        self._breaks = BreakRequests()
        self._comparison: StoppedComparison | None = None
        self._standstill = Standstill(clock())
        self._recorded = RecordedCollectives(engine)
        self._stacks_at_end: list[str] = []
        self._failed_beside: dict[str, str] = {}
        self._refused: SpawnError | None = None
        self._profile: Profile
        self.cut = True
        """Did the notebook get less than the ranks' whole output?"""
        interrupts.wakes(engine.wake)

    @property
    def asking(self) -> bool:
        """Do ranks wait for answers, or will they at once?"""
        return self._prompts.open

    @property
    def run(self) -> Run:
        """The state that was shown last."""
        return self._view.run

    def report(self, what: str) -> Report:
        """The report about this moment: one of ``REPORTS``, or 'native stacks'."""
        return self._collectives() if what == "collectives" else self._stacks(native=what == "native stacks")

    def _stacks(self, note: str = "", open_: bool = True, native: bool = False) -> Report:
        """The stacks, with native code of ranks that are stuck, or else of all."""
        title, seen = f"Where the ranks stand after {self._passed()}{note}", views.snapshot(self.run, self._clock())
        look = self._engine.look(True, range(len(self.run.ranks)) if native else stuck(seen))
        return stacks.report(title, look, seen, open_)

    def _collectives(self) -> Report:
        title, seen = f"Collectives after {self._passed()}", views.snapshot(self.run, self._clock())
        return collectives.report(title, self._recorded.asked(), seen)

    def _passed(self) -> str:
        return duration(self._clock() - self.run.started)

    def open(self, run: Run) -> None:
        """Show that it has begun. Called in the cell's thread: only there do displays come under the cell."""
        self._profile = Profile(run)
        self._view.open(run, self._profile)

    def results(
        self,
        run: Run,
        afterwards: Callable[[Run], Run] = lambda run: run,
        instead: Callable[[PayloadError], tuple[Engine, Run]] | None = None,
    ) -> Results[Any]:
        """Watch the run until it is over, then call ``afterwards``; returns the results, or raises the one error. If no
        rank could load what the command needs, ``instead`` starts others."""
        try:
            try:
                run = self._until_over(run)
                while instead is not None and self._refused is None and self._none_has_loaded(run):
                    run = self._until_over(self._go_on_with_others(run, instead))
                if not self._engine.failures:
                    run = self._note_mismatches(run)
                elif not self._sentences:
                    self._note_end(run, self._clock())
            except BaseException:
                # Not a rank's error: the view's, or a bug of ours. Nothing would watch the ranks any more.
                _log.exception("the ranks are stopped: watching them has failed")
                run = self._stop_unwatched(run)
                raise
            finally:
                run = afterwards(run)
                run = replace(run, notes=(*run.notes, *self._engine.losses(), *self._failed_beside.values()))
            if self._options.timings:
                phases = " · ".join(f"{name} {duration(seconds)}" for name, seconds in run.phases.items())
                run = replace(run, notes=(*run.notes, f"Time: {phases}"))
        finally:
            with self._beside("The view"):
                self.cut = self._view.close(run)
        return self._conclude(run)

    @contextmanager
    def _beside(self, what: str) -> Iterator[None]:
        """What shows the run, or examines it, may fail without touching it: it is logged, and a note of the run."""
        try:
            yield
        except Exception as error:
            note = f"{what} has failed, and the ranks ran on without it: {type(error).__name__}: {error}"
            if what not in self._failed_beside:
                _log.exception("%s has failed", what)
            self._failed_beside[what] = note

    def _until_over(self, run: Run) -> Run:
        at_most, output_at = views.POLL_TIME, -math.inf
        while not self._engine.finished:
            began = self._clock()
            events = self._engine.poll(self._policy.wait(began, at_most))
            run = self._fold(run, events)
            with self._beside("The view"):
                self._view.show(run, events)
            if any(isinstance(event, (Printed, DisplayData)) for event in events):
                output_at = self._clock()
            buffered = began - output_at < 3 * views.BUFFER_TIME
            at_most = views.POLL_TIME if buffered or self.asking else _TICK
            self._handle_actions(run)
            with self._beside("Breaking into ranks"):
                self._break_in(run)
            with self._beside("Comparing ranks"):
                self._compare()
            with self._beside("Watching for ranks that stand still"):
                run = self._watch_standstill(run)
            run = self._stop_if_due(run)
            request = self._due_prompt(run)
            if request is not None:
                run = self._ask(run, request)
            if self.asking or request is not None:
                self._policy.pause(self._clock() - began)
        return run

    def _none_has_loaded(self, run: Run) -> bool:
        """Is what the command needs what no rank could load? Then none of the user's code has run."""
        failures = self._engine.failures
        return len(failures) == len(run.ranks) and all(one.culprit for one in failures) and not self._interrupts.count

    def _go_on_with_others(self, run: Run, instead: Callable[[PayloadError], tuple[Engine, Run]]) -> Run:
        stuck = rank_error(self._engine.failures, len(run.ranks))
        assert isinstance(stuck, PayloadError)
        try:
            self._engine, run = instead(stuck)
        except (PayloadError, StartError) as refused:
            self._refused = refused
            return run
        self._recorded = RecordedCollectives(self._engine)
        self._interrupts.wakes(self._engine.wake)
        return run

    def _stop_unwatched(self, run: Run) -> Run:
        """Stop the ranks as Stop does, without the view."""
        presses = self._interrupts.count
        self._engine.stop_at(*self._policy.escalation)
        while not self._engine.finished:
            run = reduce(run, self._engine.poll(_TICK), self._clock())
            if self._interrupts.count > presses:
                self._engine.stop_at(*Signals(kill=0.0))
        return run

    def _fold(self, run: Run, events: Sequence[Event]) -> Run:
        now = self._clock()
        for event in events:
            self._prompts.fold(event, now)
            self._breaks.fold(event)
            self._policy.fold(event)
            self._recorded.fold(event)
            if self._comparison is not None:
                self._comparison.fold(event)
            if isinstance(event, Raised) and event.by_quit:
                self._interrupts.press()
        with self._beside("The timeline"):
            self._profile.add(events, now)
        return reduce(run, events, now)

    # ------------------------------------------------------------ the user

    def _handle_actions(self, run: Run) -> None:
        for action in self._view.actions():
            if action.what == "stop":
                self._interrupts.press()
            elif action.what in REPORTS:
                with self._beside(f"Looking for {action.what}"):
                    self._view.show_report(self.report(action.what))
            elif not self._engine.stopping:
                self._breaks.add(action.ranks)

    def _break_in(self, run: Run) -> None:
        now = self._clock()
        for rank in self._breaks.take_ready(run, now):
            self._engine.break_into(rank)
        if late := self._breaks.take_late(now):
            self._view.notify(late_text(views.snapshot(run, now), late))

    def _compare(self) -> None:
        """Go on with a comparison over the ranks that have stopped; one that fails is over."""
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        for rank, question in comparison.unsent():
            self._engine.send(rank, question)
        if comparison.text is None:
            self._comparison = comparison
        else:
            self._view.notify(comparison.text)

    def _due_prompt(self, run: Run) -> InputRequest | None:
        if (
            self._comparison is not None
            or not self._view.present
            or self._engine.stopping
            or self._policy.examined(self._failed)
        ):
            return None
        return self._prompts.due(run, self._clock())

    def _ask(self, run: Run, request: InputRequest) -> Run:
        notice, prompt = self._prompts.question(request, run)
        self._view.notify(notice)
        with self._interrupts.as_exception():
            reply = self._view.ask(prompt, request.password)
        if reply is None:
            return run
        if reply.kind == "interrupt":
            self._interrupts.press()
            # Before the rank that asked gets the reply, and raises KeyboardInterrupt by itself.
            run = self._stop_if_due(run)
        stopped = self._prompts.stopped(run)
        if request.rank in stopped and (given := asked_for(reply)) is not None:
            try:
                self._comparison = StoppedComparison(given, stopped, len(run.ranks))
            except UsageError as refusal:
                self._view.notify(f"*** {refusal}")
            return run
        now = self._clock()
        replies, text = self._prompts.answers(request, reply, views.snapshot(run, now))
        self._view.notify(text)
        for rank, answer in replies.items():
            self._engine.send(rank, answer)
            run = answered(run, rank, now)
        return run

    # ------------------------------------------------------------ standing still

    def _watch_standstill(self, run: Run) -> Run:
        now, at_rest = self._clock(), self._engine.stopping or self.asking
        run = self._recorded.watched(run, now, at_rest)

        def stalled() -> bool:
            return not at_rest and stall(views.snapshot(run, now)) != ""

        if self._standstill.long(now, stalled):
            self._view.show_report(self._stacks(f", no progress for {stop_policy.LONG:.0f} s", open_=False))
        return run

    # ------------------------------------------------------------ the end

    @property
    def _failed(self) -> list[int]:
        return [failure.rank for failure in self._engine.failures]

    def _stop_if_due(self, run: Run) -> Run:
        """The reason of a stall until then becomes a note of the run."""
        now, stopping = self._clock(), self._engine.stopping
        decision = self._policy.decide(now, self._interrupts.count, self._failed, self.asking, stopping)
        if decision is None:
            return run
        if not stopping:
            self._note_end(run, now)
        self._carry_out(decision, run)
        with self._beside("Looking for a stall"):
            if self._engine.stopping and not stopping and not self._sentences:
                if why := stall(views.snapshot(run, now)):
                    return replace(run, notes=(*run.notes, f"When the ranks were stopped: {why}"))
        return run

    def _note_end(self, run: Run, now: float) -> None:
        with self._beside("Looking for collectives"):
            self._recorded.note_end(run, now)

    def _note_mismatches(self, run: Run) -> Run:
        with self._beside("Looking for collectives"):
            return replace(run, notes=(*run.notes, *self._recorded.mismatches(run)))
        return run

    @property
    def _sentences(self) -> list[str]:
        """What was wrong with collectives at the end."""
        with self._beside("Looking for collectives"):
            return self._recorded.sentences
        return []

    def _stood(self, run: Run, ending: str = "") -> list[str]:
        with self._beside("Looking for stacks"):
            return self._engine.stacks(run.names, ending)
        return []

    def _carry_out(self, decision: Decision, run: Run) -> None:
        _log.debug("the ranks are stopped: %s", decision.reason)
        if decision.stacks_first:
            with self._beside("Looking for stacks"):
                seen = views.snapshot(run, self._clock())
                deep = decision.stacks_first == "deep"
                lines = stacks.text(self._engine.look(deep, stuck(seen) if deep else ()), seen)
                self._stacks_at_end = lines and [*decision.title, *lines]
        self._engine.stop_at(*decision.signals)

    def _conclude(self, run: Run) -> Results[Any]:
        try:
            return self._concluded(run)
        except BaseException as error:
            if self._options.explain is not None:
                self._options.explain(error)
            raise

    def _concluded(self, run: Run) -> Results[Any]:
        engine = self._engine
        until = engine.logs_stay_until and f" (until {engine.logs_stay_until})"
        logs = f"Full logs: {run.log_dir}{until}" if engine.logs_exist else f"The logs in {run.log_dir} were deleted."
        if self._policy.stopped_by_user:
            raise interrupt_error([*self._sentences, *self._stood(run), *self._stacks_at_end])
        if self._policy.timed_out:
            head = f"the timeout of {self._options.timeout:g} s is over."
            raise RunTimeoutError("\n".join([head, *self._sentences, *self._stacks_at_end, logs]))
        if self._refused is not None:
            raise self._refused
        if engine.failures:
            failures, seen = root_cause_first(engine.failures), views.snapshot(run)
            fetched = [
                replace(
                    one,
                    log_path=engine.fetch_log(one.rank, end_only=True),
                    rendered=one.rendered or tracebacks.in_cells(one.traceback, run.names, seen.text),
                )
                for one in failures[:_FETCHED]
            ]
            found = [*fetched, *failures[_FETCHED:]]
            context = [*self._stood(run, "stopped"), logs]
            failed = {failure.rank for failure in found}
            peer_ended = any(rank.ended is not None and rank.rank not in failed for rank in run.ranks)
            raise rank_error(found, len(run.ranks), context, peer_ended, self._sentences)
        results = engine.results()
        times = self._profile.timeline
        # IPython keeps all results, in Out: the names of all cells in each would be megabytes in a long notebook.
        run = replace(run, names={file: run.names[file] for file in times.files & run.names.keys()})
        results.set_timeline(partial(timeline.records, times, views.snapshot(run)))
        return results
