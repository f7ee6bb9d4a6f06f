"""The private directory of a run, and the tails of the ranks' logs in it.

One directory a kernel (0700) holds one folder a run. A run that ended well takes its folder along; the last few that
failed, or printed more than the notebook shows, stay for their logs until the kernel ends. A kernel that was killed
could not tidy up: the next one does, knowing by a lock that the owner is dead.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from nbspawn.engine import inherited
from nbspawn.messages import Printed
from nbspawn.rank.launch import RunFiles
from nbspawn.render.lines import LineBuffer

KEPT_RUNS = 5
_PREFIX = "nbspawn-"
_OWNER = "owner"
_CHUNK = 1 << 20


class RunDirectories:
    """Hands out run directories under one root, made when the first is asked for."""

    def __init__(self) -> None:
        self._forget()
        inherited.when_forked(self._forget)
        atexit.register(self.remove_all)

    def _forget(self) -> None:
        self._root: Path | None = None
        self._lock = -1
        self._made = 0
        self._kept: list[Path] = []

    def new(self, log_dir: str | None, nprocs: int) -> RunFiles:
        """A fresh directory; the logs lie in it or in the person's ``log_dir`` (made if need be, old logs emptied)."""
        if self._root is None:
            _sweep()
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = os.open(self._root / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            inherited.keep_from_children(self._lock)
        self._made += 1
        private = self._root / f"run-{self._made}"
        private.mkdir(mode=0o700)
        logs = Path(log_dir).expanduser().absolute() if log_dir else private
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = RunFiles(private, logs)
        for rank in range(nprocs):
            os.close(os.open(files.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        os.mkfifo(files.lifeline, 0o600)
        files.interrupts.write_bytes(bytes(nprocs))
        return files

    def done(self, files: RunFiles, keep: bool) -> None:
        """The run is over: keep its logs for a while, or nothing of it."""
        if keep and files.logs == files.private:
            for name in os.listdir(files.private):
                if not name.endswith(".log"):
                    (files.private / name).unlink(missing_ok=True)
            self._kept.append(files.private)
        else:
            shutil.rmtree(files.private, ignore_errors=True)
        while len(self._kept) > KEPT_RUNS:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        if self._root is not None and not any(self._root.glob("run-*")):
            self.remove_all()

    def remove_all(self) -> None:
        """Remove the root with everything in it."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            inherited.close(self._lock)
            self._root, self._kept = None, []


def _sweep() -> None:
    """Remove what dead kernels of this user left behind."""
    for root in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        try:
            if root.stat().st_uid != os.getuid():
                continue
            fd = os.open(root / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
        except BlockingIOError:
            pass  # its kernel lives
        finally:
            os.close(fd)


directories = RunDirectories()


class LogTail:
    """Follows one rank's log from the start. ``read`` takes at most 1 MiB at a time, so that a flood from one rank
    holds up neither its peers nor the view."""

    def __init__(self, path: Path, rank: int) -> None:
        self._fd = inherited.keep_from_children(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._rank = rank
        self._offset = 0
        self._buffer = LineBuffer()
        self._current = ""

    def end(self) -> int:
        """How many bytes the log holds."""
        return os.fstat(self._fd).st_size

    def read(self, end: int) -> list[Printed]:
        """What was printed since, but nothing beyond the offset ``end``."""
        return self._fold(os.pread(self._fd, min(_CHUNK, max(0, end - self._offset)), self._offset))

    def read_to(self, offset: int | None) -> list[Printed]:
        """Everything up to ``offset`` (None: the end), the unfinished line too: something else comes next."""
        told: list[Printed] = []
        while offset is None or self._offset < offset:
            size = _CHUNK if offset is None else min(_CHUNK, offset - self._offset)
            data = os.pread(self._fd, size, self._offset)
            if not data:
                break
            told += self._fold(data)
        rest = tuple(self._buffer.finish())
        self._current = ""
        return [*told, Printed(self._rank, rest, "")] if rest else told

    def _fold(self, data: bytes) -> list[Printed]:
        if not data:
            return []
        self._offset += len(data)
        lines, current = self._buffer.feed(data)
        if not lines and current == self._current:
            return []
        self._current = current
        return [Printed(self._rank, tuple(lines), current)]

    def close(self) -> None:
        """Close the file."""
        inherited.close(self._fd)
