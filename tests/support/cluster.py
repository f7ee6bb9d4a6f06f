"""A Ray cluster over several hosts (machines.py). This machine is its head, without CPUs for ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import machines
import psutil
from machines import Machines

RAY = Path(sys.executable).with_name("ray")
_START = [RAY, "start", "--disable-usage-stats", "--object-store-memory=100000000"]
# A head that finds a token in ~/.ray, where any other use of Ray leaves one, would refuse the nodes.
_ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled"}
# Ray then knows of a host that is gone after 12 s instead of 50, but later than nbspawn.
_HEALTH = '{"health_check_period_ms": 3000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 4}'


def missing() -> str:
    """Why there can be no such cluster here; '' if there can."""
    return machines.missing() or ("" if RAY.exists() else "Ray is not installed")


class Cluster(Machines):
    """``hosts`` nodes, and the head."""

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts)
        self._head: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        super().__enter__()
        return self

    def prepare(self) -> None:
        head = ["--head", f"--node-ip-address={self.net}.1", f"--port={self._port}", "--num-cpus=0", "--block"]
        head += [f"--temp-dir={self.folder}", "--include-dashboard=false", f"--system-config={_HEALTH}"]
        head += [f"--dashboard-agent-listen-port={self._port + 10}"]
        command = [*map(str, [*_START, *head])]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self._head = subprocess.Popen([*machines.TERMINATED, *command], env=_ENVIRONMENT, **quiet)
        machines.wait(self._answers)

    def __exit__(self, *_: object) -> None:
        if self._head is not None:
            self._head.terminate()  # with all that it has started
            self._head.wait()
        super().__exit__()

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return f"{self.net}.1:{self._port}"

    @property
    def _port(self) -> int:
        return 6390 + self.number

    def add(self, host: int, gpus: int = 0, silent_dns: bool = False) -> None:
        """Make one more host of this number, with a Ray node that believes to have GPUs; its DNS may never answer."""
        super().add(host)
        self.put(host, "/etc/resolv.conf", f"nameserver {self.net}.250\n")  # where nobody is
        if not silent_dns:
            # What torch asks for is the IPv6 form of an IPv4 address.
            forms = (f"{form}{self.net}." for form in ("", "::ffff:"))
            names = [f"{form}{number} host{number - 1}\n" for form in forms for number in range(1, 10)]
            self.put(host, "/etc/hosts", "127.0.0.1 localhost\n" + "".join(names))
        node = [f"--address={self.address}", f"--node-ip-address={self.address_of(host)}", "--num-cpus=2"]
        self.run([*self.inside(host), *_START, *node, f"--num-gpus={gpus}"], _ENVIRONMENT)

    def end_head(self) -> None:
        """End the cluster's head, with all of Ray's processes on this machine."""
        assert self._head is not None
        for process in psutil.Process(self._head.pid).children(recursive=True):
            process.kill()

    def kill_raylet(self, host: int) -> None:
        """End Ray's own process on the host, and nothing else."""
        for process in psutil.Process(self.pid(host)).children(recursive=True):
            if process.name() == "raylet":
                process.kill()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((f"{self.net}.1", self._port), 1).close()
            return True
        return False
