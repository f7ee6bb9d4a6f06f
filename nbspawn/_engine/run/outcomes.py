"""How the ranks of one command ended: what they reported, what their exits show, and which of that are failures."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from nbspawn._engine.run import stacks
from nbspawn._protocol import plain
from nbspawn._protocol.failure import Ending, Failure
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Aborting, Leaving, Raised, Returned

CommandEnd = Returned | Raised | Leaving
"""What a rank itself sends about the end of its command."""

_LAST_WORDS = re.compile(
    r"""
    ^terminate\ called\ after\ throwing\ an\ instance\ of\ '(?P<name>.+)'
        (?:\n\s*what\(\):\s*(?:\[enforce\ fail\ at\ [^]]*\]\ )?(?P<what>.*))?$
    | ^(?P<other>terminate\ called\ without\ an\ active\ exception
        | (?:free|malloc|realloc|munmap_chunk)\w*\(.*\):\ .+ | double\ free\ or\ corruption.* | corrupted\ .+
        | \*\*\*\ stack\ smashing\ detected.* | .+:\ Assertion\ [`'].+'\ failed\.)$
    | ^(?:\[rank\d+\]:)?\[F\d{4}\ [^]]*\]\ (?P<fatal>.+)$
    """,
    re.MULTILINE | re.VERBOSE,
)
"""What the C++ library, the C library and glog (torch's CHECK) write before they abort."""
_READ = 1 << 16  # bytes from the log's end: torch adds a stack in C++
_TEXT = 300  # characters


class Outcomes:
    """``error_files`` are torch's: they hold the error of a rank that failed before it had a channel. ``cell`` is the
    file name of the cell that the ranks run, if they run one."""

    def __init__(
        self, processes: Sequence[BaseProcess], error_files: Sequence[str], files: RunFiles, cell: str | None
    ) -> None:
        self.reported: dict[int, CommandEnd] = {}
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

    def note(self, event: CommandEnd) -> None:
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
        ending = unreported(rank, moment, code, error_file, self._files, self._cell, why_unknown, aborting)
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
        pid, log = self._processes[ending.rank].pid or 0, os.fspath(self._files.log(ending.rank))
        return Failure(**vars(ending), pid=pid, log_path=log)


def unreported(
    rank: int,
    moment: float,
    code: int | None,
    error_file: str,
    files: RunFiles,
    cell: str | None,
    why_unknown: str = "",
    aborting: Aborting | None = None,
) -> Ending:
    """The rank's process ended with ``code`` (None: that is unknown, and ``why_unknown``) at ``moment``, and the rank
    has not reported why, but for what it may have told when it was ``aborting``. ``cell`` is the file name of the cell
    that it ran, if it ran one.

    torch's error file, a pickled string, is read for a rank that failed before it had a channel.
    """
    try:
        traceback = plain.loaded(str, Path(error_file).read_bytes())
    except (OSError, plain.NotPlainError):
        text = _last_words(files.log(rank)) if code == -signal.SIGABRT else why_unknown
        if aborting is not None:
            return Ending(rank, moment, traceback=aborting.traceback, line=aborting.line, code=code, text=text)
        traceback, line = stacks.crash(files.crash(rank), cell) if code is None or code < 0 else ("", None)
        return Ending(rank, moment, traceback=traceback, line=line, code=code, text=text)
    return Ending(rank, moment, name=traceback.strip().rpartition("\n")[2], traceback=traceback)


def _last_words(log: Path) -> str:
    """What a library wrote in the log before it aborted the process, one line; '' if that is not to be found."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
            text = file.read().decode("utf-8", "replace")
    except OSError:  # deleted, or this process has no descriptor left
        return ""
    every = list(_LAST_WORDS.finditer(text))
    if not every:
        return ""
    found = every[-1]
    words = (
        found["other"] or found["fatal"] or (f"{found['name']}: {found['what']}" if found["what"] else found["name"])
    )
    return words[:_TEXT].strip()
