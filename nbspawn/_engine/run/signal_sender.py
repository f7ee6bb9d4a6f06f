"""Sends ranks the signals that end them, also those of which the fork server has not reported the process yet."""

from __future__ import annotations

import logging
import signal
import time

from nbspawn._engine.run import signals
from nbspawn._engine.run.command_state import CommandState
from nbspawn._engine.run.exits import Exits
from nbspawn._engine.run.resources import Resources
from nbspawn._engine.start import forkserver
from nbspawn._protocol.messages import Stopping

_log = logging.getLogger(__name__)

_SILENT = 2.0  # seconds after which a fork server that has not reported a process is taken for stuck
_STUCK = 10.0  # seconds after SIGKILL: what has not ended by then waits in the operating system, and may for ever


class SignalSender:
    """Sends signals to the ranks of one run, which are ``kept`` or not."""

    def __init__(self, exits: Exits, resources: Resources, kept: bool) -> None:
        self._exits = exits
        self._resources = resources
        self._kept = kept
        self._unreached: set[int] = set()

    def send(self, number: signal.Signals, command: CommandState) -> list[Stopping]:
        """Send a signal to the ranks that it is for; returns the events of that."""
        now = time.monotonic()
        if not command.asked_where:
            command.asked_where = True
            command.stacks.ask(self._exits.at_work(command.outcomes.reported))  # takes about a millisecond
        if number == signal.SIGINT:
            command.schedule.interrupted(now)
        if number == signal.SIGKILL:
            command.killed_at = command.killed_at or now
        sent = []
        for rank in self._exits.living:
            if command.wants(rank, number, self._kept) and self._exits.running(rank):
                command.note_signal(rank, number)
                how = "interrupt" if number == signal.SIGINT else number.name
                sent.append(Stopping(rank, time.monotonic(), how))
                self._send(rank, number)
        return sent

    def _send(self, rank: int, number: signal.Signals) -> None:
        pid = self._exits.pid(rank)
        if number == signal.SIGINT:
            self._resources.announce_interrupt(rank)
        _log.debug("rank %d gets %s", rank, number.name)
        if pid is not None:
            (signals.send_to_main_thread if number == signal.SIGINT else signals.send)(pid, number)
        elif number == signal.SIGKILL:
            self._unreached.add(rank)
        else:
            forkserver.server.abandon_if_lost()  # it is frozen: its end is that of the ranks which it has not begun

    def interrupt_again(self) -> None:
        """Send SIGINT once more, which is not announced, and so is no interrupt to the ranks."""
        for rank in self._exits.living:
            if (pid := self._exits.pid(rank)) is not None:
                signals.send_to_main_thread(pid, signal.SIGINT)

    def kill_late(self, killed_at: float, now: float) -> None:
        """Kill the ranks that SIGKILL did not reach at ``killed_at``, since their pids were not known then."""
        for rank in self._unreached.intersection(self._exits.living):
            pid = self._exits.pid(rank)
            if pid is not None:
                signals.send(pid, signal.SIGKILL)
            elif now - killed_at >= _SILENT:
                self._exits.give_up(rank)
                forkserver.server.abandon()
            else:
                continue
            self._unreached.remove(rank)

    def give_up_stuck(self, killed_at: float, now: float) -> list[int]:
        """The ranks that SIGKILL, sent at ``killed_at`` (0: it was not), has not ended in a long time; they are taken
        for ended."""
        if not killed_at or now - killed_at < _STUCK:
            return []
        stuck = self._exits.living
        for rank in stuck:
            _log.error("rank %d does not end: pid %s", rank, self._exits.pid(rank))
            self._exits.give_up(rank)
        return stuck
