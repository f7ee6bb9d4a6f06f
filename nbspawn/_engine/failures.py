"""From what a rank said, or from how its process ended, to the failure that an error is made of."""

from __future__ import annotations

import os
import pickle

from nbspawn._engine import stacks
from nbspawn._engine.exits import UNKNOWN
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Leaving, Raised
from nbspawn.errors import Failure, exit_text


def told(event: Raised | Leaving, pid: int, files: RunFiles) -> Failure:
    """The rank's own word."""
    log = os.fspath(files.log(event.rank))
    if isinstance(event, Leaving):
        what = exit_text(event.rank, event.code, event.text)
        return Failure(event.rank, pid, event.time, event.code, what, log_path=log)
    message = event.message.strip().partition("\n")[0]
    what = f"{event.name}: {message}" if message else event.name
    return Failure(event.rank, pid, event.time, None, what, event.traceback, event.rendered, event.line, log_path=log)


def silent(
    rank: int, pid: int, moment: float, code: int | None, error_file: str, files: RunFiles, unknown: str = ""
) -> Failure:
    """The rank's process ended with ``code`` (None: that is ``unknown``, for this reason) at ``moment`` without a word
    of why.

    torch's error file speaks for a rank that failed before it had a channel; it lies in the run's private directory,
    so nobody else can have written the pickle in it.
    """
    log = os.fspath(files.log(rank))
    try:
        with open(error_file, "rb") as file:
            text = pickle.load(file)
    except (OSError, EOFError):
        crash = stacks.crash(files.crash(rank)) if code is None or code < 0 else ""
        if code is None:
            what = f"process {rank} has ended without a word, and its exit code is unknown: {unknown}"
            return Failure(rank, pid, moment, UNKNOWN, what, crash=crash, log_path=log)
        return Failure(rank, pid, moment, code, exit_text(rank, code), crash=crash, log_path=log)
    return Failure(rank, pid, moment, None, text.strip().rpartition("\n")[2], text, log_path=log)
