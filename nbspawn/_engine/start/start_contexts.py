"""Two start methods of nbspawn's own for multiprocessing: its private fork server, and spawn without side effects.

torch's ``start_processes`` takes the start method as a string, so the two contexts of this file are registered with
multiprocessing under names of their own, as loky does.

Both start processes without two side effects of multiprocessing's own: the kernel's ``__main__`` is not run again in
the child (a notebook may have set ``__file__``), and the default start method is not settled for good, so that the
user's own ``set_start_method`` still works after ``%load_ext nbspawn``.
"""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import connection, context, forkserver, popen_forkserver, popen_spawn_posix, util
from typing import Any

from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.guardian import started_at
from nbspawn._engine.start.forkserver import server, write_all
from nbspawn._engine.start.multiprocessing_adapter import prepared, starting

FORKSERVER = "nbspawn-forkserver"
SPAWN = "nbspawn-spawn"

_TICK = 0.05  # seconds


class _ServerPopen(popen_forkserver.Popen):
    """multiprocessing's ``Popen``, by nbspawn's own fork server."""

    _fds: list[int]

    def __init__(self, process_obj: Any) -> None:
        self._pid: int | None = None
        self._reading = threading.RLock()
        self.server_lost = False
        """Has the server ended before the process? Then nobody reports its exit code."""
        super().__init__(process_obj)

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        """The server reports it first of all. So several processes can be started without waiting for each in turn."""
        while self._pid is None and not self.server_lost:
            connection.wait([self.sentinel], _TICK)  # another thread may read it meanwhile
            self._read_report()
        return self._pid

    def known_pid(self) -> int | None:
        """The pid, or None if the server has not reported it yet."""
        if self._pid is None:
            self._read_report()
        return self._pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, which the server reports after the pid; None if there is none yet."""
        waits = flag != os.WNOHANG
        while (
            self.returncode is None and not self.server_lost and connection.wait([self.sentinel], None if waits else 0)
        ):
            self._read_report()
        while waits and self.returncode is None:
            if self._pid is None or not started_at(self._pid):
                self.returncode = 255  # multiprocessing's own, for one of which nobody knows
            else:
                time.sleep(_TICK)
        return self.returncode

    def _read_report(self) -> None:
        """Read what the server has reported, if it has.

        The lock matters: multiprocessing asks all processes whenever it starts one, while another thread may watch
        ranks in the background. Of two that read, one would take the exit code for the pid; and a 0 that is taken for
        a pid means, to ``kill``, the whole process group of the kernel.
        """
        with self._reading:
            if self.returncode is not None or self.server_lost or not connection.wait([self.sentinel], 0):
                return
            try:
                received = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.server_lost = True
                return
            if self._pid is None:
                self._pid = received
            else:
                self.returncode = received

    def _launch(self, process_obj: Any) -> None:
        while True:
            fork_server = server.get()
            self._fds.clear()
            data = prepared(process_obj, popen=self)
            with server.not_while_forking:
                if server.is_present(fork_server):  # else a thread has replaced it, and has closed what it needs
                    self.sentinel, writable = fork_server.connect_to_new_process(self._fds)
                    alive = fork_server.keep_alive()
                    break
        # The child watches the one end to learn of its parent's death (multiprocessing.parent_process()). The other
        # keeps the server alive until this process's exit code has been read: a server whose last client leaves
        # together with its last child ends without reporting how that child did (exit code 255).
        ends = [descriptors.close_after_fork(fd) for fd in (os.dup(writable), alive)]
        self.finalizer = util.Finalize(self, _close_all, (ends, self.sentinel))
        try:
            write_all(writable, data)
        except BaseException:
            self.finalizer()  # a child that has not read all waits for the rest, as long as the error keeps this object
            raise


def _close_all(ends: list[int], sentinel: int) -> None:
    for fd in ends:
        descriptors.close(fd)
    os.close(sentinel)


class _Process(context.Process):
    """A process that is multiprocessing's own class in the rank: nothing of the engine is imported there, and the
    processes that the rank starts itself (DataLoader workers) use the kernel's default start method."""

    def __reduce__(self) -> Any:
        return object.__new__, (context.Process,), self.__dict__


class ServedProcess(_Process):
    """A process of a fork server. Its sentinel delivers the pid, then the exit code; to ask for either takes 60
    microseconds."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _ServerPopen(process_obj)


class _ForkServerContext(context.BaseContext):
    _name = FORKSERVER
    Process = ServedProcess


class _SpawnPopen(popen_spawn_posix.Popen):
    def _launch(self, process_obj: Any) -> None:
        with starting():
            super()._launch(process_obj)  # type: ignore[misc]


class _SpawnedProcess(_Process):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _SpawnPopen(process_obj)


class _SpawnContext(context.BaseContext):
    _name = SPAWN
    Process = _SpawnedProcess


context._concrete_contexts[FORKSERVER] = _ForkServerContext()  # type: ignore[attr-defined]
context._concrete_contexts[SPAWN] = _SpawnContext()  # type: ignore[attr-defined]
