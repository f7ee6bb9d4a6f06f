"""Ranks and their commands, one at a time: started with the first, watched while one runs, ended with the last.

A one-shot run is a pool that closes after its first command; kept ranks are one that does not.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from nbspawn._engine import inherited, made_for_one, xla
from nbspawn._engine.base import Engine
from nbspawn._engine.devices import resolve
from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._engine.jobs import FunctionJob, Job, fill, pack
from nbspawn._engine.launch import resolve_start, start
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.frames import Stack
from nbspawn._protocol.messages import UNGROUPED, RunCell, RunFunction
from nbspawn._protocol.payload import Shared
from nbspawn._rank import namespace
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.background import BackgroundRun, BackgroundView, stream_view
from nbspawn._session.options import CommandOptions
from nbspawn._session.supervisor import Supervisor
from nbspawn._state.run import Run
from nbspawn.errors import StartError, UsageError, root_cause_first

_log = logging.getLogger(__name__)

_LEAVE = 3.0  # seconds to leave in good order: to destroy a process group, to run what atexit has
_KILLED = 5.0  # seconds in which ranks that are killed have ended


@dataclass
class _Ranks:
    """What is known of the ranks since they were started; replaced whole when others are."""

    engine: Engine
    how: tuple[str, str] = ("", "")
    """The start method and why it was taken."""
    notes: tuple[str, ...] = ()
    since: float = field(default_factory=time.monotonic)
    packed: float = 0.0
    """When all was there that the ranks need for the current command."""
    known: list[set[str]] = field(default_factory=list)
    """By rank: the files of the notebook's cells of which it has been told."""
    used: bool = False
    """Have they been given a command?"""
    cut: bool = False
    """Did the notebook get less than their whole output?"""
    regrouped: bool = False
    """Has the group of ``backend`` been made anew?"""


