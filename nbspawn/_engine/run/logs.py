"""The ranks' logs: opens them, and follows them while they grow."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Mapping, Sequence

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
_INTERVAL = 0.05  # seconds: how late a printed line, or an exit that no sentinel reports, may be noticed
_LONG_INTERVAL = 0.5  # the same, when a command has run for five seconds: ranks in lock-step feel each poll


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


class LogFollower:
    """The tails of the logs that are open as ``fds``, by rank. All moments are CLOCK_MONOTONIC seconds."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._tails = [LogTail(fd, rank) for rank, fd in enumerate(fds)]
        self._polled_at = 0.0
        self._read_early = False
        self._first = 0

    def next_poll(self, began_at: float) -> float:
        """When the logs are to be polled next, for a command that ``began_at`` then."""
        return self._polled_at + self._interval(began_at)

    def poll_is_due(self, now: float, began_at: float) -> bool:
        """Are the logs to be polled now? Waking up is most of a poll's cost: one that is soon due is made at once."""
        return now >= self._polled_at + max(_INTERVAL, self._interval(began_at) / 2)

    def _interval(self, began_at: float) -> float:
        """Seconds between two polls. What a rank printed before a message is read with that; its peers may have
        printed the same, which is shown once if it is read soon. So are bars that may have ended."""
        if self._read_early:
            return _INTERVAL
        return min(_LONG_INTERVAL, max(_INTERVAL, (self._polled_at - began_at) / 10))

    def poll_begins(self, now: float) -> None:
        """The next poll is due an interval from ``now``."""
        self._polled_at = now
        self._read_early = False

    def ends(self, ranks: Collection[int]) -> dict[int, int]:
        """How many bytes the logs of these ranks hold."""
        return {rank: self._tails[rank].end() for rank in ranks}

    def read(self, ends: Mapping[int, int]) -> list[Printed]:
        """What was printed since the last read, but nothing beyond these offsets, by rank. Where reading takes long,
        the next call begins with the rank that this one does not come to."""
        found: list[Printed] = []
        until = time.monotonic() + LONGEST
        for rank in sorted(ends, key=lambda rank: (rank < self._first, rank)):
            found += self._tails[rank].read(ends[rank], until)
            self._read_early = self._read_early or self._tails[rank].holds
            if time.monotonic() >= until:
                self._first = rank + 1
                break
        else:
            self._first = 0
        return found

    def read_to(self, rank: int, offset: int | None, ends: bool = True) -> tuple[list[Printed], int]:
        """The next piece of what the rank printed before a message which it sent at this offset, or before it ended
        (None), and how many bytes that was: 0 where there is no more. ``ends``: it is the command's last one."""
        printed, size = self._tails[rank].read_to(offset, ends)
        self._read_early = self._read_early or (offset is not None and bool(printed))
        return printed, size

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails:
            tail.close()
