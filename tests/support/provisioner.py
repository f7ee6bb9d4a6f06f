"""Starts the kernels of tests by forking them (kernel_parent.py), as a provisioner of jupyter_client."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner
from leftovers import adopt_orphans

NAME = "forked"
"""For a kernel's spec."""


class Forked:
    """As much of a ``Popen`` as jupyter_client uses, of a process that this one has adopted."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # a test that looks for leftovers has buried it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _parent() -> socket.socket:
    """The connection to this process's own, which ends with it."""
    adopt_orphans()
    ours, theirs = socket.socketpair()
    code = f"import kernel_parent, socket\nkernel_parent.serve(socket.socket(fileno={theirs.fileno()}))"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class Provisioner(LocalProvisioner):
    """Starts kernels."""

    @classmethod
    def load(cls) -> type[Provisioner]:
        """As of an entry point."""
        return cls

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        parent = _parent()
        request = json.dumps({"command": cmd, "cwd": kwargs["cwd"], "env": kwargs["env"]})
        socket.send_fds(parent, [request.encode()], [kwargs["stdout"].fileno(), kwargs["stderr"].fileno()])
        self.process = Forked(int(parent.recv(16)))
        self.pid = self.pgid = self.process.pid
        return self.connection_info


KernelProvisionerFactory.instance().provisioners[NAME] = Provisioner
