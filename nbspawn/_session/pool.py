"""Ranks and their commands: started with the first command, supervised while one runs, ended with the last.

A one-shot run is a pool that closes after its first command; kept ranks are a pool that does not. A pool runs one
command at a time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from nbspawn._accelerators.accelerator import Load
from nbspawn._carried import program_arguments
from nbspawn._engine.devices import resolve
from nbspawn._engine.jobs import FunctionJob, Job
from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._engine.options import LaunchOptions
from nbspawn._process import traced
from nbspawn._protocol.edits import Reload
from nbspawn._protocol.questions import Question, T
from nbspawn._rank import jobs
from nbspawn._results import Results
from nbspawn._session import comparison, hooks, views
from nbspawn._session.attachment import BackgroundView
from nbspawn._session.background import BackgroundRun
from nbspawn._session.command import Command
from nbspawn._session.comparison import Difference
from nbspawn._session.options import CommandOptions
from nbspawn._session.started import StartedRanks, start_ranks
from nbspawn._session.supervisor import Supervisor
from nbspawn._session.tensor_diff import Tolerance
from nbspawn._state.run import Run
from nbspawn.errors import StartError, UsageError, root_cause_first

_log = logging.getLogger(__name__)

_LEAVE = 3.0  # seconds to exit cleanly: to destroy a process group, to run the atexit handlers
_LEAVE_AT_EXIT = 1.0  # the same when the kernel ends: a front end that restarts it waits for 5 s
_KILLED = 5.0  # seconds within which killed ranks have ended


class Pool:
    """Ranks that are started by the first command, as ``options`` say, and ended after it unless they are kept.

    ``command_options`` are the defaults of commands. Raises UsageError for options that are invalid on this machine.
    """

    def __init__(self, options: LaunchOptions, command_options: CommandOptions | None = None) -> None:
        self.options = resolve(options)
        self.command_options = command_options or CommandOptions()
        self.numbers = itertools.count(1)
        """Numbers for source code that is not a cell of the notebook."""
        self.names: dict[str, str] = {}
        """IPython's names for the cells that the ranks have run, by file name."""
        self.background: BackgroundRun | None = None
        """The last background run, whether or not it has ended."""
        self.ended = ""
        """Why the ranks have ended; '' if they are alive as far as is known, or were never started."""
        self._restarting = False
        self._ranks: StartedRanks | None = None
        self._commands = 0
        self._command: Command | None = None
        self._working = threading.Lock()
        self._work = ""
        self._timer: threading.Timer | None = None
        _pools.add(self)

    # ------------------------------------------------------------ state

    @property
    def nprocs(self) -> int:
        """The number of ranks, started or not."""
        return int(self.options.nprocs)

    @property
    def how(self) -> str:
        """The start method of the ranks; '' before their start."""
        return self._ranks.how[0] if self._ranks is not None else ""

    @property
    def since(self) -> float:
        """When the ranks were started (CLOCK_MONOTONIC seconds)."""
        return self._started().since

    @property
    def regrouped(self) -> bool:
        """Has the process group of ``backend`` been created again since these ranks were started?"""
        return self._ranks is not None and self._ranks.regrouped

    @property
    def alive(self) -> bool:
        """Are all ranks alive?"""
        ranks = self._ranks
        return ranks is not None and (self._working.locked() or ranks.engine.all_alive)

    @property
    def current(self) -> Run | None:
        """The state of the command that runs; None if the ranks are idle."""
        supervisor = self.supervisor
        return None if supervisor is None else supervisor.run

    @property
    def over(self) -> bool:
        """Have the ranks ended, and are not being started again?"""
        return bool(self.ended) and not self._restarting

    def states(self) -> list[str]:
        """The state of each rank: 'idle', or its state in the command that runs."""
        current = self.current
        return ["idle"] * self.nprocs if current is None else [rank.state for rank in current.ranks]

    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return self._started().engine.pids()

    def memory(self) -> list[tuple[int, int, Load]]:
        """The bytes that each rank uses, in memory and on its device (-1: none), and that device's load, as last
        reported; 0 and -1 if it has not reported yet."""
        usage = self._started().engine.usage()
        return [(one.memory, one.device_memory if one.time else -1, one.load) for one in usage]

    def log_path(self, rank: int) -> str:
        """The log with the rank's whole output, or a copy of it if that is on another machine."""
        return self._started().engine.fetch_log(rank)

    def _started(self) -> StartedRanks:
        if self._ranks is None:
            raise StartError(f"there are no ranks ({self.ended or 'none have been started'})")
        return self._ranks

    # ------------------------------------------------------------ commands

    def run(self, job: Job, options: CommandOptions | None = None, ranks: Sequence[int] | None = None) -> Results[Any]:
        """Run a job in these ranks (None: all) and wait for its end."""
        self._acquire(job.title)
        try:
            with traced.suspended(), InterruptFlag() as interrupts:
                return self._finish(self._begin(job, options or self.command_options, ranks, interrupts))
        finally:
            self._release()

    def run_in_background(
        self, job: Job, options: CommandOptions, view: BackgroundView, ranks: Sequence[int] | None = None
    ) -> BackgroundRun:
        """Run a job in the background; returns when it has begun."""
        options = replace(options, view=view.view)
        self._acquire(job.title)
        flag = InterruptFlag()
        with ExitStack() as undo:
            undo.callback(self._release)
            with InterruptFlag():
                command = self._begin(job, options, ranks, flag)
            undo.pop_all()

        def finish_and_release() -> Results[Any]:
            try:
                return self._finish(command, may_fork=False)  # in a thread, of which a fork copies that alone
            finally:
                self._release()

        self.background = BackgroundRun(command.supervisor, view, flag, finish_and_release)
        return self.background

    def perform(
        self, job: Job, ranks: Sequence[int] | None, timeout: float | None, in_background: bool
    ) -> Results[Any] | BackgroundRun:
        """Run a job by ``run`` or ``run_in_background``; ``timeout`` is in seconds, None for the default."""
        options = self.command_options
        if timeout is not None:
            options = replace(options, timeout=timeout)
        if not in_background:
            return self.run(job, options, ranks)
        return self.run_in_background(job, options, hooks.make_background(), ranks)

    def compare(self, ranks: Sequence[int], expression: str, tolerance: Tolerance, name: str = "") -> Difference:
        """Compare the value of an expression over these ranks; ``name`` is as in ``@eval``. Raises RankRaisedError
        where the expression raises, UsageError if the ranks are busy."""
        if self.current is not None:
            raise UsageError(
                f"the ranks are busy: `%ranks debug 0:{name}` stops them, and `diff {expression}` at the prompt "
                f"compares what they have then; or wait (`%ranks wait{name}`)"
            )
        return comparison.of_idle(self.run, self.nprocs, ranks, expression, tolerance)

    def follow_edits(self) -> None:
        """From the next command on, have the ranks load the modules again that were edited on disk."""
        self.options = replace(self.options, autoreload=True)

    def start(self) -> None:
        """Start the ranks, unless they are alive."""
        if self._ranks is None:
            self.run(FunctionJob(jobs.nothing), CommandOptions(view=views.StreamView()))

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the command that runs; None if the ranks are idle."""
        command = self._command
        return None if command is None else command.supervisor

    def ask(self, question: Question[T]) -> dict[int, T]:
        """What the ranks answer, by rank; not all need to have an answer."""
        answers = self._started().engine.ask(question)
        return {rank: answer for rank, answer in sorted(answers.items()) if answer is not None}

    def interrupt(self) -> bool:
        """Stop the command that runs, as Stop does. False if the ranks are idle."""
        command = self._command
        if command is not None:
            command.interrupts.press()
        return command is not None

    def debug(self, ranks: Sequence[int]) -> bool:
        """Stop these ranks in the debugger, and attach. False if they are idle: they stop in their next command."""
        if self.background is not None and not self.background.done():
            self.background.debug(ranks)
            return True
        for rank in ranks:
            self._started().engine.break_into(rank)
        return False

    def _acquire(self, work: str) -> None:
        if not self._acquire_if_idle():
            raise UsageError(
                f"the ranks work on {self._work}: wait for it (%ranks wait), or stop it (%ranks interrupt)"
            )
        self._work = work
        if self._timer is not None:
            self._timer.cancel()

    def _release(self) -> None:
        try:
            if self._ranks is not None and not self._ranks.engine.finished:
                # Whatever has failed: ranks that may still be busy get no other command.
                _log.error("the ranks are ended: %s was abandoned while they work on it", self._work)
                self._end(0.0, f"{self._work} was abandoned while they worked on it")
            if self.options.idle_timeout is not None and self._ranks is not None:
                self._timer = threading.Timer(self.options.idle_timeout, self._end_idle, [self.options.idle_timeout])
                self._timer.daemon = True
                self._timer.start()
        finally:
            self._work = ""
            self._command = None
            self._working.release()

    def _acquire_if_idle(self) -> bool:
        """Acquire the ranks; False if they are busy. Waits if the idle timeout is just ending them."""
        return self._working.acquire(timeout=0.0 if self._work else _LEAVE + _KILLED)

    def _begin(
        self, job: Job, options: CommandOptions, ranks: Sequence[int] | None, interrupts: InterruptFlag
    ) -> Command:
        selected = tuple(range(self.nprocs) if ranks is None else ranks)
        if self.ended:
            raise StartError(f"the ranks have ended ({self.ended}); restart() starts them again, without variables")
        if self._ranks is None and len(selected) < self.nprocs:
            nothing = FunctionJob(jobs.nothing)
            self._finish(self._begin(nothing, CommandOptions(view=views.StreamView()), None, interrupts))
        started = time.monotonic()
        self._commands += 1
        _log.debug("command %d, %s: begins", self._commands, job.title)
        command = replace(
            job.command,
            command_number=self._commands,
            pdb=options.pdb,
            show_locals=options.show_locals,
            argv=program_arguments.read(),
            reload=None if not self.options.keep else Reload() if self.options.autoreload else hooks.autoreload(),
        )
        with ExitStack() as held:
            if self._ranks is None:
                self._ranks = start_ranks(self.options, job, command, interrupts)
            else:
                self._ranks.send(job, command, selected, interrupts, held)
            release = held.pop_all().close
        self.names.update(job.names)
        with ExitStack() as undo:
            undo.callback(release)
            undo.callback(self._end, 0.0)
            self._command = Command(self._ranks, job, selected, options, interrupts, started, release)
            undo.pop_all()
        return self._command

    def _finish(self, command: Command, may_fork: bool = True) -> Results[Any]:
        try:
            return command.finish(self._replace if may_fork else None)
        finally:
            if not self.options.keep:
                self._end(0.0)
            elif not command.ranks.engine.all_alive:
                self._end(0.0, "they were killed: they did not react to Stop")

    def _replace(self, ranks: StartedRanks) -> None:
        before, self._ranks = self._ranks, ranks
        if before is not None:
            before.engine.dispose(keep_logs=False)

    # ------------------------------------------------------------ the end

    def restart(self) -> None:
        """End the ranks, and start the same number again, with the same options, without their variables."""
        self._restarting = True
        try:
            self.close()
            self.ended = ""
        finally:
            self._restarting = False
        self.start()

    def tidy(self) -> None:
        """If a rank has ended while the ranks were idle, end the others."""
        if self._working.acquire(blocking=False):
            try:
                if self._ranks is not None and not self._ranks.engine.all_alive:
                    self._end(0.0)
            finally:
                self._working.release()

    def close(self, seconds: float = _LEAVE) -> None:
        """End the ranks, if there are any: busy ones by SIGKILL; idle ones exit cleanly, or get SIGKILL after
        ``seconds``."""
        if self.background is not None:
            self.background.end(_KILLED)
        acquired = self._acquire_if_idle()
        if not acquired and (command := self._command) is not None:  # another thread waits for its end
            command.interrupts.press(2)
            acquired = self._working.acquire(timeout=_KILLED)
        if acquired:
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

    def _end(self, seconds: float, why: str = "") -> None:
        ranks = self._ranks
        if ranks is None:
            return
        # Set before the ranks: code that finds no ranks reports the reason.
        failures = () if ranks.engine.all_alive else root_cause_first(ranks.engine.failures)
        if exits := [failure for failure in failures if not failure.traceback]:
            why = f"rank {exits[0].rank}: {exits[0].summary}"
        elif failures and not why:  # an error alone ends no kept rank
            why = f"a rank has ended; before that, rank {failures[0].rank}: {failures[0].summary}"
        self.ended = why or "they have returned"
        self._ranks = None
        _log.debug("the ranks are ended: %s", self.ended)
        if self._timer is not None:
            self._timer.cancel()
        with InterruptFlag():
            if seconds and self.options.keep:
                ranks.engine.dismiss(seconds)
            ranks.engine.dispose(keep_logs=ranks.cut)

    def __del__(self) -> None:
        """Nobody holds the ranks any more, and nobody can end them: a cell that makes a ``Session`` was run again."""
        if getattr(self, "_ranks", None) is not None:
            with suppress(RuntimeError):  # the interpreter ends, and has ended the ranks
                traced.thread(self.close, "nbspawn-end").start()

    def forget(self) -> None:
        """In a forked process: forget the ranks, which belong to the kernel."""
        self._working = threading.Lock()
        self.background = self._ranks = self._timer = None
        self.ended = ""


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


descriptors.after_fork_in_child(_forget_all)


def kept() -> list[Pool]:
    """The pools whose kept ranks are alive, oldest first."""
    return sorted((pool for pool in list(_pools) if pool.options.keep and pool.alive), key=lambda pool: pool.since)


def end_all() -> None:
    """At the kernel's exit: idle ranks write their files, and run what they have registered for their end."""
    end = time.monotonic() + _LEAVE_AT_EXIT
    for pool in list(_pools):
        pool.close(max(0.0, end - time.monotonic()))
