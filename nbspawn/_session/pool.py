"""Ranks and the commands that they are given in turn; a one-shot run is a pool that closes after the first."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from nbspawn._engine import inherited, made_for_one, xla
from nbspawn._engine.context import LocalContext
from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._engine.launch import FunctionJob, Job, Options, fill, pack, settle, start
from nbspawn._protocol.messages import UNGROUPED, Parcel, RunCell, RunFunction
from nbspawn._rank import namespace
from nbspawn._render.stacks import Stack
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.background import BehindView, Handle
from nbspawn._session.supervisor import Terms, Watch
from nbspawn._state.run import Run
from nbspawn.errors import StartError, UsageError, root_cause_first

_log = logging.getLogger(__name__)

MAX_RANKS = 512

_LEAVE = 3.0  # seconds to leave in good order: to destroy a process group, to run what atexit has
_KILLED = 5.0  # seconds in which ranks that are killed have ended
_UNCHANGED = Parcel((), None)


class Pool:
    """``nprocs`` ranks, started with the first command. They stay after it if ``options`` say so, for no longer than
    ``idle_timeout`` seconds without another."""

    def __init__(self, nprocs: int, options: Options, terms: Terms, idle_timeout: float | None) -> None:
        if not 1 <= nprocs <= MAX_RANKS:
            raise UsageError(f"{nprocs} ranks make no sense: choose 1 to {MAX_RANKS}")
        if idle_timeout is not None and not idle_timeout > 0:
            raise UsageError(f"an idle timeout of {idle_timeout} seconds makes no sense")
        self.nprocs = nprocs
        self.options = options
        self.terms = terms
        """Of commands that come without."""
        self.since = time.monotonic()
        """When the ranks were started."""
        self.behind: Handle | None = None
        """What runs in the background, or has."""
        self._idle_timeout = idle_timeout
        self._working = threading.Lock()
        self._work = ""
        self._forget()
        _pools.add(self)

    def _forget(self) -> None:
        self._context: LocalContext | None = None
        self._how = ("", "")
        self._notes: tuple[str, ...] = ()
        self._used = False
        self._commands = 0
        self._packed = 0.0
        self._cut = False
        self.regrouped = False
        """Has the group of ``backend`` been made anew since these ranks were started?"""
        self.ended = ""
        """Why there are no ranks any more; '' if there are, or never were any, as far as is known."""
        self._sent: list[set[str]] = []
        self._timer: threading.Timer | None = None

    # ------------------------------------------------------------ what is known

    @property
    def how(self) -> str:
        """How the ranks were started."""
        return self._how[0]

    @property
    def alive(self) -> bool:
        """Do all ranks live?"""
        context = self._context
        if context is None or self._working.locked():
            return context is not None
        context.poll(0.0)
        if len(context.sentinels) < self.nprocs:
            self._end(0.0)
        return self._context is not None

    def states(self) -> list[str]:
        """Of each rank: 'idle', or what it does in the background."""
        if self.behind is None or self.behind.done:
            return ["idle"] * self.nprocs
        return [rank.state for rank in self.behind.run.ranks]

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._living().processes]

    def memory(self) -> list[tuple[int, int]]:
        """The bytes that each rank uses, in memory and on its device (-1: none), as it last told."""
        return [(reading.memory, reading.device_memory) for reading in self._living().gauges()]

    def log_path(self, rank: int) -> str:
        """Where all is that the rank has printed."""
        return os.fspath(self._living().files.log(rank))

    def _living(self) -> LocalContext:
        if self._context is None:
            raise StartError(f"there are no ranks ({self.ended or 'none have been started'})")
        return self._context

    # ------------------------------------------------------------ commands

    def perform(self, job: Job, terms: Terms | None = None, ranks: Sequence[int] | None = None) -> Results:
        """Run a job in these ranks (None: all) and wait for it."""
        self._take(job.title)
        try:
            with InterruptFlag() as interrupted:
                return self._begin(job, terms or self.terms, ranks, interrupted)[1]()
        finally:
            self._give_back()

    def perform_behind(self, job: Job, terms: Terms, ranks: Sequence[int] | None = None) -> Handle:
        """Run a job in these ranks in the background; the view has to be one for that. Returns when it has begun."""
        assert isinstance(terms.view, BehindView)
        self._take(job.title)
        flag = InterruptFlag()
        with ExitStack() as undo:
            undo.callback(self._give_back)
            with InterruptFlag():
                watch, finish = self._begin(job, terms, ranks, flag)
            undo.pop_all()

        def finish_and_rest() -> Results:
            try:
                return finish()
            finally:
                self._give_back()

        self.behind = Handle(watch, terms.view, flag, finish_and_rest)
        return self.behind

    def look(self) -> tuple[Mapping[int, Stack], Run] | None:
        """The stacks of the ranks that run something in the background, and the state of that; None if nothing does."""
        behind = self.behind
        return None if behind is None or behind.done else (self._living().look(deep=True), behind.run)

    def debug(self, ranks: Sequence[int]) -> bool:
        """Stop these ranks in the debugger, and attend; those that are idle stop when they run something: False."""
        if self.behind is not None and not self.behind.done:
            self.behind.debug(ranks)
            return True
        for rank in ranks:
            self._living().break_into(rank)
        return False

    def _take(self, work: str) -> None:
        if not self._idle():
            raise UsageError(
                f"the ranks work on {self._work}: wait for it (%ranks wait), or stop it (%ranks interrupt)"
            )
        self._work = work
        if self._timer is not None:
            self._timer.cancel()

    def _give_back(self) -> None:
        if self._context is not None and not self._context.settled:
            # Whatever has failed: ranks that may still work are not given another command.
            _log.error("the ranks are ended: %s has been given up while they work on it", self._work)
            self._end(0.0, f"{self._work} was given up while they worked on it")
        if self._idle_timeout is not None and self._context is not None:
            self._timer = threading.Timer(self._idle_timeout, self._end_idle, [self._idle_timeout])
            self._timer.daemon = True
            self._timer.start()
        self._work = ""
        self._working.release()

    def _idle(self) -> bool:
        """Hold the ranks back from other work, if they have none; they may just be ending for lack of it."""
        return self._working.acquire(timeout=0.0 if self._work else _LEAVE + _KILLED)

    def _begin(
        self, job: Job, terms: Terms, ranks: Sequence[int] | None, interrupted: InterruptFlag
    ) -> tuple[Watch, Callable[[], Results]]:
        asked = tuple(range(self.nprocs) if ranks is None else ranks)
        if self.ended:
            raise StartError(f"the ranks have ended ({self.ended}); restart() starts them again, without variables")
        if self._context is None and len(asked) < self.nprocs:
            self._begin(FunctionJob(namespace.nothing), Terms(view=views.StreamView()), None, interrupted)[1]()
        started = time.monotonic()
        self._commands += 1
        _log.debug("command %d, %s: begins", self._commands, job.title)
        done = self._start(job, interrupted) if self._context is None else self._command(job, asked, interrupted)
        context = self._living()
        logs = str(context.files.logs)
        how, notes = (("kept ranks", ""), ()) if self._used else (self._how, self._notes)
        run = Run.new(self.nprocs, *how, logs, started, context.cell, job.source, job.names)
        if self.options.keep:
            run = run.of_kept(asked if self._used else None)
        notes += made_for_one.notes(job.variables)
        run = replace(run, mark=terms.mark, packed=self._packed, notes=notes)
        self._used = True
        watch = Watch(terms, context, interrupted)
        with ExitStack() as undo:
            undo.callback(self._end, 0.0)
            watch.open(run)
            undo.pop_all()

        def finish() -> Results:
            try:
                return watch.results(run, self._mend)
            finally:
                done()
                self._cut = self._cut or watch.cut
                if not self.options.keep or len(context.sentinels) < self.nprocs:
                    self._end(0.0)

        return watch, finish

    def _start(self, job: Job, interrupted: InterruptFlag) -> Callable[[], None]:
        options = self.options
        choice, packed = settle(job, options, interrupted)
        if options.accelerator == "xla" and (
            note := xla.note(self.nprocs, {**os.environ, **options.env}, options.backend)
        ):
            self._notes = (note,)
        self._how = (choice.title, choice.why)
        self.since = self._packed = time.monotonic()
        _log.debug("%d ranks start: %s, %s", self.nprocs, choice.title, choice.why)
        self._context = start(job, self.nprocs, choice, packed, options)
        if options.keep:
            self._context.serve()
        self._sent = [set(job.sources) for _ in range(self.nprocs)]
        return _no_more

    def _command(self, job: Job, asked: Sequence[int], interrupted: InterruptFlag) -> Callable[[], None]:
        """Returns what has to be called when the ranks have run it."""
        packed, command = pack(job, interrupted) if job.variables else (None, job.command)
        if packed is None:
            parcel, done = _UNCHANGED, _no_more
        else:
            parcel, done = Parcel([f"/proc/{os.getpid()}/fd/{fd}" for fd in packed.fds], command.job), packed.close
            try:
                if packed.beside:
                    raise StartError(
                        "queues, locks and shared tensors can be given to ranks only when they are started"
                    )
                fill(packed)
            except BaseException:
                packed.close()
                raise
        command = replace(command, job=parcel, turn=self._commands)
        self._packed = time.monotonic()
        self._living().command({rank: self._news(rank, command) for rank in asked})
        return done

    def _news(self, rank: int, command: RunCell | RunFunction) -> RunCell | RunFunction:
        """A notebook may have hundreds of cells: each rank is told of those that it does not know."""
        if isinstance(command, RunFunction):
            return command
        sent = self._sent[rank]
        unknown = command.sources.keys() - sent
        sent |= unknown
        if len(unknown) == len(command.sources):
            return command
        return replace(command, sources={name: command.sources[name] for name in unknown})

    def _mend(self, run: Run) -> Run:
        """After a command that did not end well the process group may be broken: one rank has made calls that others
        have not. If it is ours to make, it is made anew."""
        context = self._living()
        if not self.options.keep:
            return run
        if len(context.sentinels) < self.nprocs:
            told = "The session has ended. `%ranks restart` starts its ranks again, without their variables."
        elif any(rank.stop for rank in run.ranks) or any(
            failure.is_echo or UNGROUPED in failure.what for failure in context.failures
        ):
            try:
                told = "The process group was broken, and is made anew." if context.regroup() else ""
                self.regrouped = self.regrouped or bool(told)
            except OSError as lack:
                told = f"The process group was broken, and cannot be made anew yet: {lack.strerror}."
        else:
            told = ""
        return replace(run, notes=(*run.notes, told)) if told else run

    # ------------------------------------------------------------ ends

    def restart(self) -> None:
        """End the ranks, and start as many anew, in the same way, without any variables."""
        self.close()
        self._forget()
        self.perform(FunctionJob(namespace.nothing), Terms(view=views.StreamView()))

    def close(self, seconds: float = _LEAVE) -> None:
        """End the ranks: what runs in the background by force, those that are idle in good order within so many
        seconds, then by force. Does nothing where there are none."""
        if self.behind is not None:
            self.behind.end(_KILLED)
        if self._idle():
            try:
                self._end(seconds, "they were stopped")
            finally:
                self._working.release()

    def _end_idle(self, seconds: float) -> None:
        if self._working.acquire(blocking=False):
            try:
                self._end(_LEAVE, f"they had nothing to do for {seconds:g} s")
            finally:
                self._working.release()

    def _end(self, seconds: float, why: str = "they have returned") -> None:
        context = self._context
        if context is None:
            return
        # Before the ranks are gone: who finds none has to be told why.
        ended = root_cause_first(context.failures)[:1] if len(context.sentinels) < self.nprocs else ()
        self.ended = "".join(f"rank {failure.rank}: {failure.told}" for failure in ended) or why
        self._context = None
        _log.debug("the ranks are ended: %s", self.ended)
        if self._timer is not None:
            self._timer.cancel()
        with InterruptFlag():
            if seconds and self.options.keep:
                context.dismiss(seconds)
            context.close(keep_logs=self._cut)
            for process in context.processes:
                process.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._working = threading.Lock()
        pool.behind = None
        pool._forget()


inherited.when_forked(_forget_all)


def end_all() -> None:
    """At the kernel's exit."""
    for pool in list(_pools):
        pool.close(0.0)


def _no_more() -> None:
    """There is nothing to do when the ranks have run it."""