class Pool:
    """Ranks, started as ``options`` say with the first command, and ended after it unless they are to be kept.

    ``command_options`` are those of commands that come without. Raises UsageError for options that cannot be here.
    """

    def __init__(self, options: LaunchOptions, command_options: CommandOptions | None = None) -> None:
        self.options = resolve(options)
        self.command_options = command_options or CommandOptions()
        self.numbers = itertools.count(1)
        """Of source code that is no cell of the notebook's."""
        self.background: BackgroundRun | None = None
        """What runs in the background, or has."""
        self.ended = ""
        """Why there are no ranks any more; '' if there are, or never were any, as far as is known."""
        self._ranks: _Ranks | None = None
        self._commands = 0
        self._working = threading.Lock()
        self._work = ""
        self._timer: threading.Timer | None = None
        _pools.add(self)

    # ------------------------------------------------------------ what is known

    @property
    def nprocs(self) -> int:
        """How many ranks there are, or will be."""
        return int(self.options.nprocs)

    @property
    def how(self) -> str:
        """How the ranks were started."""
        return self._ranks.how[0] if self._ranks is not None else ""

    @property
    def since(self) -> float:
        """When the ranks were started (CLOCK_MONOTONIC seconds)."""
        return self._living().since

    @property
    def regrouped(self) -> bool:
        """Has the group of ``backend`` been made anew since these ranks were started?"""
        return self._ranks is not None and self._ranks.regrouped

    @property
    def alive(self) -> bool:
        """Do all ranks live? Changes nothing."""
        ranks = self._ranks
        return ranks is not None and (self._working.locked() or ranks.engine.complete)

    def states(self) -> list[str]:
        """Of each rank: 'idle', or what it does in the background."""
        if self.background is None or self.background.done():
            return ["idle"] * self.nprocs
        return [rank.state for rank in self.background.run.ranks]

    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return self._living().engine.pids()

    def memory(self) -> list[tuple[int, int]]:
        """The bytes that each rank uses, in memory and on its device (-1: none), as it last reported."""
        return [(reading.memory, reading.device_memory) for reading in self._living().engine.usage()]

    def log_path(self, rank: int) -> str:
        """The file that holds all that the rank has printed."""
        return self._living().engine.log_path(rank)

    def _living(self) -> _Ranks:
        if self._ranks is None:
            raise StartError(f"there are no ranks ({self.ended or 'none have been started'})")
        return self._ranks

    # ------------------------------------------------------------ commands

    def run(self, job: Job, options: CommandOptions | None = None, ranks: Sequence[int] | None = None) -> Results[Any]:
        """Run a job in these ranks (None: all) and wait for it."""
        self._take(job.title)
        try:
            with InterruptFlag() as interrupts:
                return self._begin(job, options or self.command_options, ranks, interrupts).finish()
        finally:
            self._give_back()

    def run_in_background(
        self, job: Job, options: CommandOptions, view: BackgroundView, ranks: Sequence[int] | None = None
    ) -> BackgroundRun:
        """The same in the background. Returns when it has begun."""
        options = replace(options, view=view.view)
        self._take(job.title)
        flag = InterruptFlag()
        with ExitStack() as undo:
            undo.callback(self._give_back)
            with InterruptFlag():
                command = self._begin(job, options, ranks, flag)
            undo.pop_all()

        def finish_and_rest() -> Results[Any]:
            try:
                return command.finish()
            finally:
                self._give_back()

        self.background = BackgroundRun(command.supervisor, view, flag, finish_and_rest)
        return self.background

    def perform(
        self, job: Job, ranks: Sequence[int] | None, timeout: float | None, in_background: bool
    ) -> Results[Any] | BackgroundRun:
        """Run a job as ``run`` or ``run_in_background`` do, within ``timeout`` seconds if that is given."""
        options = self.command_options
        if timeout is not None:
            options = replace(options, timeout=timeout)
        if not in_background:
            return self.run(job, options, ranks)
        return self.run_in_background(job, options, (views.make_background or stream_view)(), ranks)

    def start(self) -> None:
        """Start the ranks, unless they live."""
        if self._ranks is None:
            self.run(FunctionJob(namespace.nothing), CommandOptions(view=views.StreamView()))

    def look(self) -> tuple[Mapping[int, Stack], Run] | None:
        """The stacks of the ranks that run something in the background, and the state of that; None if nothing does."""
        running = self.background
        if running is None or running.done():
            return None
        return self._living().engine.look(deep=True), running.run

    def debug(self, ranks: Sequence[int]) -> bool:
        """Stop these ranks in the debugger, and attach; those that are idle stop when they run something: False."""
        if self.background is not None and not self.background.done():
            self.background.debug(ranks)
            return True
        for rank in ranks:
            self._living().engine.break_into(rank)
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
        if self._ranks is not None and not self._ranks.engine.settled:
            # Whatever has failed: ranks that may still work are not given another command.
            _log.error("the ranks are ended: %s has been given up while they work on it", self._work)
            self._end(0.0, f"{self._work} was given up while they worked on it")
        if self.options.idle_timeout is not None and self._ranks is not None:
            self._timer = threading.Timer(self.options.idle_timeout, self._end_idle, [self.options.idle_timeout])
            self._timer.daemon = True
            self._timer.start()
        self._work = ""
        self._working.release()

    def _idle(self) -> bool:
        """Hold the ranks back from other work, if they have none; they may just be ending for lack of it."""
        return self._working.acquire(timeout=0.0 if self._work else _LEAVE + _KILLED)

    def _begin(
        self, job: Job, options: CommandOptions, ranks: Sequence[int] | None, interrupts: InterruptFlag
    ) -> _Command:
        asked = tuple(range(self.nprocs) if ranks is None else ranks)
        if self.ended:
            raise StartError(f"the ranks have ended ({self.ended}); restart() starts them again, without variables")
        if self._ranks is None and len(asked) < self.nprocs:
            nothing = FunctionJob(namespace.nothing)
            self._begin(nothing, CommandOptions(view=views.StreamView()), None, interrupts).finish()
        started = time.monotonic()
        self._commands += 1
        _log.debug("command %d, %s: begins", self._commands, job.title)
        command = replace(job.command, turn=self._commands, pdb=options.pdb, show_locals=options.show_locals)
        if self._ranks is None:
            self._start(job, command, interrupts)
            release: Callable[[], None] = _no_more
        else:
            release = self._send(job, command, asked, interrupts)
        living = self._living()
        how, notes = (("kept ranks", ""), ()) if living.used else (living.how, living.notes)
        engine = living.engine
        run = Run.new(self.nprocs, *how, engine.log_dir, started, engine.cell, job.source, job.names)
        if self.options.keep:
            run = run.of_kept(asked if living.used else None)
        notes += made_for_one.notes(job.variables)
        run = replace(run, banner=options.banner, packed=living.packed, notes=notes)
        living.used = True
        supervisor = Supervisor(options, engine, interrupts)
        with ExitStack() as undo:
            undo.callback(self._end, 0.0)
            supervisor.open(run)
            undo.pop_all()
        return _Command(self, living, supervisor, run, release)

    def _start(self, job: Job, command: RunCell | RunFunction, interrupts: InterruptFlag) -> None:
        options = self.options
        how = resolve_start(job, options, interrupts)
        notes: tuple[str, ...] = ()
        if options.accelerator == "xla":
            notes = tuple(filter(None, [xla.note(self.nprocs, {**os.environ, **options.env}, options.backend)]))
        since = time.monotonic()
        _log.debug("%d ranks start: %s, %s", self.nprocs, how.title, how.why)
        engine = start(job, command, how, options)
        if options.keep:
            engine.serve()
        known = [set(job.sources) for _ in range(self.nprocs)]
        self._ranks = _Ranks(engine, (how.title, how.why), notes, since, packed=since, known=known)

    def _send(
        self, job: Job, command: RunCell | RunFunction, asked: Sequence[int], interrupts: InterruptFlag
    ) -> Callable[[], None]:
        """Returns what has to be called when the ranks have run it."""
        ranks = self._living()
        release: Callable[[], None] = _no_more
        if job.variables:
            packed = pack(job, interrupts)
            release = packed.close
            try:
                if packed.beside:
                    raise StartError(
                        "queues, locks and shared tensors can be given to ranks only when they are started"
                    )
                fill(packed)
            except BaseException:
                packed.close()
                raise
            paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in packed.fds]
            command = replace(command, payload=Shared(paths, packed.sizes))
        ranks.packed = time.monotonic()
        ranks.engine.run({rank: self._unknown(rank, command) for rank in asked})
        return release

    def _unknown(self, rank: int, command: RunCell | RunFunction) -> RunCell | RunFunction:
        """A notebook may have hundreds of cells: each rank is told of those that it does not know."""
        if isinstance(command, RunFunction):
            return command
        known = self._living().known[rank]
        unknown = command.sources.keys() - known
        known |= unknown
        if len(unknown) == len(command.sources):
            return command
        return replace(command, sources={name: command.sources[name] for name in unknown})

    def _mend(self, run: Run) -> Run:
        """After a command that did not end well the process group may be broken: one rank has made calls that others
        have not. If it is ours to make, it is made anew."""
        ranks = self._living()
        engine = ranks.engine
        if not self.options.keep:
            return run
        if not engine.complete:
            note = "The session has ended. `%ranks restart` starts its ranks again, without their variables."
        elif any(rank.stop for rank in run.ranks) or any(
            failure.is_echo or UNGROUPED in failure.what for failure in engine.failures
        ):
            try:
                note = "The process group was broken, and is made anew." if engine.regroup() else ""
                ranks.regrouped = ranks.regrouped or bool(note)
            except OSError as lack:
                note = f"The process group was broken, and cannot be made anew yet: {lack.strerror}."
        else:
            note = ""
        return replace(run, notes=(*run.notes, note)) if note else run

    # ------------------------------------------------------------ ends

    def restart(self) -> None:
        """End the ranks, and start as many anew, in the same way, without any variables."""
        self.close()
        self.ended = ""
        self.start()

    def tidy(self) -> None:
        """If a rank has ended while the ranks were idle, end the others."""
        if self._working.acquire(blocking=False):
            try:
                if self._ranks is not None and not self._ranks.engine.complete:
                    self._end(0.0)
            finally:
                self._working.release()

    def close(self, seconds: float = _LEAVE) -> None:
        """End the ranks: what runs in the background by force, those that are idle in good order within so many
        seconds, then by force. Does nothing where there are none."""
        if self.background is not None:
            self.background.end(_KILLED)
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
        ranks = self._ranks
        if ranks is None:
            return
        # Before the ranks are gone: who finds none has to be told why.
        ended = () if ranks.engine.complete else root_cause_first(ranks.engine.failures)[:1]
        self.ended = "".join(f"rank {failure.rank}: {failure.summary}" for failure in ended) or why
        self._ranks = None
        _log.debug("the ranks are ended: %s", self.ended)
        if self._timer is not None:
            self._timer.cancel()
        with InterruptFlag():
            if seconds and self.options.keep:
                ranks.engine.dismiss(seconds)
            ranks.engine.dispose(keep_logs=ranks.cut)

    def forget(self) -> None:
        """In a process that was forked: the ranks are the kernel's."""
        self._working = threading.Lock()
        self.background = self._ranks = self._timer = None
        self.ended = ""


class _Command:
    """One that runs."""

    def __init__(
        self, pool: Pool, ranks: _Ranks, supervisor: Supervisor, run: Run, release: Callable[[], None]
    ) -> None:
        self.supervisor = supervisor
        self._pool = pool
        self._ranks = ranks
        self._run = run
        self._release = release

    def finish(self) -> Results[Any]:
        """See it to its end."""
        try:
            return self.supervisor.results(self._run, self._pool._mend)
        finally:
            self._release()
            self._ranks.cut = self._ranks.cut or self.supervisor.cut
            if not self._pool.options.keep or not self._ranks.engine.complete:
                self._pool._end(0.0)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


inherited.when_forked(_forget_all)


def end_all() -> None:
    """At the kernel's exit."""
    for pool in list(_pools):
        pool.close(0.0)


def _no_more() -> None:
    """There is nothing to do when the ranks have run it."""
