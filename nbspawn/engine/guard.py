"""The kernel's hold on its guardian (nbspawn/guardian.py), the process that ends what leaves the ranks' groups."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nbspawn import guardian
from nbspawn.engine import inherited


class Guard:
    """One guardian a kernel, started with the first run (1 ms here, ready 15 ms later); it ends with the kernel."""

    def __init__(self) -> None:
        self._forget()
        inherited.when_forked(self._forget)

    def _forget(self) -> None:
        self.pid: int | None = None
        self._pipe = -1
        self._runs: set[Path] = set()

    def begin(self, run: Path) -> None:
        """Ranks of the run in this directory are about to start."""
        if sys.platform != "linux":
            return
        if self.pid is None:
            self._start()
        self._runs.add(run)
        self._tell(b"+", run)

    def end(self, run: Path) -> None:
        """The run's ranks have ended: what they have left behind is killed, within milliseconds."""
        if run in self._runs:
            self._runs.remove(run)
            self._tell(b"-", run)

    def _tell(self, sign: bytes, run: Path) -> None:
        line = sign + os.fsencode(run) + b"\n"
        try:
            os.write(self._pipe, line)
        except BrokenPipeError:  # somebody killed it
            assert self.pid is not None
            os.waitpid(self.pid, 0)
            inherited.close(self._pipe)
            self._start()
            os.write(self._pipe, b"".join(b"+%b\n" % os.fsencode(living) for living in self._runs) + line)

    def _start(self) -> None:
        readable, writable = os.pipe()
        self._pipe = inherited.keep_from_children(writable)
        # In a group of its own: interrupts, and ipykernel's signals at its shutdown, go to the kernel's. Not with the
        # kernel's stdout and stderr: whoever reads those would wait for the guardian's end, too.
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guardian.__file__],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, readable, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setpgroup=0,
        )
        os.close(readable)


guard = Guard()
