"""Ranks as processes of this machine, watched and ended: torch's ProcessContext, driven by a poll that never blocks."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch.multiprocessing import ProcessContext

from nbspawn._engine import forkserver, inherited, signals
from nbspawn._engine.directories import run_directories
from nbspawn._engine.exits import Exits
from nbspawn._engine.guard import guard
from nbspawn._engine.logs import LogTail
from nbspawn._engine.outcomes import Outcomes
from nbspawn._engine.resources import Resources
from nbspawn._engine.stacks import Stacks
from nbspawn._protocol import gauges, shared_memory
from nbspawn._protocol.frames import Stack
from nbspawn._protocol.launch import Launch, RunFiles
from nbspawn._protocol.messages import (
    Close,
    Command,
    Event,
    Exited,
    Imported,
    Leaving,
    Listening,
    Measured,
    Raised,
    Regroup,
    Returned,
    RunCell,
    RunFunction,
    Started,
    Stopping,
)
from nbspawn._protocol.signals import BREAK
from nbspawn.errors import Failure

_log = logging.getLogger(__name__)

_TICK = 0.05  # seconds: how late a printed line, or an exit that no sentinel tells, may be noticed
_TICK_LATER = 0.5  # the same, when a command has run for five seconds: ranks in lock-step feel each look
_MEASURE = 1.0  # seconds between two readings of the gauges
_ENDING_TICK = 0.001  # seconds: how late it may be noticed that a rank has ended of which the sentinel has told
_SILENT = 2.0  # seconds after which a fork server that has not told of a process is taken for stuck
_STUCK = 10.0  # seconds after SIGKILL: what has not ended by then waits in the operating system, and may for ever
_ENDING = 0.1  # seconds after the sentinel has told
_NUDGE = 0.1  # seconds

running: set[LocalRanks] = set()
inherited.when_forked(running.clear)


class LocalRanks(ProcessContext):
    """The ranks of one run. ``pids``, ``processes``, ``sentinels`` and ``error_files`` are torch's.

    Beside torch's contract: every failure is collected and the first in time is raised; the ladder of signals is a
    list of appointments that ``poll`` keeps, so nothing blocks; exit code 0 without the rank's own word that it
    finished is a failure.
    """

    def __init__(
        self, started: ProcessContext, files: RunFiles, resources: Resources, launch: Launch, logs: Sequence[int]
    ) -> None:
        super().__init__(started.processes, started.error_files)  # type: ignore[no-untyped-call]
        self.files = files
        self.nprocs = len(self.processes)
        self.cell = launch.command.filename if isinstance(launch.command, RunCell) else None
        """The running cell's file name, if a cell runs."""
        self._resources = resources
        self._launch = launch  # what lies beside the payload (queues, shared tensors) must live as long as the ranks
        self._hub = resources.hub
        self._hub.heard = self._heard
        self._selector = resources.selector
        self._tails = [LogTail(fd, rank) for rank, fd in enumerate(logs)]
        self._events: list[Event] = []
        self._started: set[int] = set()
        self._busy = set(range(self.nprocs))
        self._to_break: set[int] = set()
        self._outcomes = Outcomes(self.processes, self.error_files, files)
        self._stacks = Stacks(files, self.cell)
        self._announced = bytearray(self.nprocs)
        self._turns = dict.fromkeys(range(self.nprocs), launch.command.turn)
        self._exits = Exits(self.processes)
        self._killed = 0.0
        self._unreached: set[int] = set()
        self._doomed: set[int] = set()
        self._ladder: list[tuple[float, signal.Signals]] = []
        self._groups = 0
        self._store = -1
        self._told: list[str] = []
        self._nudge_at = math.inf
        self._asked_where = False
        self._ending: dict[int, float] = {}
        self._measured: dict[int, float] = {}
        self._measured_at = 0.0
        self._swept_at = 0.0
        self._read_early = False
        self._began_at = time.monotonic()
        self._closed = False
        for sentinel, rank in self.sentinels.items():
            self._selector.register(sentinel, selectors.EVENT_READ, partial(self._sense_exit, rank))
        running.add(self)

    # ------------------------------------------------------------ what is known

    def node(self, rank: int) -> int:
        """All ranks are on this machine."""
        return 0

    @property
    def log_dir(self) -> str:
        """The directory of the ranks' logs."""
        return os.fspath(self.files.logs)

    def log_path(self, rank: int) -> str:
        """The file that holds all that the rank has printed."""
        return os.fspath(self.files.log(rank))

    # ------------------------------------------------------------ watching

    @property
    def failures(self) -> list[Failure]:
        """Of the ranks that failed by themselves, in the order in which that became known."""
        return self._outcomes.failures

    @property
    def over(self) -> bool:
        """Have all ranks ended?"""
        return not self.sentinels

    @property
    def settled(self) -> bool:
        """Have all ranks ended that were given something to run? Kept ranks have when they have told how it ended."""
        return self.over or (self._launch.keep and not self._busy)

    @property
    def complete(self) -> bool:
        """Do all ranks live? What has happened meanwhile is noticed."""
        self.poll(0.0)
        return len(self.sentinels) == self.nprocs

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        """Have these kept ranks, which are idle, run something more. What is known of the last command is forgotten."""
        first = next(iter(commands.values()))
        self.cell = first.filename if isinstance(first, RunCell) else None
        self._outcomes = Outcomes(self.processes, self.error_files, self.files)
        self._stacks = Stacks(self.files, self.cell)
        self._ladder, self._asked_where, self._killed = [], False, 0.0
        self._busy = set(commands)
        self._turns.update({rank: command.turn for rank, command in commands.items()})
        self._began_at = time.monotonic()
        own = {
            rank: replace(command, interrupts=self._announced[rank], debug=rank in self._to_break)
            for rank, command in commands.items()
            if self._announced[rank] or rank in self._to_break
        }
        self._hub.send_all({**commands, **own})
        self._to_break.difference_update(commands)

    def losses(self) -> list[str]:
        """What these ranks have lost of what was there for them, a sentence each; each is told once."""
        found = []
        if not os.path.isdir(self.files.logs):
            found.append(f"Something has deleted {os.fspath(self.files.logs)}, with the logs of these ranks.")
        if self._exits.served and self._exits.unknown:
            found.append(f"Not all exit codes are known: {self._exits.why_unknown()}. The next run has another.")
        news = [loss for loss in found if loss not in self._told]
        self._told += news
        return news

    def regroup(self) -> bool:
        """Have the kept ranks begin anew what they share. True if that is a group of ``--backend``."""
        self._groups += 1
        ours = self._launch.backend is not None
        if ours and self._store < 0:
            self._store = inherited.keep_from_children(shared_memory.anonymous_file())
        for rank in self.sentinels.values():
            self.send(rank, Regroup(self._groups, f"/proc/{os.getpid()}/fd/{self._store}" if ours else ""))
        return ours

    def usage(self) -> list[gauges.Reading]:
        """What each rank uses, as it last reported."""
        return [gauges.read(self._resources.gauges, rank) for rank in range(self.nprocs)]

    def dismiss(self, seconds: float) -> None:
        """Have kept ranks leave in good order, and wait for at most so long."""
        for rank in self.sentinels.values():
            self.send(rank, Close())
        end = time.monotonic() + seconds
        while not self.over and time.monotonic() < end:
            self.poll(_TICK)

    def poll(self, timeout: float) -> list[Event]:
        """What has happened, after at most ``timeout`` seconds. An event waits for what its rank printed before it."""
        if not self.over:
            appointments = [
                self._swept_at + self._tick,
                self._nudge_at,
                *(moment for moment, _ in self._ladder[:1]),
            ]
            now = time.monotonic()
            soon = [rank for rank, since in self._ending.items() if now - since < _ENDING]
            wait = min(timeout, min(appointments) - now, _ENDING_TICK if soon else math.inf)
            for key, _ in self._selector.select(max(0.0, wait)):
                key.data()
            self._climb()
            for rank in soon:
                self._notice_exit(rank)
        # Waking up is most of a sweep's cost: one that is soon due is made at once.
        if not self.over and time.monotonic() >= self._swept_at + max(_TICK, self._tick / 2):
            self._sweep()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Have a ``poll`` that waits return; from any thread, or a signal handler."""
        self._resources.wake()

    @property
    def _tick(self) -> float:
        """Seconds between two sweeps. What a rank printed before a message is read with that; its peers may have
        printed the same, which is shown once if it is read soon."""
        return _TICK if self._read_early else min(_TICK_LATER, max(_TICK, (self._swept_at - self._began_at) / 10))

    def _sweep(self) -> None:
        """Look for what wakes nobody. With many ranks that is most of the work, hence not at every message."""
        self._swept_at = time.monotonic()
        self._read_early = False
        # A child that a rank has left behind may hold its sentinel open, and a fork server that is stopped tells of no
        # end.
        every = not self._exits.served or self._killed > 0.0 or self._swept_at - self._measured_at >= _MEASURE
        for rank in list(self.sentinels.values()):
            if every or rank in self._ending:
                self._notice_exit(rank)
        for rank in self._unreached.intersection(self.sentinels.values()):
            self._kill_late(rank)
        if self._killed and self._swept_at - self._killed >= _STUCK:
            for rank in list(self.sentinels.values()):
                _log.error("rank %d does not end: pid %s", rank, self._exits.pid(rank))
                self._exits.give_up(rank)
                self._notice_exit(rank)
        if self.over:
            return
        # What a log holds now was printed after every display that the rank has sent by now at a smaller offset:
        # so take the logs' ends first, then all messages, then the logs up to those ends.
        ends = {rank: self._tails[rank].end() for rank in self.sentinels.values()}
        self._hub.drain()
        self._events += [printed for rank, end in ends.items() for printed in self._tails[rank].read(end)]
        self._measure()

    def _kill_late(self, rank: int) -> None:
        """One of which the fork server has not told yet that it has started it."""
        pid = self._exits.pid(rank)
        if pid is not None:
            signals.send(pid, signal.SIGKILL)
        elif self._swept_at - self._killed >= _SILENT:
            self._exits.give_up(rank)
            forkserver.server.abandon()
        else:
            return
        self._unreached.remove(rank)

    def _measure(self) -> None:
        """Read the gauges of the ranks that have moved them."""
        if time.monotonic() - self._measured_at < _MEASURE:
            return
        self._measured_at = time.monotonic()
        for rank in self.sentinels.values():
            reading = gauges.read(self._resources.gauges, rank)
            if reading.time != self._measured.get(rank, 0.0):
                self._measured[rank] = reading.time
                self._events.append(Measured(rank, *reading))

    def _heard(self, event: Event, turn: int) -> None:
        """One message from a rank, put behind what that rank had printed by then."""
        if isinstance(event, Imported):
            forkserver.server.learned.learn(event.modules)
            return
        if isinstance(event, Started):
            self._exits.begun(event.rank, event.pid)
            guard.watch(self.files.private, event.pid)
        elif turn != self._turns[event.rank] and not isinstance(event, Listening):
            _log.warning("rank %d: a %s of command %d is not for this one", event.rank, type(event).__name__, turn)
            return
        offset = getattr(event, "offset", None)
        if offset is not None:
            printed = self._tails[event.rank].read_to(offset)
            self._events += printed
            self._read_early = self._read_early or bool(printed)
        self._events.append(event)
        if isinstance(event, Started):
            _log.debug("rank %d has started: pid %d", event.rank, event.pid)
            self._started.add(event.rank)
            if event.rank in self._to_break:
                self._to_break.remove(event.rank)
                self.break_into(event.rank)
        elif isinstance(event, (Returned, Raised, Leaving)):
            _log.debug("rank %d, command %d: %s", event.rank, turn, type(event).__name__)
            if not isinstance(event, Leaving) and event.rank not in self._doomed:
                self._busy.discard(event.rank)
            self._outcomes.note(event)

    def _sense_exit(self, rank: int) -> None:
        """The sentinel tells that the rank has closed its files; it has not ended before its memory is given back, 4 ms
        later. Until then the sentinel would tell it again and again. (Its own code may have closed them, too, and then
        it has not ended.) A fork server writes to it: first the pid, which is read by asking for the exit code, then
        that."""
        process = self.processes[rank]
        if not self._exits.served or process.exitcode is not None or process._popen.server_lost:
            self._ending[rank] = time.monotonic()
            self._selector.unregister(process.sentinel)

    def _notice_exit(self, rank: int) -> None:
        if self._exits.running(rank):
            return
        process = self.processes[rank]
        pid, code = self._exits.pid(rank), self._exits.code(rank)
        process.join()  # at once; else multiprocessing holds its pipes until the next start
        del self.sentinels[process.sentinel]
        self._busy.discard(rank)
        if rank in self._ending:
            del self._ending[rank]
        else:
            self._selector.unregister(process.sentinel)
        self._hub.drain()
        self._events += self._tails[rank].read_to(None)
        if pid is not None:
            signals.kill_group(pid)
        moment = time.monotonic()
        _log.debug("rank %d has ended: %s", rank, "exit code unknown" if code is None else f"exit code {code}")
        self._events.append(Exited(rank, moment, code))
        self._outcomes.note_exit(rank, code, moment, self._exits.why_unknown() if code is None else "")
        if self.over:
            self._release()

    # ------------------------------------------------------------ ending

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt once in every rank that runs."""
        self._signal(signal.SIGINT)

    def terminate(self, grace_period: float = 0.0) -> None:
        """SIGTERM now, SIGKILL after ``grace_period`` seconds; ``poll`` and ``join`` do the rest."""
        self._busy.update(self.sentinels.values())
        self.stop_at(term=0.0, kill=grace_period)

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        """Make the appointments, in seconds from now; they replace earlier ones."""
        now = time.monotonic()
        steps = ((interrupt, signal.SIGINT), (term, signal.SIGTERM), (kill, signal.SIGKILL))
        self._ladder = [(now + delay, number) for delay, number in steps if delay is not None]
        self._climb()

    @property
    def stopping(self) -> bool:
        """Are there appointments, or have signals been sent?"""
        return bool(self._ladder or self._outcomes.stopped)

    def _climb(self) -> None:
        while self._ladder and self._ladder[0][0] <= time.monotonic():
            self._signal(self._ladder.pop(0)[1])
        if self._nudge_at <= time.monotonic():
            self._nudge_at = math.inf
            for rank in self.sentinels.values():
                if (pid := self._exits.pid(rank)) is not None:
                    signals.send_to_main_thread(pid, signal.SIGINT)

    def _signal(self, number: signal.Signals) -> None:
        if not self._asked_where:
            self._asked_where = True
            self._stacks.ask(self._at_work())  # before they are disturbed; it takes about a millisecond
        if number == signal.SIGINT:
            # The stack is asked for just before, and that signal restarts system calls: if the interrupt comes while it
            # is handled, Python hears of it only when recv() returns. One more signal ends the call, and says no more.
            self._nudge_at = time.monotonic() + _NUDGE
        if number == signal.SIGKILL:
            self._killed = self._killed or time.monotonic()
        how = "interrupt" if number == signal.SIGINT else number.name
        for rank in self.sentinels.values():
            if not self._needs(rank, number) or not self._exits.running(rank):
                continue
            pid = self._exits.pid(rank)
            if number == signal.SIGINT:
                self._outcomes.interrupted.add(rank)
                self._announced[rank] = (self._announced[rank] + 1) % 256 or 1
                self._resources.announce(self._announced)
            elif rank not in self._outcomes.said:
                self._outcomes.stopped.add(rank)
            if number != signal.SIGINT:
                # Its last message may be on its way: it is not idle, and is waited for.
                self._doomed.add(rank)
            _log.debug("rank %d gets %s", rank, number.name)
            self._events.append(Stopping(rank, time.monotonic(), how))
            if pid is not None:
                (signals.send_to_main_thread if number == signal.SIGINT else signals.send)(pid, number)
            elif number == signal.SIGKILL:
                self._unreached.add(rank)

    def _needs(self, rank: int, number: signal.Signals) -> bool:
        """Is this signal for this rank? A kept one that is idle stays. Any other that has told of its error leaves at
        once by itself: a signal meanwhile would take the place of its own exit code, which is torch's contract."""
        if self._launch.keep:
            return rank in self._busy
        leaves = isinstance(self._outcomes.said.get(rank), (Raised, Leaving))
        return not leaves or number == signal.SIGKILL

    # ------------------------------------------------------------ where ranks stand

    def stacks(self, ending: str = "") -> list[str]:
        """Where the ranks stood when they were stopped, but for those that failed: a sentence for each group."""
        return self._stacks.sentences([failure.rank for failure in self.failures], ending)

    def look(self, deep: bool) -> dict[int, Stack]:
        """The stacks of the ranks that run, as _engine/stacks.py tells."""
        return self._stacks.look(self._at_work(), deep)

    def break_into(self, rank: int) -> None:
        """Have the rank stop in the debugger, as _rank/debugger.py tells; one that has not begun, at its first line."""
        if rank not in self._started or rank not in self._busy:
            self._to_break.add(rank)
        elif pid := self._at_work().get(rank):
            signals.send_to_main_thread(pid, BREAK)

    def _at_work(self) -> dict[int, int]:
        """The pids of the ranks that have started and not ended."""
        ranks = [rank for rank in self.sentinels.values() if rank in self._started and rank not in self._outcomes.said]
        pids = {rank: self._exits.pid(rank) for rank in ranks if self.processes[rank].exitcode is None}
        return {rank: pid for rank, pid in pids.items() if pid is not None}

    def serve(self) -> None:
        """Let the ranks meet at MASTER_PORT though nobody may ``poll`` for a while."""
        self._resources.rendezvous.serve()

    def send(self, rank: int, command: Command) -> None:
        """Give a rank a command; returns at once."""
        self._hub.send(rank, command)

    # ------------------------------------------------------------ giving back

    def _release(self) -> None:
        """All ranks have ended: give every file and socket back."""
        running.discard(self)
        for tail in self._tails:
            tail.close()
        self._resources.close()
        self._hub.heard = None  # it would keep this object, and with it the processes' descriptors, alive in a cycle

    def close(self, keep_logs: bool = False) -> None:
        """End whatever is left, by force, and give back every file, socket and process. The logs of a run that failed
        stay for a while (_engine/logs.py), others if ``keep_logs``."""
        if not self.over:
            self._busy.update(self.sentinels.values())
            self.stop_at(kill=0.0)
        while not self.over:
            self.poll(_TICK)
        if not self._closed:
            self._closed = True
            if self._store >= 0:
                inherited.close(self._store)
            run_directories.done(self.files, keep=keep_logs or bool(self.failures))

    def dispose(self, keep_logs: bool = False) -> None:
        """Close, and give back what multiprocessing holds for each process: nobody will ask for exit codes."""
        self.close(keep_logs)
        for process in self.processes:
            process.close()
