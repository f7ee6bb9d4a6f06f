"""The ranks' logs: opens them, and follows them while they grow."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence

from nbspawn._engine.kernel import descriptors
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.log_file import open_log
from nbspawn._protocol.messages import Printed
from nbspawn._render.lines import LineBuffer
from nbspawn.errors import UsageError

LONGEST = 0.25  # seconds
"""After that what has been read is reported, though there is more: Stop is heard in between."""
_CHUNK = 1 << 18  # bytes; a mebibyte of control characters takes two seconds
_AT_ONCE = 1 << 20  # bytes


def empty_logs(files: RunFiles, nprocs: int) -> list[int]:
    """The ranks' logs, empty, as descriptors: each is locked while it is open, since two runs that write to one file
    would lose lines. Raises OSError if they cannot be written, UsageError if another run writes them."""
    files.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    fds: list[int] = []
    try:
        for rank in range(nprocs):
            fds.append(descriptors.close_after_fork(open_log(files.log(rank))))
            try:
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"other ranks, which live, write their logs to {os.fspath(files.logs)!r}: give these another "
                    "--log-dir (log_dir), or end the others first (%ranks stop)"
                ) from None
            except OSError:
                pass  # a file system without locks
        for fd in fds:
            os.truncate(fd, 0)
    except BaseException:
        for fd in fds:
            descriptors.close(fd)
        raise
    return fds


class LogTail:
    """Follows one rank's log, which is open as ``fd``, from the start. Little is read at a time, so that a flood from
    one rank holds up neither its peers nor the view."""

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._rank = rank
        self._offset = 0
        self._buffer = LineBuffer()
        self._current = ""

    def end(self) -> int:
        """How many bytes the log holds."""
        size = os.fstat(self._fd).st_size
        if size < self._offset:  # something has emptied it, and the rank goes on at the new end
            self._offset = 0
        return size

    def read(self, end: int, until: float) -> list[Printed]:
        """What was printed since, but nothing beyond the offset ``end``; no more is begun after that moment."""
        printed: list[Printed] = []
        end = min(end, self._offset + _AT_ONCE)
        while data := self._read(end):
            printed += self._fold(data)
            if time.monotonic() >= until:
                return printed
        return printed + self._printed(self._buffer.settle())

    @property
    def holds(self) -> bool:
        """Is there a bar that may have ended?"""
        return self._buffer.holds

    def read_to(self, offset: int | None, ends: bool = True) -> tuple[list[Printed], int]:
        """What comes next before ``offset`` (None: the end), and how many bytes that was. Where there is nothing any
        more, the unfinished line, and 0: something else comes next. Unless the command ``ends``, a bar goes on."""
        end = self.end()
        if data := self._read(end if offset is None else offset):
            return self._fold(data), len(data)
        rest = self._buffer.finish() if ends else self._buffer.pause()
        if ends or rest:
            self._current = ""
        return self._printed(rest), 0

    def _read(self, end: int) -> bytes:
        return os.pread(self._fd, min(_CHUNK, max(0, end - self._offset)), self._offset)

    def _fold(self, data: bytes) -> list[Printed]:
        self._offset += len(data)
        lines, current = self._buffer.feed(data)
        if not lines and current == self._current:
            return []
        self._current = current
        return [Printed(self._rank, tuple(lines), current)]

    def _printed(self, lines: Sequence[str]) -> list[Printed]:
        return [Printed(self._rank, tuple(lines), self._current)] if lines else []

    def close(self) -> None:
        """Close the file."""
        descriptors.close(self._fd)
