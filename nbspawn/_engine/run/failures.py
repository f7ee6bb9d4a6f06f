"""Failures of this machine's ranks, made from their endings; and the ending of a rank that reported none."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from nbspawn._engine.run import stacks
from nbspawn._engine.run.exits import UNKNOWN
from nbspawn._protocol import plain
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Aborting
from nbspawn._state.ending import Ending

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


def failure(ending: Ending, pid: int, files: RunFiles) -> Failure:
    """The ending with what only the engine knows: the process and its log."""
    code = UNKNOWN if ending.code is None else ending.code
    return Failure(
        ending.rank,
        pid,
        ending.time,
        None if ending.raised else code,
        ending.what,
        ending.traceback,
        ending.rendered,
        ending.line,
        log_path=os.fspath(files.log(ending.rank)),
        lost_peer=ending.lost_peer,
        culprit=ending.culprit,
        missing=ending.missing,
        message=ending.message,
    )


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
