"""What a run must not leave behind: processes, descriptors, threads, directories, signal handlers.

The test process adopts every orphan (PR_SET_CHILD_SUBREAPER), so a rank's child that outlives its rank shows up here
and cannot hide below init.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import process, resource_tracker
from pathlib import Path

import psutil
from methods import PATIENCE

from nbspawn._engine.kernel.directories import KEPT_RUNS, remove_stale, run_directories
from nbspawn._engine.kernel.guardian_client import guard
from nbspawn._engine.run import local
from nbspawn._engine.start import forkserver

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGIO, signal.SIGPIPE)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Wait for something that another process does; False if it did not come in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[int], seconds: float = PATIENCE) -> bool:
    """Have all of these processes ended, at the latest after ``seconds``?"""
    pids = list(pids)
    return until(lambda: not any(map(alive, pids)), seconds)


def marked_pids(folder: Path) -> list[int]:
    """What ranks wrote into files ``pids-<rank>``."""
    return [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]


def processes() -> set[int]:
    """All descendants that live, but for those that serve on: fork server, guardian and the like."""
    server = forkserver.server
    staying = {getattr(one, "pid", None) for one in (server._importer, server._current, guard)}
    staying.add(resource_tracker._resource_tracker._pid)
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
            elif child.ppid() == os.getpid() and child.pid not in {one.pid for one in process._children}:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found - staying


def descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


def directories() -> set[str]:
    root = tempfile.gettempdir()
    return {path for kind in ("nbspawn-*", "pymp-*", "pytorch-errorfile-*") for path in glob.glob(f"{root}/{kind}")}


@dataclass
class State:
    """What there is at one moment."""

    processes: set[int]
    descriptors: dict[int, str]
    threads: set[str]
    native_threads: int
    directories: set[str]
    handlers: list[object]

    @classmethod
    def now(cls) -> State:
        return cls(
            processes(),
            descriptors(),
            {thread.name for thread in threading.enumerate()},
            len(os.listdir("/proc/self/task")),
            directories(),
            [signal.getsignal(number) for number in _SIGNALS],
        )

    def beyond(self, before: State) -> dict[str, object]:
        """What has come since ``before``; empty if nothing is left."""
        message: dict[str, object] = {
            "processes": [_describe(pid) for pid in self.processes - before.processes],
            "threads": self.threads - before.threads,
            "native threads": max(0, self.native_threads - before.native_threads),
            "directories": self.directories - before.directories,
            "handlers": self.handlers if self.handlers != before.handlers else [],
        }
        if len(self.descriptors) > len(before.descriptors):
            message["descriptors"] = {fd: what for fd, what in self.descriptors.items() if fd not in before.descriptors}
        return {name: what for name, what in message.items() if what}


def _describe(pid: int) -> str:
    try:
        found = psutil.Process(pid)
        return f"{pid} {found.status()} {found.cmdline()}"
    except psutil.NoSuchProcess:
        return f"{pid} ended"


def kept_logs() -> list[str]:
    """The files that failed runs of this process, no kernel's, have kept (_engine/kernel/directories.py); at most
    ``KEPT_RUNS`` runs, nothing but logs."""
    root = run_directories._root
    runs = glob.glob(f"{root.path}/run-*") if root is not None else []
    assert len(runs) <= KEPT_RUNS, runs
    return [path for run in runs for path in glob.glob(f"{run}/*")]


def assert_nothing_beyond(before: State) -> None:
    """Compare with now. What ends by itself has its time: the fork server of a rank that had a run of its own
    notices the end only after its imports."""
    forgotten = list(local.running)
    try:
        for context in forgotten:
            context.close()
    finally:
        local.running.clear()  # the next test is not to blame
    assert not forgotten, "a context was not closed"
    remove_stale()  # of ranks that were killed and had runs of their own, as the next kernel does
    assert all(path.endswith(".log") for path in kept_logs())
    run_directories.remove_all()
    left: dict[str, object] = {}

    def clean() -> bool:
        nonlocal left
        gc.collect()
        left = State.now().beyond(before)
        return not left

    until(clean)
    assert not left, left
