"""How the ranks of one command ended: what they reported, what their exits show, and which of that are failures."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from nbspawn._engine.run import failures
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Aborting, Leaving, Raised, Returned
from nbspawn._state.ending import Ending

Report = Returned | Raised | Leaving
"""What a rank itself sends about the end of its command."""


class Outcomes:
    """``error_files`` are torch's: they hold the error of a rank that failed before it had a channel. ``cell`` is the
    file name of the cell that the ranks run, if they run one."""

    def __init__(
        self, processes: Sequence[BaseProcess], error_files: Sequence[str], files: RunFiles, cell: str | None
    ) -> None:
        self.reported: dict[int, Report] = {}
        self.aborting: dict[int, Aborting] = {}
        self.failures: list[Failure] = []
        self.interrupted: set[int] = set()
        """The ranks that were asked to raise KeyboardInterrupt."""
        self.stopped: set[int] = set()
        """The ranks that were sent a signal that ends a process, and had not finished."""
        self._silent: dict[int, Ending] = {}
        self._processes = processes
        self._error_files = error_files
        self._files = files
        self._cell = cell

    def note(self, event: Report) -> None:
        """The rank's own report. One that ended as the user asked it to is no failure."""
        self.reported[event.rank] = event
        if isinstance(event, Returned):
            return
        ending = Ending.of(event)
        if not ending.requested(event.rank in self.interrupted):
            self.failures.append(self._failure(ending))

    def note_exit(self, rank: int, code: int | None, moment: float, why_unknown: str = "") -> Ending | None:
        """Exit code 0 without the rank's own report that it finished is a failure; so is an unknown code (None).
        Returns how a rank ended that has not reported it."""
        outcome = self.reported.get(rank)
        if isinstance(outcome, (Raised, Leaving)) or (isinstance(outcome, Returned) and not code):
            return None
        error_file, aborting = self._error_files[rank], self.aborting.get(rank)
        ending = failures.unreported(rank, moment, code, error_file, self._files, self._cell, why_unknown, aborting)
        if rank not in self.stopped and rank not in self.interrupted:
            self.failures.append(self._failure(ending))
        elif outcome is None:
            self._silent[rank] = ending
        return ending

    def unfinished(self) -> list[Failure]:
        """Ranks that did what ``interrupt`` or ``terminate`` asked: no failures, but they have not finished either."""
        reported = {
            rank: Ending.of(outcome)
            for rank, outcome in self.reported.items()
            if isinstance(outcome, (Raised, Leaving))
        }
        return [self._failure(ending) for _, ending in sorted({**reported, **self._silent}.items())]

    def _failure(self, ending: Ending) -> Failure:
        return failures.failure(ending, self._processes[ending.rank].pid or 0, self._files)
