"""The rank's standard streams: fds 1 and 2 into one append-only log, Python's streams flushed line by line on top."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from nbspawn._process import streams
from nbspawn._protocol.log_file import open_log
from nbspawn._rank.program import process

_UP = "\x1b[A"
_ROOM = "\x1b[2K\x1b[J\x1b[G"  # erase the row, erase all below, go to the row's start
_MOVES = re.compile(r"(\n|\x1b\[A)")
_DEPTH = 32  # rows: more bars than anybody nests

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_libc = ctypes.CDLL(None, use_errno=True)

_c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout") if sys.platform == "linux" else None

_log = 1
"""The log, for us to look at: the user's code may close or replace descriptor 1."""


def redirect(log: Path) -> None:
    """Send everything that this process and its C libraries print to ``log``, and give it an empty stdin.

    A file, not a pipe: the last words of a rank that dies are on disk, and a notebook that reads slowly can never
    block a rank (PIPE buffers of 64 KiB do).
    """
    global _log
    fd = open_log(log)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    _log = process.move_to_high_fd(fd)
    os.close(null)
    # An inherited sys.stdout is ipykernel's OutStream: in a forked child it opens a ZMQ connection for every write.
    # And no subclass of Python's own text stream: each line would take half as long again.
    stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    for name, stream in (("stdin", os.fdopen(0, "r", closefd=False)), ("stdout", stdout), ("stderr", _Stderr(stdout))):
        streams.replace(name, stream)


class _Stderr(io.TextIOWrapper):
    """Keeps progress bars below what is printed on stdout meanwhile. In a notebook these are two streams; on one
    terminal, or in one log, a print would be appended to the bar's line.

    ``stdout`` has a ``write`` of its own only while a bar stands: otherwise printing costs nothing more.
    """

    def __init__(self, stdout: io.TextIOWrapper) -> None:
        super().__init__(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        self._stdout = stdout
        self._rows = [""]  # each from its last \r on; "" for a row without one
        self._row = 0  # where the cursor is: nested bars are drawn below it, and it comes back
        self._given_way = False  # stdout is in the middle of a line, in the place of the bar
        self._redirected = False

    def write(self, text: str) -> int:
        # While rich draws, it prints above its bars what is written to sys.stderr. A logging handler (Lightning's)
        # holds this stream from before: what it writes would be appended to a bar's line.
        proxy: Any = sys.stderr
        if getattr(proxy, "rich_proxied_file", None) is self and not self._redirected:
            self._redirected = True
            try:
                return proxy.write(text)  # type: ignore[no-any-return]
            finally:
                self._redirected = False
        if self._rows[self._row].strip() and _is_line(text):
            self._print(text)  # a warning beside a bar: it would be appended to the bar's line
            return len(text)
        written = super().write(text)
        for part in _MOVES.split(text):
            if part == "\n":
                self._row += 1
                self._rows += [""] if self._row == len(self._rows) else []
                if self._row == _DEPTH:
                    self._row -= 1
                    del self._rows[0]
            elif part == _UP:
                self._row = max(0, self._row - 1)
            else:
                _, returned, last = (self._rows[self._row] + part).rpartition("\r")
                self._rows[self._row] = returned and returned + last
        if self._rows[self._row].strip():
            self._stdout.write = self._print  # type: ignore[method-assign]
        else:
            vars(self._stdout).pop("write", None)
            self._given_way = False
        return written

    def _print(self, text: str) -> int:
        """``stdout.write``, above the bars."""
        room = "" if self._given_way else _ROOM
        self._given_way = not text.endswith("\n")
        below = self._rows[self._row :]
        bars = "" if self._given_way else "\n".join(below) + _UP * (len(below) - 1)
        io.TextIOWrapper.write(self._stdout, room + text + bars)
        return len(text)


def _is_line(text: str) -> bool:
    """Is this a whole line, and not the part of a bar?"""
    return text[-1:] == "\n" and not text[0].isspace() and "\r" not in text and "\x1b" not in text


def flush() -> OSError | None:
    """Flush Python's streams and C's stdio (printf in extensions is fully buffered on a file). Returns why what was
    printed could not be written, if it could not."""
    lost: OSError | None = None
    for stream in (getattr(sys, name, None) for name in ("stdout", "stderr", "__stdout__", "__stderr__")):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            lost = lost or error
        except Exception:
            continue  # the user's own replacement, or one that is closed
    ctypes.set_errno(0)
    number = ctypes.get_errno() if _libc.fflush(None) else 0
    if _c_stdout and _libc.ferror(_c_stdout):
        # A write that failed earlier has left this mark, without a reason; it stays until it is cleared. If there is
        # room the user's own code has closed or replaced descriptor 1, and what it lost is its own matter.
        _libc.clearerr(_c_stdout)
        number = number or _full()
    if number:
        lost = lost or OSError(number, os.strerror(number))
    return lost if lost is not None and lost.errno in _NO_ROOM else None


def _full() -> int:
    """ENOSPC or EFBIG if there is no room for the log, else 0."""
    with contextlib.suppress(OSError):
        if os.fstatvfs(_log).f_bavail == 0:
            return errno.ENOSPC
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if resource.RLIM_INFINITY != limit <= os.fstat(_log).st_size:
            return errno.EFBIG
    return 0


def leave() -> None:
    """Nothing that the user has put in the place of the streams, or done to descriptors, spoils the process's end:
    multiprocessing flushes them once more."""
    flush()
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, f"__{name}__", None)
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            stream = io.StringIO()
        setattr(sys, name, stream)


def log_offset() -> int:
    """How many bytes the log holds, after a flush: where an event belongs among the prints."""
    flush()
    try:
        return os.fstat(_log).st_size
    except OSError:  # the user's own code has closed it, for example os.closerange: to the end, then
        return sys.maxsize
