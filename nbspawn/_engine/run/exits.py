"""Whether the processes of ranks have ended, and how: also where their exit codes cannot be had any more.

A process's exit code is known to its parent: this process, or the fork server. It cannot be had when the fork server
was killed or is stopped, and when SIGCHLD is ignored here or a thread of the user's waits for any child
(``os.waitpid(-1, 0)``). Then /proc shows whether the process lives, and its exit code is unknown.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from nbspawn._engine.kernel.guardian import is_alive, started_at
from nbspawn._engine.start.start_contexts import ServedProcess
from nbspawn._protocol.failure import UNKNOWN

_PARENT_ANSWERS = 1.0  # seconds in which the parent of a process that has ended reports its exit code
_ENDING = 0.1  # seconds after a sentinel has become readable in which the process most likely ends


class Exits:
    """The processes of one run, and how they ended. ``sentinels`` are torch's, with the rank of each; one is removed
    when its process has ended, and until then ``selector`` waits for it."""

    def __init__(self, processes: Sequence[Any], sentinels: dict[int, int], selector: selectors.BaseSelector) -> None:
        self.served = all(isinstance(process, ServedProcess) for process in processes)
        """Were they forked by the fork server?"""
        self.unknown: set[int] = set()
        """The ranks whose exit code nobody knows."""
        self._processes = processes
        self._sentinels = sentinels
        self._selector = selector
        self._began: dict[int, tuple[int, str]] = {}
        self._ending: dict[int, float] = {}
        self._gone: dict[int, float] = {}
        for sentinel, rank in sentinels.items():
            selector.register(sentinel, selectors.EVENT_READ, partial(self._sentinel_is_readable, rank))

    # ------------------------------------------------------------ processes that run

    @property
    def living(self) -> list[int]:
        """The ranks that have not ended, as far as has been noticed."""
        return list(self._sentinels.values())

    def begun(self, rank: int, pid: int) -> None:
        """The rank has reported its process."""
        self._began[rank] = (pid, started_at(pid))

    def has_begun(self, rank: int) -> bool:
        """Has the rank reported its process?"""
        return rank in self._began

    def pid(self, rank: int) -> int | None:
        """The process id of a rank; None if it is not known yet. Never waits."""
        if rank in self._began:
            return self._began[rank][0]
        process = self._processes[rank]
        pid: int | None = process._popen.known_pid() if self.served else process.pid
        return pid

    def at_work(self, besides: Collection[int]) -> dict[int, int]:
        """The pids of the ranks that have begun and not ended, but for those ``besides``."""
        ranks = [rank for rank in self.living if rank in self._began and rank not in besides]
        return {rank: self._began[rank][0] for rank in ranks if self._processes[rank].exitcode is None}

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
        if self.served and time.monotonic() - gone_since < _PARENT_ANSWERS:
            return True  # until the fork server has reported it
        self.give_up(rank)
        return False

    def _lives(self, rank: int) -> bool:
        if not self.served and self._is_ours(rank):
            return True  # or its exit code can be had
        if rank in self._began:
            pid, began = self._began[rank]
            return is_alive(pid, began)
        known = self.pid(rank)
        return bool(started_at(known)) if known is not None else not self._processes[rank]._popen.server_lost

    def _is_ours(self, rank: int) -> bool:
        """Can this process still ask how that one ended? Nobody has waited for it yet."""
        try:
            os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    # ------------------------------------------------------------ processes that end

    def _sentinel_is_readable(self, rank: int) -> None:
        """The rank has closed its files; it has not ended before its memory is given back, 4 ms later. Until then the
        sentinel would stay readable. (Its own code may have closed them, too, and then it has not ended.) A fork server
        writes to it: first the pid, which is read by asking for the exit code, then that."""
        process = self._processes[rank]
        if not self.served or process.exitcode is not None or process._popen.server_lost:
            self._ending[rank] = time.monotonic()
            self._selector.unregister(process.sentinel)

    def is_ending(self, rank: int) -> bool:
        """Has its sentinel become readable? Then the selector waits for it no more."""
        return rank in self._ending

    def about_to_end(self) -> list[int]:
        """The ranks whose sentinels have become readable a moment ago."""
        now = time.monotonic()
        return [rank for rank, since in self._ending.items() if now - since < _ENDING]

    def remove(self, rank: int) -> None:
        """The rank's process has ended, and that has been noticed."""
        process = self._processes[rank]
        process.join()  # at once; else multiprocessing holds its pipes until the next start
        del self._sentinels[process.sentinel]
        if rank in self._ending:
            del self._ending[rank]
        else:
            self._selector.unregister(process.sentinel)

    def give_up(self, rank: int) -> None:
        """Take it for ended. A process that a fork server starts later finds neither the run's directory nor the
        kernel's socket, and ends."""
        self.unknown.add(rank)
        self._processes[rank]._popen.returncode = UNKNOWN  # or multiprocessing would wait for it

    def code(self, rank: int) -> int | None:
        """The exit code of a rank that has ended, None if nobody knows it."""
        return None if rank in self.unknown else self._processes[rank].exitcode

    def why_unknown(self) -> str:
        """What has become of those who could report exit codes."""
        if not self.served:
            return (
                "this process is not notified of the end of its children (SIGCHLD is ignored, or a thread waits for "
                "any)"
            )
        lost = any(process._popen.server_lost for process in self._processes)
        return "the fork server was killed" if lost else "the fork server does not answer"
