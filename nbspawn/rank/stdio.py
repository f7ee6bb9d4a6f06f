"""The rank's standard streams: fds 1 and 2 into one append-only log, Python's streams flushed line by line on top."""

from __future__ import annotations

import ctypes
import io
import os
import sys
from pathlib import Path
from typing import TextIO

_libc = ctypes.CDLL(None)


def redirect(log: Path) -> None:
    """Send everything that this process and its C libraries print to ``log``, and give it an empty stdin.

    A file, not a pipe: the last words of a rank that dies are on disk, and a notebook that reads slowly can never
    block a rank (PIPE buffers of 64 KiB do).
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)
    # An inherited sys.stdout is ipykernel's OutStream: in a forked child it opens a ZMQ connection for every write.
    for name, stream in (("stdin", os.fdopen(0, "r", closefd=False)), ("stdout", _stream(1)), ("stderr", _stream(2))):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(fd: int) -> TextIO:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw, buffer_size=1 << 13), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def flush() -> None:
    """Flush Python's streams and C's stdio (printf in extensions is fully buffered on a file)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # the person's own replacement, or one that is closed
    _libc.fflush(None)


def log_offset() -> int:
    """How many bytes the log holds, after a flush: where an event belongs among the prints."""
    flush()
    return os.fstat(1).st_size
