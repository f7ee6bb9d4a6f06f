"""One command, from its start to its results or its error: watches the ranks, and decides who is stopped when."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nbspawn._engine.base import Engine
from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._protocol.messages import DisplayData, Event, InputRequest, Printed, Raised, Stopped
from nbspawn._render import stacks
from nbspawn._render.text import duration
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.options import CommandOptions
from nbspawn._session.prompts import Turns, not_yet
from nbspawn._state.run import Run, answered, reduce
from nbspawn._state.stall import stall
from nbspawn.errors import RunTimeoutError, interrupted, rank_error

_log = logging.getLogger(__name__)

_TICK = 0.5  # seconds: how late a click can be noticed
_COLLECT = 0.25  # seconds: after a failure, for the others to tell of theirs, or of a breakpoint; then interrupted
_KILL_AFTER = 2.0  # seconds between SIGTERM and SIGKILL
_ANSWER = 0.1  # seconds
_LONG_STALL = 30.0  # seconds after it is first said that nothing moves: then it is shown where, while somebody can see
_PROMPT = 1.0  # seconds in which a rank stops for the debugger, unless it is in native code


class Supervisor:
    """The loop."""

    def __init__(self, options: CommandOptions, engine: Engine, interrupts: InterruptFlag) -> None:
        self._options = options
        self._engine = engine
        self._view = options.view if options.view is not None else views.make_default()
        self._interrupts = interrupts
        interrupts.on_press = engine.wake
        self._heeded = 0
        self._stood: list[str] = []
        self._to_break: set[int] = set()
        self._breaking: dict[int, float] = {}
        self._stalled_since: float | None = None
        self._stall_shown = False
        self._looked_for_stall = time.monotonic()
        self._stopped_by_person = False
        self._timed_out = False
        self._deadline = math.inf if options.timeout is None else time.monotonic() + options.timeout
        self._collected = math.inf
        """When the ranks that are left are interrupted, after a failure."""
        self._turns = Turns()
        self._looked_at: set[int] = set()
        self.cut = True
        """Did the notebook get less than the ranks' whole output?"""

    @property
    def asking(self) -> bool:
        """Do ranks wait for answers, or will they at once?"""
        return self._turns.open

    def open(self, run: Run) -> None:
        """Show that it has begun: in the thread of the cell, which is the one where displays find it."""
        self._view.open(run)

    def results(self, run: Run, afterwards: Callable[[Run], Run] = lambda run: run) -> Results[Any]:
        """See the run to its end, then to what has to be done ``afterwards``; the results, or the one error."""
        try:
            try:
                run = self.until_over(run)
            except BaseException:
                # Not one that a rank raised: the view's, or a fault of ours. Nobody would watch them any more.
                _log.exception("the ranks are stopped: what watched them has failed")
                run = self._stop_unwatched(run)
                raise
            finally:
                run = afterwards(run)
                run = replace(run, notes=(*run.notes, *self._engine.losses()))
            if self._options.timings:
                told = " · ".join(f"{name} {duration(seconds)}" for name, seconds in run.phases.items())
                run = replace(run, notes=(*run.notes, f"Time: {told}"))
        finally:
            self.cut = self._view.close(run)
        return self.conclude(run)

    def _stop_unwatched(self, run: Run) -> Run:
        """As Stop does, without a word to the view."""
        grace, presses = self._options.grace_period, self._interrupts.count
        self._engine.stop_at(interrupt=0.0, term=grace, kill=grace + _KILL_AFTER)
        while not self._engine.settled:
            for event in self._engine.poll(_TICK):
                run = reduce(run, event, time.monotonic())
            if self._interrupts.count > presses:
                self._engine.stop_at(kill=0.0)
        return run

    def until_over(self, run: Run) -> Run:
        patience = views.HOLD
        while not self._engine.settled:
            began = time.monotonic()
            left = min(self._deadline, self._collected) - began
            events = self._engine.poll(min(patience, left) if left > 0 else patience)
            run = self._fold(run, events)
            self._view.show(run, events)
            held = any(isinstance(event, (Printed, DisplayData)) for event in events)
            patience = views.HOLD if held or self.asking else _TICK
            self._fulfil(run)
            self._watch_standstill(run)
            run = self._decide(run)
            asking = self._view.present and not (self._engine.stopping or self._seen_enough)
            request = self._turns.due(run, time.monotonic()) if asking else None
            if request is not None:
                run = self._ask(run, request)
            if self.asking or request is not None:
                self._deadline += time.monotonic() - began  # no clock runs while a person thinks
        return run

    def _fold(self, run: Run, events: Sequence[Event]) -> Run:
        now = time.monotonic()
        for event in events:
            run = reduce(run, event, now)
            self._turns.fold(event, now)
            if isinstance(event, Stopped):
                self._breaking.pop(event.rank, None)
            if isinstance(event, Stopped) and event.post_mortem:
                self._looked_at.add(event.rank)
            elif isinstance(event, Raised) and event.by_quit:
                self._interrupts.press()
        return run

    def _ask(self, run: Run, request: InputRequest) -> Run:
        news, prompt = self._turns.question(request, run)
        self._view.say(news)
        with self._interrupts.as_exception():
            reply = self._view.ask(prompt, request.password)
        if reply is None:
            return run
        if reply.kind == "interrupt":
            self._interrupts.press()
            run = self._decide(run)  # before the rank that asked hears of it, and raises KeyboardInterrupt by itself
        now = time.monotonic()
        replies, told = self._turns.answers(request, reply, run, now, views.source)
        self._view.say(told)
        for rank, answer in replies.items():
            self._engine.send(rank, answer)
            run = answered(run, rank, now)
        return run

    def _fulfil(self, run: Run) -> None:
        """What the person has asked for in the view."""
        now = time.monotonic()
        for action in self._view.actions():
            if action.what == "stop":
                self._interrupts.press()
            elif action.what == "stacks":
                self._show_stacks(run, "", fold=False)
            elif not self._engine.stopping:
                self._to_break.update(action.ranks)
        for rank in [rank for rank in self._to_break if run.ranks[rank].state != "debugging"]:
            self._to_break.remove(rank)
            self._engine.break_into(rank)
            self._breaking[rank] = now
        if late := [rank for rank, since in self._breaking.items() if now - since >= _PROMPT]:
            for rank in late:
                del self._breaking[rank]
            self._view.say(not_yet(run, late, views.source))

    def _watch_standstill(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._looked_for_stall < 1.0:
            return
        self._looked_for_stall = now
        if self._engine.stopping or self.asking or not stall(run, now, views.source):
            self._stalled_since, self._stall_shown = None, False
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= _LONG_STALL and not self._stall_shown:
            self._stall_shown = True
            self._show_stacks(run, f", {_LONG_STALL:.0f} s of them in vain", fold=True)

    def _show_stacks(self, run: Run, note: str, fold: bool) -> None:
        found = self._engine.look(deep=True)
        passed = duration(time.monotonic() - run.started)
        self._view.show_stacks(f"Where the ranks stand after {passed}{note}", found, fold)

    def _decide(self, run: Run) -> Run:
        """Who has to be stopped now. What stood still until then is noted, and stays."""
        was_stopping, now = self._engine.stopping, time.monotonic()
        self._stop_who_must(run)
        if self._engine.stopping and not was_stopping and (why := stall(run, now, views.source)):
            return replace(run, notes=(*run.notes, f"When the ranks were stopped: {why}"))
        return run

    def _stop_who_must(self, run: Run) -> None:
        engine, grace, now = self._engine, self._options.grace_period, time.monotonic()
        presses = self._interrupts.count
        if presses > self._heeded:
            again = self._heeded > 0 or engine.stopping
            self._heeded = presses
            self._stopped_by_person = self._stopped_by_person or not engine.failures
            if again or presses > 1:
                stood = self._stacks(run, deep=False)
                self._stood = stood and ["When they were killed:", *stood]
                engine.stop_at(kill=0.0)
            else:
                engine.stop_at(interrupt=0.0, term=grace, kill=grace + _KILL_AFTER)
        elif engine.stopping:
            return
        elif engine.failures and (self._seen_enough or not self.asking):
            # No appointment until then: a rank that comes to its breakpoint meanwhile may be debugged.
            collect = min(_COLLECT, grace)
            self._collected = min(self._collected, now + collect)
            if now >= self._collected:
                engine.stop_at(interrupt=0.0, term=grace - collect, kill=grace - collect + _KILL_AFTER)
        else:
            self._collected = math.inf
            if now >= self._deadline:
                self._timed_out = True
                self._stood = self._stacks(run, deep=True)
                # However short the grace period, ranks get the moment that they need to say where they stand.
                term = max(grace, _ANSWER)
                engine.stop_at(interrupt=0.0, term=term, kill=term + _KILL_AFTER)

    @property
    def _seen_enough(self) -> bool:
        """Has the person left a rank's post-mortem? That ends those of its peers."""
        return any(failure.rank in self._looked_at for failure in self._engine.failures)

    def _stacks(self, run: Run, deep: bool) -> list[str]:
        now = time.monotonic()
        return stacks.text(self._engine.look(deep), run, now, views.source)

    def conclude(self, run: Run) -> Results[Any]:
        """The results, or the one error."""
        try:
            return self._concluded(run)
        except BaseException as error:
            if self._options.explain is not None:
                self._options.explain(error)
            raise

    def _concluded(self, run: Run) -> Results[Any]:
        engine = self._engine
        logs = f"Full logs: {run.log_dir}" if os.path.isdir(run.log_dir) else f"The logs in {run.log_dir} were deleted."
        if self._stopped_by_person:
            raise interrupted([*engine.stacks(), *self._stood])
        if self._timed_out:
            told = f"the timeout of {self._options.timeout:g} s is over."
            raise RunTimeoutError("\n".join([told, *self._stood, logs]))
        if engine.failures:
            raise rank_error(engine.failures, len(run.ranks), [*engine.stacks("stopped"), logs])
        return engine.results()
