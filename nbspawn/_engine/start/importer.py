"""The kernel's side of the importer (_server/preload.py): starts it, sends it plans, receives the fork servers."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, spawn, util

from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.guardian import is_alive, started_at, stopped
from nbspawn._engine.start.multiprocessing_adapter import in_own_group
from nbspawn._process import traced
from nbspawn._protocol.preload import ImportReport, Plan

_CODE = (
    "import sys; sys.path[:1] = []; import os; os.setpgid(0, 0); from nbspawn._server.preload import main; main({}, {})"
)
"""In a process group of its own, and without the notebook's folder, which ``-c`` has first in its path: see
multiprocessing_adapter.in_own_group."""

_CLOSED_AT_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # not on macOS


class Server(forkserver.ForkServer):
    """A fork server that the importer has forked. It ends when the kernel has let it go, and the last rank that came
    from it is done with; see start_contexts.py."""

    def __init__(self, report: ImportReport, address: str, alive: int) -> None:
        super().__init__()
        self.pid, self._since = report.pid, started_at(report.pid)
        self._address = self._forkserver_address = address
        self._forkserver_alive_fd = descriptors.close_after_fork(alive)
        self._forkserver_authkey = bytes.fromhex(report.key)

    def ensure_running(self) -> None:
        """Do nothing: multiprocessing calls this before each request, and would start a server."""

    def keep_alive(self) -> int:
        """A descriptor: the server lives until all of them are closed."""
        return os.dup(self._forkserver_alive_fd)

    @property
    def lost(self) -> str:
        """What has happened to it that it cannot serve; '' if nothing is known of that."""
        if not is_alive(self.pid, self._since):
            return "it has been killed"
        if stopped(self.pid):
            return "it has been stopped"
        return "" if os.path.exists(self._address) else "its directory has been deleted"

    def let_go(self) -> None:
        """Ask it for nothing more."""
        descriptors.close(self._forkserver_alive_fd)
        with suppress(FileNotFoundError):
            os.unlink(self._address)

    def kill(self) -> None:
        """End it at once."""
        if is_alive(self.pid, self._since):
            os.kill(self.pid, signal.SIGKILL)


class Importer:
    """A child of this process. It ends when it is let go, and its servers have ended. Raises OSError if it cannot be
    started."""

    def __init__(self) -> None:
        with traced.not_in_children(), in_own_group():
            resource_tracker.ensure_running()  # before the mask, which it would lift
        self.killed = False
        executable = os.fsencode(spawn.get_executable())
        ours, theirs = socket.socketpair()
        self._fd = descriptors.close_after_fork(ours.detach())
        life, lifeline = os.pipe()
        self._lifeline = descriptors.close_after_fork(lifeline)
        # A press of Stop during the imports would end it. The mask is inherited, by the servers too, which ignore
        # SIGINT; ranks lift it (_rank/program/process.py).
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs, traced.not_in_children():
                code = _CODE.format(theirs.fileno(), life)
                options = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
                self.pid = util.spawnv_passfds(executable, [executable, *options, "-c", code], [theirs.fileno(), life])
        except BaseException:
            self.let_go()
            raise
        finally:
            os.close(life)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def carry_out(self, plan: Plan, longest: float | None = None) -> tuple[ImportReport, Server]:
        """Have it carry out a plan; returns its report and the new server. Raises OSError or EOFError if it ends
        meanwhile, or waits for the other end for more than ``longest`` seconds."""
        connection, line, fds = socket.socket(fileno=self._fd), b"", []
        connection.settimeout(longest)
        try:
            connection.sendall(plan.line())
            while not line.endswith(b"\n"):
                part, received, _, _ = socket.recv_fds(connection, 1 << 16, 1, _CLOSED_AT_EXEC)
                if not part:
                    raise EOFError
                line += part
                fds += received
        finally:
            connection.detach()
        report = ImportReport.of(line)
        if report.failed:
            raise OSError(report.failed)
        if not fds:  # the system drops it
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return report, Server(report, plan.address, fds[0])

    def clock(self) -> float:
        """Seconds, without those in which it was ready to run and others had the processors."""
        with suppress(OSError, IndexError), open(f"/proc/{self.pid}/schedstat") as file:  # not in gVisor, not on macOS
            return time.monotonic() - int(file.read().split()[1]) / 1e9
        return time.monotonic()

    def kill(self) -> None:
        """End it at once. Its servers live on."""
        self.killed = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def let_go(self) -> None:
        """Send it no more plans; if it carries one out, it ends."""
        descriptors.close(self._fd)
        descriptors.close(self._lifeline)

    def has_ended(self) -> bool:
        """Has it ended? Then it is waited for."""
        with suppress(ChildProcessError):  # whoever waits for any child of this process may have been faster
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True
