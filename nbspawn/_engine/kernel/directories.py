"""The kernel's private directories (0700). None of them is left behind, however the kernel ends.

The directory of a successful run is removed at its end. Those of the last few runs that failed, or printed more than
the notebook shows, are kept for their logs until the kernel ends. If a kernel was killed, its guardian removes its
directories, or the next kernel does: a lock shows that the owner is dead, and the owner's signature that nbspawn made
the directory. The directories of ranks that are started by a rank are in that rank's run directory, and are removed
with it.

Something else may delete them at any time, such as a cleaner of old temporary files: the next run then makes new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import threading
from pathlib import Path

from nbspawn._engine.kernel import descriptors
from nbspawn._protocol import questions
from nbspawn._protocol.gauges import SLOT
from nbspawn._protocol.launch import MARK, RunFiles

KEPT_RUNS = 5
_PREFIX = "nbspawn-"
_OWNER = "owner"
_LONGEST = (
    60  # bytes of the temp directory's path: with "nbspawn-runs-12345678/run-12345/socket" it fits a socket's name
)


class OwnedDirectory:
    """A temporary directory that is locked for as long as this process lives."""

    def __init__(self, purpose: str) -> None:
        _remove_stale_once()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=_base()))
        try:
            self._lock = _sign(self.path)
        except BaseException:  # disk full; an unsigned directory would never be removed
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        # systemd-tmpfiles spares a directory that is locked itself, whatever its age.
        self._held = descriptors.close_after_fork(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        with contextlib.suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def exists(self) -> bool:
        """Does it still exist?"""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._held))
        return False

    def remove(self) -> None:
        """Remove it with everything in it."""
        if self.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        descriptors.close(self._held)
        descriptors.close(self._lock)


def _sign(path: Path) -> int:
    """Sign the directory; returns the descriptor that locks it."""
    fd = descriptors.close_after_fork(os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, _signature(path))
    except BaseException:
        descriptors.close(fd)
        raise
    return fd


def _signature(path: Path) -> bytes:
    """The text that only the maker of the directory writes into it. A copy has another inode: its signature is not
    valid."""
    return f"made by nbspawn, inode {path.stat().st_ino}\n".encode()


def _base() -> str:
    """Where directories are made: in the run directory if this process is a rank, else in the temp directory, provided
    that the names of sockets in them fit. The system's limit is about 100 bytes."""
    run = os.environ.get(MARK, "").rpartition(":")[2]
    for path in (run, tempfile.gettempdir()):
        if path and len(os.fsencode(path)) <= _LONGEST and os.path.isdir(path):
            return path
    return "/tmp"


@functools.cache
def _remove_stale_once() -> None:
    """Once per kernel: the listing of a temp directory can be long."""
    remove_stale()


def remove_stale() -> None:
    """Remove the directories of this user's dead kernels, and nothing that they have not made."""
    for path in Path(_base()).glob(_PREFIX + "*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            fd = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(fd, 100) == _signature(path):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its kernel is alive, or another process removes it
        finally:
            os.close(fd)


class RunDirectories:
    """Makes the directories of runs, in a root directory that is made with the first one."""

    def __init__(self) -> None:
        self._forget()
        descriptors.after_fork_in_child(self._forget)
        atexit.register(self.remove_all)

    def _forget(self) -> None:
        self._root: OwnedDirectory | None = None
        self._made = 0
        self._kept: list[Path] = []
        self._lock = threading.RLock()  # runs in the background end in threads of their own

    def new(self, log_dir: str | None, nprocs: int) -> RunFiles:
        """A new directory. The logs are in it, or in the user's ``log_dir`` (made if necessary). Raises OSError if
        nothing can be written there."""
        with self._lock:
            if self._root is None or not self._root.exists():
                self.remove_all()
                self._root = OwnedDirectory("runs")
            self._made += 1
            private = self._root.path / f"run-{self._made}"
            private.mkdir(mode=0o700)
        logs = Path(log_dir).expanduser().absolute() if log_dir else private
        files = RunFiles(private, logs)
        try:
            os.mkfifo(files.lifeline, 0o600)
            files.ranks.touch()
            files.interrupts.write_bytes(bytes(nprocs))
            files.gauges.write_bytes(bytes(nprocs * SLOT.size))
            files.questions.write_bytes(bytes(questions.SIZE))
        except OSError:
            shutil.rmtree(private, ignore_errors=True)
            raise
        return files

    def done(self, files: RunFiles, keep: bool) -> None:
        """The run is over: remove its directory, or everything but the logs if ``keep``."""
        keep = keep and files.logs == files.private
        if keep:
            with contextlib.suppress(FileNotFoundError):  # something has deleted it
                for entry in list(os.scandir(files.private)):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    elif not entry.name.endswith(".log"):
                        os.unlink(entry.path)
        else:
            shutil.rmtree(files.private, ignore_errors=True)
        with self._lock:
            self._kept += [files.private] if keep else []
            while len(self._kept) > KEPT_RUNS:
                shutil.rmtree(self._kept.pop(0), ignore_errors=True)
            if self._root is not None and not any(self._root.path.glob("run-*")):
                self.remove_all()

    def remove_all(self) -> None:
        """Remove the root with everything in it."""
        with self._lock:
            if self._root is not None:
                self._root.remove()
                self._root, self._kept = None, []


run_directories = RunDirectories()
