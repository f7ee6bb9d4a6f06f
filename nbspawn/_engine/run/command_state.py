"""What an engine knows of the command that its ranks run."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from nbspawn._engine.run.outcomes import CommandEnd, Outcomes
from nbspawn._engine.run.signal_schedule import SignalSchedule
from nbspawn._engine.run.stacks import Stacks
from nbspawn._protocol.messages import Leaving, Raised, RunCell, RunFunction


class CommandState:
    """What an engine knows of one command of its ranks, a cell or a function. The next one's replaces it as a whole.

    ``outcomes`` and ``stacks`` are new ones. ``numbers_before`` are the numbers of the commands that ranks had before:
    those that run nothing now may still send messages that belong to them.
    """

    def __init__(
        self,
        commands: Mapping[int, RunCell | RunFunction],
        numbers_before: Mapping[int, int],
        outcomes: Outcomes,
        stacks: Stacks,
    ) -> None:
        self.outcomes = outcomes
        self.stacks = stacks
        self.schedule = SignalSchedule()
        self.numbers = {**numbers_before, **{rank: command.command_number for rank, command in commands.items()}}
        """The number of each rank's last command."""
        self.busy = set(commands)
        """The ranks that have not ended it."""
        self.doomed: set[int] = set()
        """The ranks that were sent SIGTERM or SIGKILL. Their last message may say that they returned; they are not
        idle, and stay busy until their processes have ended."""
        self.asked_where = False
        """Were the ranks asked where they stand, before the first signal disturbed them?"""
        self.killed_at = 0.0
        """When SIGKILL was first sent, 0 if it was not."""
        self.began_at = time.monotonic()

    def note(self, event: CommandEnd) -> None:
        """The rank has reported its end. Of one that is leaving, the process's end is waited for."""
        if not isinstance(event, Leaving) and event.rank not in self.doomed:
            self.busy.discard(event.rank)
        self.outcomes.note(event)

    def wants(self, rank: int, number: signal.Signals, kept: bool) -> bool:
        """Is this signal for this rank? A kept one that is idle stays. Any other that has reported its error leaves at
        once by itself: a signal meanwhile would take the place of its own exit code, which is torch's contract."""
        if kept:
            return rank in self.busy
        leaves = isinstance(self.outcomes.reported.get(rank), (Raised, Leaving))
        return not leaves or number == signal.SIGKILL

    def note_signal(self, rank: int, number: signal.Signals) -> None:
        """The rank is sent a signal."""
        if number == signal.SIGINT:
            self.outcomes.interrupted.add(rank)
            return
        self.doomed.add(rank)
        if rank not in self.outcomes.reported:
            self.outcomes.stopped.add(rank)

    @property
    def stopping(self) -> bool:
        """Have ranks been sent a signal that ends them, or is one planned?"""
        return self.schedule.planned or bool(self.outcomes.stopped)
