"""The kernel's hold on its guardian (guardian.py), the process that ends what leaves the ranks' groups."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from nbspawn._engine.kernel import descriptors, guardian
from nbspawn._engine.kernel.guardian import is_alive, started_at, stopped
from nbspawn._process import traced
from nbspawn._protocol.launch import LIFELINE, MARK, RANKS

_log = logging.getLogger(__name__)

_AGAIN = 8  # runs that have ended: a guardian that is started again gets them, too; the other may not have read them


class Guard:
    """The kernel's one guardian, started with the first run (1 ms here, ready 15 ms later); it ends with the kernel."""

    def __init__(self) -> None:
        self._forget()
        descriptors.after_fork_in_child(self._forget)

    def _forget(self) -> None:
        self.pid: int | None = None
        self._lock = threading.Lock()  # runs in the background end in threads of their own
        self._since = ""
        self._pipe = -1
        self._runs: set[Path] = set()
        self._ended: deque[bytes] = deque(maxlen=_AGAIN)

    def begin(self, run: Path) -> None:
        """Ranks of the run in this directory are about to start."""
        if sys.platform != "linux":
            return
        with self._lock:
            if self.pid is None:
                self._start()
            self._runs.add(run)
            self._send(_begun(run))

    def renew_if_lost(self) -> None:
        """Start another one if somebody has killed or stopped it."""
        with self._lock:
            if self._runs:
                self._renew_if_lost()

    def end(self, run: Path) -> None:
        """The run's ranks have ended: what they have left behind is killed, within milliseconds."""
        with self._lock:
            if run in self._runs:
                self._runs.remove(run)
                event = b"-%b\0" % os.fsencode(run)
                self._ended.append(_begun(run) + event)
                self._send(event)

    def _send(self, event: bytes) -> None:
        """The guardian reads at once; if it is stuck, this must not wait for it. One that somebody has killed or
        stopped is started again, and gets all events."""
        if self._renew_if_lost():
            return
        try:
            os.write(self._pipe, event)
        except OSError as lost:  # it was stopped, and the pipe is full; or somebody has closed the pipe
            self._start_again(str(lost))

    def _renew_if_lost(self) -> bool:
        assert self.pid is not None
        lost = not is_alive(self.pid, self._since) or stopped(self.pid)
        if lost:
            self._start_again("it was killed, or stopped")
        return lost

    def _start_again(self, why: str) -> None:
        _log.warning("the guardian is started again: %s", why)
        assert self.pid is not None
        with suppress(OSError):  # somebody in this process who waits for any child may have waited for it
            if started_at(self.pid) == self._since:
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        with suppress(OSError):
            descriptors.close(self._pipe)
        self._start()
        os.write(self._pipe, b"".join([*self._ended, *map(_begun, self._runs)]))

    def _start(self) -> None:
        readable, writable = os.pipe()
        self._pipe = descriptors.close_after_fork(writable)
        os.set_blocking(writable, False)
        # In a group of its own: interrupts, and ipykernel's signals at its shutdown, go to the kernel's. Not with the
        # kernel's stdout and stderr: whoever reads those would wait for the guardian's end, too.
        with traced.not_in_children():
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", guardian.__file__, MARK, LIFELINE, RANKS],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, readable, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setpgroup=0,
            )
        os.close(readable)
        self._since = started_at(self.pid)


def _begun(run: Path) -> bytes:
    return b"+%b\0" % os.fsencode(run)


guard = Guard()
