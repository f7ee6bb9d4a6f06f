"""Whether the processes of ranks have ended, and how: also where nobody else can tell any more.

A process's parent tells its exit code: this process, or the fork server. It cannot when the fork server was killed or
is stopped, and when SIGCHLD is ignored here or a thread of the person's waits for any child (``os.waitpid(-1, 0)``).
Then /proc says whether the process lives, and its exit code is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from nbspawn._engine.contexts import ServedProcess
from nbspawn._engine.guardian import started_at

UNKNOWN = 255  # what multiprocessing says of a process whose fork server is gone
_PATIENCE = 1.0  # seconds in which the parent of a process that has ended tells its exit code


class Exits:
    """Of the processes of one run."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self.served = all(isinstance(process, ServedProcess) for process in processes)
        """Were they forked by the fork server?"""
        self._processes = processes
        self._began: dict[int, tuple[int, str]] = {}
        self._gone: dict[int, float] = {}
        self.unknown: set[int] = set()
        """The ranks whose exit code nobody can tell."""

    def begun(self, rank: int, pid: int) -> None:
        """The rank has told of its process."""
        self._began[rank] = (pid, started_at(pid))

    def pid(self, rank: int) -> int | None:
        """Of the rank's process; None if it is not known yet. Never waits."""
        if rank in self._began:
            return self._began[rank][0]
        process = self._processes[rank]
        pid: int | None = process._popen.known_pid() if self.served else process.pid
        return pid

    def running(self, rank: int) -> bool:
        """Has the rank's process not ended yet? Never waits."""
        process = self._processes[rank]
        if process.exitcode is not None:
            return False
        if self._lives(rank):
            self._gone.pop(rank, None)
            return True
        if process.exitcode is not None:
            return False
        gone_since = self._gone.setdefault(rank, time.monotonic())
        if self.served and time.monotonic() - gone_since < _PATIENCE:
            return True  # until the fork server has told
        self.give_up(rank)
        return False

    def give_up(self, rank: int) -> None:
        """Take it for ended. A process that a fork server starts later finds neither the run's directory nor the
        kernel's socket, and ends."""
        self.unknown.add(rank)
        self._processes[rank]._popen.returncode = UNKNOWN  # or multiprocessing would wait for it

    def code(self, rank: int) -> int | None:
        """The exit code of a rank that has ended, None if nobody can tell."""
        return None if rank in self.unknown else self._processes[rank].exitcode

    def why_unknown(self) -> str:
        """What has become of those who could tell exit codes."""
        if not self.served:
            return (
                "this process does not hear of the end of its children (SIGCHLD is ignored, or a thread waits for any)"
            )
        lost = any(process._popen.server_lost for process in self._processes)
        return "the fork server was killed" if lost else "the fork server does not answer"

    def _lives(self, rank: int) -> bool:
        if not self.served and self._is_ours(rank):
            return True  # or its exit code can be had
        if rank in self._began:
            pid, began = self._began[rank]
            return bool(began) and started_at(pid) == began
        known = self.pid(rank)
        return bool(started_at(known)) if known is not None else not self._processes[rank]._popen.server_lost

    def _is_ours(self, rank: int) -> bool:
        """Can this process still ask how that one ended? Nobody has buried it."""
        try:
            os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True
