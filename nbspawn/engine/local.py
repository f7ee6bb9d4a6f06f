"""Ranks as processes of this machine, watched and ended: torch's ProcessContext, driven by a poll that never blocks."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch.multiprocessing import ProcessContext

from nbspawn.engine import forkserver, inherited, signals
from nbspawn.engine.contexts import ServedProcess
from nbspawn.engine.directories import run_directories
from nbspawn.engine.logs import LogTail
from nbspawn.engine.outcomes import Outcomes
from nbspawn.engine.resources import Resources
from nbspawn.engine.stacks import Stacks
from nbspawn.errors import Failure
from nbspawn.messages import (
    Close,
    Command,
    Event,
    Exited,
    Imported,
    Leaving,
    Measured,
    Raised,
    Regroup,
    Returned,
    RunCell,
    RunFunction,
    Started,
    Stopping,
)
from nbspawn.rank import debugger, gauges
from nbspawn.rank.launch import Launch, RunFiles
from nbspawn.render.stacks import Stack

_TICK = 0.05  # seconds: how late a printed line, or an exit that no sentinel tells, may be noticed
_TICK_LATER = 0.5  # the same, when a command has run for five seconds: ranks in lock-step feel each look
_MEASURE = 1.0  # seconds between two readings of the gauges
_ENDING_TICK = 0.001  # seconds: how late it may be noticed that a rank has ended of which the sentinel has told
_NUDGE = 0.1  # seconds

running: set[LocalRanks] = set()
inherited.when_forked(running.clear)


class LocalRanks(ProcessContext):
    """The ranks of one run. ``pids``, ``processes``, ``sentinels`` and ``error_files`` are torch's.

    Beside torch's contract: every failure is collected and the first in time is raised; the ladder of signals is a
    list of appointments that ``poll`` keeps, so nothing blocks; exit code 0 without the rank's own word that it
    finished is a failure.
    """

    def __init__(self, started: ProcessContext, files: RunFiles, resources: Resources, launch: Launch) -> None:
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
        self._tails = [LogTail(files.log(rank), rank) for rank in range(self.nprocs)]
        self._events: list[Event] = []
        self._started: set[int] = set()
        self._busy = set(range(self.nprocs))
        self._to_break: set[int] = set()
        self._outcomes = Outcomes(self.processes, self.error_files, files)
        self._stacks = Stacks(files, self.cell)
        self._announced = bytearray(self.nprocs)
        self._ladder: list[tuple[float, signal.Signals]] = []
        self._groups = 0
        self._nudge_at = math.inf
        self._asked_where = False
        self._ending: set[int] = set()
        self._measured: dict[int, float] = {}
        self._measured_at = 0.0
        self._swept_at = 0.0
        self._read_early = False
        self._began_at = time.monotonic()
        self._served = all(isinstance(process, ServedProcess) for process in self.processes)
        self._closed = False
        for sentinel, rank in self.sentinels.items():
            self._selector.register(sentinel, selectors.EVENT_READ, partial(self._sense_exit, rank))
        running.add(self)

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

    def command(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        """Have these kept ranks, which are idle, run something more. What is known of the last command is forgotten."""
        first = next(iter(commands.values()))
        self.cell = first.filename if isinstance(first, RunCell) else None
        self._outcomes = Outcomes(self.processes, self.error_files, self.files)
        self._stacks = Stacks(self.files, self.cell)
        self._ladder, self._asked_where = [], False
        self._busy = set(commands)
        self._began_at = time.monotonic()
        own = {
            rank: replace(command, interrupts=self._announced[rank], debug=rank in self._to_break)
            for rank, command in commands.items()
            if self._announced[rank] or rank in self._to_break
        }
        self._hub.send_all({**commands, **own})
        self._to_break.difference_update(commands)

    def regroup(self) -> bool:
        """Have the kept ranks begin anew what they share. True if that is a group of ``--backend``."""
        self._groups += 1
        ours = self._launch.backend is not None
        for rank in self.sentinels.values():
            self.send(rank, Regroup(self._groups, f"{self.files.store}-{self._groups}" if ours else ""))
        return ours

    def gauges(self) -> list[gauges.Reading]:
        """What each rank uses, as it last told."""
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
            wait = min(timeout, min(appointments) - time.monotonic(), _ENDING_TICK if self._ending else math.inf)
            for key, _ in self._selector.select(max(0.0, wait)):
                key.data()
            self._climb()
            for rank in list(self._ending):
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
        if not self._served:  # a child that a rank has left behind may hold its sentinel open
            for rank in list(self.sentinels.values()):
                self._notice_exit(rank)
        if self.over:
            return
        # What a log holds now was printed after every display that the rank has sent by now at a smaller offset:
        # so take the logs' ends first, then all messages, then the logs up to those ends.
        ends = {rank: self._tails[rank].end() for rank in self.sentinels.values()}
        self._hub.drain()
        self._events += [printed for rank, end in ends.items() for printed in self._tails[rank].read(end)]
        self._measure()

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

    def _heard(self, event: Event) -> None:
        """One message from a rank, put behind what that rank had printed by then."""
        if isinstance(event, Imported):
            forkserver.server.learned.learn(event.modules)
            return
        offset = getattr(event, "offset", None)
        if offset is not None:
            printed = self._tails[event.rank].read_to(offset)
            self._events += printed
            self._read_early = self._read_early or bool(printed)
        self._events.append(event)
        if isinstance(event, Started):
            self._started.add(event.rank)
            if event.rank in self._to_break:
                self._to_break.remove(event.rank)
                self.break_into(event.rank)
        elif isinstance(event, (Returned, Raised, Leaving)):
            if not isinstance(event, Leaving):
                self._busy.discard(event.rank)
            self._outcomes.note(event)

    def _sense_exit(self, rank: int) -> None:
        """The sentinel tells that the rank has closed its files; it has not ended before its memory is given back, 4 ms
        later. Until then the sentinel would tell it again and again. A fork server writes to it: first the pid, which
        is read by asking for the exit code, then that."""
        if not self._served or self.processes[rank].exitcode is not None:
            self._ending.add(rank)
            self._selector.unregister(self.processes[rank].sentinel)

    def _notice_exit(self, rank: int) -> None:
        process = self.processes[rank]
        if process.exitcode is None:
            return
        process.join()  # at once; else multiprocessing holds its pipes until the next start
        del self.sentinels[process.sentinel]
        self._busy.discard(rank)
        if rank in self._ending:
            self._ending.remove(rank)
        else:
            self._selector.unregister(process.sentinel)
        self._hub.drain()
        self._events += self._tails[rank].read_to(None)
        signals.kill_group(process.pid)
        moment = time.monotonic()
        self._events.append(Exited(rank, moment, process.exitcode))
        self._outcomes.note_exit(rank, process.exitcode, moment)
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
                signals.send_to_main_thread(self.processes[rank].pid, signal.SIGINT)

    def _signal(self, number: signal.Signals) -> None:
        if not self._asked_where:
            self._asked_where = True
            self._stacks.ask(self._at_work())  # before they are disturbed; it takes about a millisecond
        if number == signal.SIGINT:
            # The stack is asked for just before, and that signal restarts system calls: if the interrupt comes while it
            # is handled, Python hears of it only when recv() returns. One more signal ends the call, and says no more.
            self._nudge_at = time.monotonic() + _NUDGE
        how = "interrupt" if number == signal.SIGINT else number.name
        for rank in self.sentinels.values():
            process = self.processes[rank]
            if process.exitcode is not None or not self._needs(rank, number):
                continue
            if number == signal.SIGINT:
                self._outcomes.interrupted.add(rank)
                self._announced[rank] = (self._announced[rank] + 1) % 256 or 1
                with open(self.files.interrupts, "r+b", buffering=0) as file:
                    file.write(self._announced)
            elif rank not in self._outcomes.said:
                self._outcomes.stopped.add(rank)
            self._events.append(Stopping(rank, time.monotonic(), how))
            (signals.send_to_main_thread if number == signal.SIGINT else signals.send)(process.pid, number)

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
        """The stacks of the ranks that run, as engine/stacks.py tells."""
        return self._stacks.look(self._at_work(), deep)

    def break_into(self, rank: int) -> None:
        """Have the rank stop in the debugger, as rank/debugger.py tells; one that has not begun, at its first line."""
        if rank not in self._started or rank not in self._busy:
            self._to_break.add(rank)
        elif pid := self._at_work().get(rank):
            signals.send_to_main_thread(pid, debugger.SIGNAL)

    def _at_work(self) -> dict[int, int]:
        """The pids of the ranks that have started and not ended."""
        ranks = [rank for rank in self.sentinels.values() if rank in self._started and rank not in self._outcomes.said]
        return {rank: self.processes[rank].pid for rank in ranks if self.processes[rank].exitcode is None}

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
        stay for a while (engine/logs.py), others if ``keep_logs``."""
        if not self.over:
            self._busy.update(self.sentinels.values())
            self.stop_at(kill=0.0)
        while not self.over:
            self.poll(_TICK)
        if not self._closed:
            self._closed = True
            run_directories.done(self.files, keep=keep_logs or bool(self.failures))
