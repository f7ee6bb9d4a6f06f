"""Ranks as processes of this machine, watched and ended: torch's ProcessContext, driven by a poll that never blocks."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch.multiprocessing import ProcessContext

from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.directories import run_directories
from nbspawn._engine.kernel.guardian_client import guard
from nbspawn._engine.run import signals, stacks
from nbspawn._engine.run.command_state import CommandState
from nbspawn._engine.run.edits import Edits
from nbspawn._engine.run.event_queue import EventQueue
from nbspawn._engine.run.exits import Exits
from nbspawn._engine.run.gauge_reader import GaugeReader
from nbspawn._engine.run.logs import LogFollower
from nbspawn._engine.run.outcomes import CommandEnd, Outcomes
from nbspawn._engine.run.questions import Questions
from nbspawn._engine.run.rendezvous import Regrouping
from nbspawn._engine.run.resources import Resources
from nbspawn._engine.run.signal_sender import SignalSender
from nbspawn._engine.run.stacks import Stacks
from nbspawn._engine.start import forkserver
from nbspawn._process.imports import own_files
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.frames import Frame, Stack
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.launch import Launch, RunFiles
from nbspawn._protocol.messages import (
    Aborting,
    Close,
    Command,
    Event,
    Exited,
    Imported,
    InputRequest,
    Listening,
    Loaded,
    RunCell,
    RunFunction,
    Started,
)
from nbspawn._protocol.questions import Question, T
from nbspawn._protocol.signals import BREAK

_log = logging.getLogger(__name__)

_TICK = 0.05  # seconds: how long one poll waits while the ranks' end is awaited
_ENDING_TICK = 0.001  # seconds: how late it may be noticed that a rank has ended whose sentinel is readable

running: set[LocalRanks] = set()
descriptors.after_fork_in_child(running.clear)


class LocalRanks(ProcessContext):
    """The ranks of one run. ``pids``, ``processes``, ``sentinels`` and ``error_files`` are torch's.

    Beside torch's contract: every failure is collected and the first in time is raised; signals are sent by ``poll``
    when they are due, so nothing blocks; exit code 0 without the rank's own report that it finished is a failure.
    """

    def __init__(
        self, started: ProcessContext, files: RunFiles, resources: Resources, launch: Launch, logs: Sequence[int]
    ) -> None:
        super().__init__(started.processes, started.error_files)  # type: ignore[no-untyped-call]
        self.files = files
        self._launch = launch  # what lies beside the payload (queues, shared tensors) must live as long as the ranks
        self._resources = resources
        self._exits = Exits(self.processes, self.sentinels, resources.selector)
        self._logs = LogFollower(logs)
        self._gauges = GaugeReader(resources.gauges, self.nprocs)
        self._sender = SignalSender(self._exits, resources, launch.keep)
        self._regrouping = Regrouping(launch.backend is not None)
        self._questions = Questions(files)
        self._edits = Edits(own_files() if launch.keep and launch.method == "fork" else {})
        self._command = self._begun(dict.fromkeys(range(self.nprocs), launch.command), {})
        self._queue = EventQueue(self._logs)
        self._to_break: set[int] = set()
        self._losses: set[str] = set()
        self._closed = False
        resources.hub.on_message = self._received
        running.add(self)

    # ------------------------------------------------------------ what is known

    @property
    def nprocs(self) -> int:
        """How many ranks there are, or were."""
        return len(self.processes)

    notes = ()

    @property
    def cell(self) -> str | None:
        """The running cell's file name, if a cell runs."""
        return self._command.stacks.cell

    def host(self, rank: int) -> str:
        """'' for this machine, on which all ranks are."""
        return ""

    @property
    def log_dir(self) -> str:
        """The directory of the ranks' logs."""
        return os.fspath(self.files.logs)

    @property
    def logs_exist(self) -> bool:
        """Has nothing deleted them?"""
        return os.path.isdir(self.files.logs)

    @property
    def logs_stay_until(self) -> str:
        return "the kernel ends; --log-dir keeps them" if self.files.logs == self.files.private else ""

    def log_path(self, rank: int) -> str:
        """The file that holds all that the rank has printed."""
        return os.fspath(self.files.log(rank))

    def fetch_log(self, rank: int, end_only: bool = False) -> str:
        """The path of the log, which is on this machine."""
        return self.log_path(rank)

    @property
    def failures(self) -> list[Failure]:
        """The failures of the ranks that failed by themselves, in the order in which they became known."""
        return self._command.outcomes.failures

    @property
    def all_exited(self) -> bool:
        """Have all ranks ended, and has ``poll`` told all of it?"""
        return not self.sentinels and not self._queue

    @property
    def finished(self) -> bool:
        """Have all ranks ended what they were given? One-shot ranks end with it, kept ranks report how it ended."""
        return not self._queue and (not self.sentinels or (self._launch.keep and not self._command.busy))

    @property
    def all_alive(self) -> bool:
        """Do all ranks live? What has happened meanwhile is noticed."""
        self.poll(0.0)
        while self._queue:
            self.poll(0.0)
        return len(self.sentinels) == self.nprocs

    def usage(self) -> list[Reading]:
        """What each rank uses, as it last reported."""
        return self._gauges.usage()

    def losses(self) -> list[str]:
        """What these ranks have lost of what was there for them, a sentence each; each is given once."""
        found = []
        if not self.logs_exist:
            found.append(f"Something has deleted {os.fspath(self.files.logs)}, with the logs of these ranks.")
        if self._exits.served and self._exits.unknown:
            found.append(
                f"Not all exit codes are known: {self._exits.why_unknown()}. The next run starts a new fork server."
            )
        new = [loss for loss in found if loss not in self._losses]
        self._losses.update(new)
        return new

    # ------------------------------------------------------------ commands

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        """Have these kept ranks, which are idle, run something more. What is known of the last command is forgotten."""
        commands = self._edits.attach(commands)
        self._command = self._begun(commands, self._command.numbers)
        announced = {rank: self._resources.announced_interrupts(rank) for rank in commands}
        own = {
            rank: replace(command, interrupts=announced[rank], debug=rank in self._to_break)
            for rank, command in commands.items()
            if announced[rank] or rank in self._to_break
        }
        self._resources.hub.send_all({**commands, **own})
        self._to_break.difference_update(commands)

    def _begun(self, commands: Mapping[int, RunCell | RunFunction], numbers_before: Mapping[int, int]) -> CommandState:
        first = next(iter(commands.values()))
        cell = first.filename if isinstance(first, RunCell) else None
        outcomes = Outcomes(self.processes, self.error_files, self.files, cell)
        return CommandState(commands, numbers_before, outcomes, Stacks(self.files, cell))

    def send(self, rank: int, command: Command) -> None:
        """Give a rank a command; returns at once."""
        self._resources.hub.send(rank, command)

    def serve(self) -> None:
        """Let the ranks meet at MASTER_PORT though nobody may ``poll`` for a while."""
        self._resources.rendezvous.serve()

    def regroup(self) -> bool:
        """Have the kept ranks begin anew what they share. True if that is a group of ``--backend``."""
        command = self._regrouping.next()
        for rank in self._exits.living:
            self.send(rank, command)
        return self._regrouping.grouped

    # ------------------------------------------------------------ watching

    def poll(self, timeout: float) -> list[Event]:
        """What has happened, after at most ``timeout`` seconds. An event waits for what its rank printed before it,
        which may take several polls."""
        if self.sentinels:
            about_to_end = self._exits.about_to_end()
            next_due = min(self._logs.next_poll(self._command.began_at), self._command.schedule.next_due)
            at_most = 0.0 if self._queue else timeout
            wait = min(at_most, next_due - time.monotonic(), _ENDING_TICK if about_to_end else math.inf)
            for key, _ in self._resources.selector.select(max(0.0, wait)):
                key.data()
            self._run_due()
            for rank in about_to_end:
                self._notice_exit(rank)
        now = time.monotonic()
        ends: dict[int, int] = {}
        if self.sentinels and self._logs.poll_is_due(now, self._command.began_at):
            ends = self._poll(now)
        events = self._queue.take()
        if not self._queue:
            events += self._logs.read(ends)
        if self.all_exited:
            self._release()
        return events

    def wake(self) -> None:
        """Have a ``poll`` that waits return; from any thread, or a signal handler."""
        self._resources.waker.wake()

    def _poll(self, now: float) -> dict[int, int]:
        """Look for what wakes nobody. With many ranks that is most of the work, hence not at every message. Returns how
        far to read the logs."""
        self._logs.poll_begins(now)
        self._look_for_exits(now)
        # What a log holds now was printed after every display that the rank has sent by now at a smaller offset:
        # so take the logs' ends first, then all messages, then the logs up to those ends.
        ends = self._logs.ends(self._exits.living)
        self._resources.hub.drain()
        if self._gauges.is_due(now):
            self._queue.add(*self._gauges.changes(self._exits.living, now))
            guard.renew_if_lost()
        return ends

    def _look_for_exits(self, now: float) -> None:
        killed_at = self._command.killed_at
        # A child that a rank has left behind may hold its sentinel open, and a fork server that is stopped reports no
        # end.
        every = not self._exits.served or killed_at > 0.0 or self._gauges.is_due(now)
        for rank in self._exits.living:
            if every or self._exits.is_ending(rank):
                self._notice_exit(rank)
        self._sender.kill_late(killed_at, now)
        for rank in self._sender.give_up_stuck(killed_at, now):
            self._notice_exit(rank)

    def _received(self, event: Event, number: int) -> None:
        """Take a rank's message in: queue it behind what that rank had printed by then."""
        if isinstance(event, Imported):
            forkserver.server.learned.learn(event.modules)
            return
        if isinstance(event, Loaded):
            self._edits.loaded(event.files)
            return
        if isinstance(event, Started):
            self._exits.begun(event.rank, event.pid)
        elif number != self._command.numbers[event.rank] and not isinstance(event, Listening):
            _log.warning("rank %d: a %s of command %d is not for this one", event.rank, type(event).__name__, number)
            return
        elif isinstance(event, InputRequest) and self._launch.keep and event.rank not in self._command.busy:
            return  # of a thread that the command has left, and that the rank refuses by itself
        if isinstance(event, CommandEnd):
            self._queue.add(*self._gauges.change(event.rank))
        offset = getattr(event, "offset", None)
        if offset is not None:
            self._queue.add_printed(event.rank, offset, ends=isinstance(event, CommandEnd))
        self._queue.add(event)
        if isinstance(event, Started):
            _log.debug("rank %d has started: pid %d", event.rank, event.pid)
            if event.rank in self._to_break:
                self._to_break.remove(event.rank)
                self.break_into(event.rank)
        elif isinstance(event, CommandEnd):
            _log.debug("rank %d, command %d: %s", event.rank, number, type(event).__name__)
            self._command.note(event)
        elif isinstance(event, Aborting):
            self._command.outcomes.aborting[event.rank] = event

    def _notice_exit(self, rank: int) -> None:
        if self._exits.running(rank):
            return
        pid, code = self._exits.pid(rank), self._exits.code(rank)
        self._exits.remove(rank)
        self._command.busy.discard(rank)
        self._resources.hub.drain()
        self._queue.add_printed(rank)
        self._queue.add(*self._gauges.change(rank))
        if pid is not None:
            signals.kill_group(pid)
        moment = time.monotonic()
        _log.debug("rank %d has ended: %s", rank, "exit code unknown" if code is None else f"exit code {code}")
        why_unknown = self._exits.why_unknown() if code is None else ""
        ending = self._command.outcomes.note_exit(rank, code, moment, why_unknown)
        said = (ending.text, ending.line) if ending is not None and code is not None else ()
        self._queue.add(Exited(rank, moment, code, *said))

    # ------------------------------------------------------------ ending

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        """End the ranks by signals, so many seconds from now each; replaces what was planned before."""
        self._command.schedule.plan(time.monotonic(), interrupt, term, kill)
        self._run_due()

    def _end_all(self, kill: float, term: float | None = None) -> None:
        """Schedule signals as ``stop_at``, also for kept ranks that are idle."""
        self._command.busy.update(self._exits.living)
        self.stop_at(term=term, kill=kill)

    @property
    def stopping(self) -> bool:
        """Have ranks been sent a signal that ends them, or is one planned?"""
        return self._command.stopping

    def _run_due(self) -> None:
        now, schedule = time.monotonic(), self._command.schedule
        for number in schedule.due(now):
            self._signal(number)
        if schedule.again_due(now):
            self._sender.interrupt_again()

    def _signal(self, number: signal.Signals) -> None:
        self._queue.add(*self._sender.send(number, self._command))

    # ------------------------------------------------------------ where ranks stand

    def stacks(self, names: Mapping[str, str], ending: str = "") -> list[str]:
        """Where the ranks stood when they were stopped, but for those that failed: a sentence for each group."""
        return stacks.sentences(self.stood(), self.cell, names, ending)

    def stood(self) -> dict[int, tuple[Frame, ...]]:
        """Where each rank was when it was stopped, as frames."""
        return self._command.stacks.stood([failure.rank for failure in self.failures])

    def look(self, deep: bool, native: Collection[int] = ()) -> dict[int, Stack]:
        """The stacks of the ranks that run, as in _engine/run/stacks.py."""
        return self._command.stacks.look(self._at_work(), deep, native)

    def ask(self, question: Question[T]) -> dict[int, T | None]:
        """What the ranks that live answer, as in _engine/run/questions.py."""
        return self._questions.ask(question, list(filter(self._exits.has_begun, self._exits.living)))

    def break_into(self, rank: int) -> None:
        """Have the rank stop in the debugger (_rank/debug/debugger.py); one that has not begun, at its first line."""
        if not self._exits.has_begun(rank) or rank not in self._command.busy:
            self._to_break.add(rank)
        elif pid := self._at_work().get(rank):
            signals.send_to_main_thread(pid, BREAK)

    def _at_work(self) -> dict[int, int]:
        """The pids of the ranks that run the command."""
        return self._exits.at_work(self._command.outcomes.reported)

    # ------------------------------------------------------------ giving back

    def _release(self) -> None:
        """Give every file and socket back, when all is over."""
        if self not in running:
            return
        running.discard(self)
        self._logs.close()
        self._resources.close()
        # It would keep this object, and with it the processes' descriptors, alive in a cycle.
        self._resources.hub.on_message = None

    def dismiss(self, seconds: float) -> None:
        """Have kept ranks leave in good order, and wait for at most so long."""
        for rank in self._exits.living:
            self.send(rank, Close())
        end = time.monotonic() + seconds
        while not self.all_exited and time.monotonic() < end:
            self.poll(_TICK)

    def close(self, keep_logs: bool = False) -> None:
        """End whatever is left, by force, and give back every file, socket and process. The logs of a run that failed
        stay for a while (_engine/kernel/directories.py), others if ``keep_logs``."""
        if self.sentinels:
            self._end_all(kill=0.0)
        while self.sentinels:
            self.poll(_TICK)
        self._queue.clear()
        self._release()
        if not self._closed:
            self._closed = True
            self._regrouping.close()
            run_directories.done(self.files, keep=keep_logs or bool(self.failures))

    def dispose(self, keep_logs: bool = False) -> None:
        """Close, and give back what multiprocessing holds for each process: nobody will ask for exit codes."""
        self.close(keep_logs)
        for process in self.processes:
            process.close()
