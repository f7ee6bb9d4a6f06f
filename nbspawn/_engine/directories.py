"""The kernel's private directories (0700), of which none is left behind, whatever becomes of the kernel.

A run that ended well takes its folder along; the last few that failed, or printed more than the notebook shows, stay
for their logs until the kernel ends. A kernel that was killed could not tidy up: the next one does. It knows by a lock
that the owner is dead, and by what the owner wrote that nbspawn has made the directory. Those of a rank that runs ranks
of its own lie in its run's directory, and go with that.

Something else may delete them at any time, such as a cleaner of old temporary files: the next run makes others.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from pathlib import Path

from nbspawn._engine import inherited
from nbspawn._protocol.gauges import SLOT
from nbspawn._protocol.launch import MARK, RunFiles

KEPT_RUNS = 5
_PREFIX = "nbspawn-"
_OWNER = "owner"
_LONGEST = (
    60  # bytes, of a temp directory below which "nbspawn-runs-12345678/run-12345/socket" still is a socket's name
)


class OwnedDirectory:
    """A temporary directory that is known to be in use for as long as this process lives."""

    def __init__(self, purpose: str) -> None:
        _sweep_once()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=_base()))
        try:
            self._lock = _signed(self.path)
        except BaseException:  # no room; unsigned, it would stay for ever
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        # systemd-tmpfiles spares a directory that is locked itself, whatever its age.
        self._held = inherited.keep_from_children(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        with contextlib.suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def exists(self) -> bool:
        """Has nobody deleted it?"""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._held))
        return False

    def remove(self) -> None:
        """Remove it with everything in it."""
        if self.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        inherited.close(self._held)
        inherited.close(self._lock)


def _signed(path: Path) -> int:
    """Sign the directory; returns what locks it."""
    fd = inherited.keep_from_children(os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, _signature(path))
    except BaseException:
        inherited.close(fd)
        raise
    return fd


def _signature(path: Path) -> bytes:
    """What only the maker of this directory writes into it: a copy of it is another one."""
    return f"made by nbspawn, inode {path.stat().st_ino}\n".encode()


def _base() -> str:
    """Where directories are made: in the directory of the run that this process is a rank of, else the temp directory,
    if the names of sockets in them fit. The system takes about 100 bytes."""
    run = os.environ.get(MARK, "").rpartition(":")[2]
    for path in (run, tempfile.gettempdir()):
        if path and len(os.fsencode(path)) <= _LONGEST and os.path.isdir(path):
            return path
    return "/tmp"


@functools.cache
def _sweep_once() -> None:
    """As a kernel begins; a temp directory can be long."""
    sweep()


def sweep() -> None:
    """Remove what dead kernels of this user left behind, and nothing that they have not made."""
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
            pass  # its kernel lives, or somebody else was faster
        finally:
            os.close(fd)


class RunDirectories:
    """Hands out the directories of runs, below one that is made when the first is asked for."""

    def __init__(self) -> None:
        self._forget()
        inherited.when_forked(self._forget)
        atexit.register(self.remove_all)

    def _forget(self) -> None:
        self._root: OwnedDirectory | None = None
        self._made = 0
        self._kept: list[Path] = []

    def new(self, log_dir: str | None, nprocs: int) -> RunFiles:
        """A fresh directory; the logs lie in it or in the person's ``log_dir`` (made if need be). Raises OSError if
        nothing can be written there."""
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
            files.interrupts.write_bytes(bytes(nprocs))
            files.gauges.write_bytes(bytes(nprocs * SLOT.size))
        except OSError:
            shutil.rmtree(private, ignore_errors=True)
            raise
        return files

    def done(self, files: RunFiles, keep: bool) -> None:
        """The run is over: keep its logs for a while, or nothing of it."""
        if keep and files.logs == files.private:
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
                for entry in list(os.scandir(files.private)):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    elif not entry.name.endswith(".log"):
                        os.unlink(entry.path)
            self._kept.append(files.private)
        else:
            shutil.rmtree(files.private, ignore_errors=True)
        while len(self._kept) > KEPT_RUNS:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        if self._root is not None and not any(self._root.path.glob("run-*")):
            self.remove_all()

    def remove_all(self) -> None:
        """Remove the root with everything in it."""
        if self._root is not None:
            self._root.remove()
            self._root, self._kept = None, []


run_directories = RunDirectories()
