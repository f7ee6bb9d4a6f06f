"""Failures of this machine's ranks, made from their endings; and the ending of a rank that reported none."""

from __future__ import annotations

import os
from pathlib import Path

from nbspawn._engine import stacks
from nbspawn._engine.exits import UNKNOWN
from nbspawn._protocol import plain
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.launch import RunFiles
from nbspawn._state.ending import Ending


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
        ending.crash,
        log_path=os.fspath(files.log(ending.rank)),
        lost_peer=ending.lost_peer,
        culprit=ending.culprit,
        missing=ending.missing,
    )


def unreported(
    rank: int, moment: float, code: int | None, error_file: str, files: RunFiles, why_unknown: str = ""
) -> Ending:
    """The rank's process ended with ``code`` (None: that is unknown, and ``why_unknown``) at ``moment``, and the rank
    has not reported why.

    torch's error file, a pickled string, is read for a rank that failed before it had a channel.
    """
    try:
        traceback = plain.loaded(str, Path(error_file).read_bytes())
    except (OSError, plain.NotPlainError):
        crash = stacks.crash(files.crash(rank)) if code is None or code < 0 else ""
        return Ending(rank, moment, code=code, text=why_unknown, crash=crash)
    return Ending(rank, moment, name=traceback.strip().rpartition("\n")[2], traceback=traceback)
