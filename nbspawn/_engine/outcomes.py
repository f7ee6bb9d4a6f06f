"""How the ranks of one run ended: what they said, what their exits say, and which of that are failures."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from nbspawn._engine import failures
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Leaving, Raised, Returned
from nbspawn.errors import Failure


class Outcomes:
    """``error_files`` are torch's: the word of a rank that failed before it had a channel."""

    def __init__(self, processes: Sequence[BaseProcess], error_files: Sequence[str], files: RunFiles) -> None:
        self.said: dict[int, Returned | Raised | Leaving] = {}
        self.failures: list[Failure] = []
        self.interrupted: set[int] = set()
        """Who has been told to raise KeyboardInterrupt."""
        self.stopped: set[int] = set()
        """Who has been sent a signal that ends a process, and had not finished."""
        self._processes = processes
        self._error_files = error_files
        self._files = files

    def note(self, event: Returned | Raised | Leaving) -> None:
        """The rank's own word."""
        self.said[event.rank] = event
        if isinstance(event, Raised) and (
            event.by_quit or (event.name == "KeyboardInterrupt" and event.rank in self.interrupted)
        ):
            return  # as the person wished
        if not isinstance(event, Returned):
            self.failures.append(self._told(event))

    def note_exit(self, rank: int, code: int | None, moment: float, unknown: str = "") -> None:
        """Exit code 0 without the rank's own word that it finished is a failure; so is one that is ``unknown`` for
        that reason."""
        outcome = self.said.get(rank)
        ended_well = isinstance(outcome, Returned) and not code
        known = isinstance(outcome, (Raised, Leaving)) or rank in self.stopped or rank in self.interrupted
        if not ended_well and not known:
            self.failures.append(self._silent(rank, code, moment, unknown))

    def unfinished(self, moment: float) -> list[Failure]:
        """Ranks that did what ``interrupt`` or ``terminate`` asked: no failures, but they have not finished either."""
        return [
            self._told(outcome)
            if isinstance(outcome := self.said.get(rank), (Raised, Leaving))
            else self._silent(rank, process.exitcode or 0, moment)
            for rank, process in enumerate(self._processes)
            if not isinstance(self.said.get(rank), Returned)
        ]

    def _told(self, event: Raised | Leaving) -> Failure:
        return failures.told(event, self._processes[event.rank].pid or 0, self._files)

    def _silent(self, rank: int, code: int | None, moment: float, unknown: str = "") -> Failure:
        pid = self._processes[rank].pid or 0
        return failures.silent(rank, pid, moment, code, self._error_files[rank], self._files, unknown)
