"""Several hosts on one machine, for ranks on several nodes: namespaces on a bridge, with a Ray cluster over them.

This machine is the cluster's head, without CPUs for ranks; the others have their own network, processes, host name and
shared memory. Needs root, and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_CLUSTERS = 9  # on one machine, each with names, network and ports of its own
RAY = Path(sys.executable).with_name("ray")
_START = [RAY, "start", "--disable-usage-stats", "--object-store-memory=100000000"]
# A test run that is killed leaves nothing that runs. (While unshare waits, it ignores SIGTERM.)
_TERMINATED, _KILLED = (["setpriv", "--pdeathsig", signal] for signal in ("TERM", "KILL"))
# A head that finds a token in ~/.ray, where any other use of Ray leaves one, would refuse the nodes.
_ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled"}
# Ray then knows of a host that is gone after 12 s instead of 50, but later than nbspawn.
_HEALTH = '{"health_check_period_ms": 3000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 4}'


def missing() -> str:
    """Why there can be no such cluster here; '' if there can."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if not RAY.exists():
        return "Ray is not installed"
    mine = f"nbtry{os.getpid()}"  # other workers try, too
    tried = subprocess.run(["ip", "link", "add", mine, "type", "bridge"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"namespaces are not allowed: {tried.stderr.strip()}"
    _ip(f"link del {mine}")
    return ""


class Cluster:
    """``hosts`` named host1, host2, ...; a context manager. Other test runs may have clusters at the same time."""

    def __init__(self, hosts: int) -> None:
        self._count = hosts
        self._number = 0
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._inside: dict[int, int] = {}
        self._head: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._only = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Cluster:
        # All processes of the machine's network see the name, and it ends with this one: a bridge that is there though
        # nobody has the name is of a test run that was killed.
        for self._number in range(1, _CLUSTERS + 1):
            with contextlib.suppress(OSError):
                self._only.bind(f"\0{self._bridge}")
                break
        else:
            raise RuntimeError(f"this machine has {_CLUSTERS} clusters already")
        self._unlink()
        _ip(f"link add {self._bridge} type bridge")
        self._folder = tempfile.mkdtemp(prefix="nbr-", dir="/tmp")
        try:
            _ip(f"addr add {self._net}.1/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            head = ["--head", f"--node-ip-address={self._net}.1", f"--port={self._port}", "--num-cpus=0", "--block"]
            head += [f"--temp-dir={self._folder}", "--include-dashboard=false", f"--system-config={_HEALTH}"]
            head += [f"--dashboard-agent-listen-port={self._port + _CLUSTERS}"]
            command = [*map(str, [*_START, *head])]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            self._head = subprocess.Popen([*_TERMINATED, *command], env=_ENVIRONMENT, **quiet)
            _wait(self._answers)
            for host in range(1, self._count + 1):
                self.add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._head is not None:
            self._head.terminate()  # with all that it has started
            self._head.wait()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        # A host that was cut off lives on, without a process, until its connections have timed out.
        self._unlink()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._only.close()

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return f"{self._net}.1:{self._port}"

    @property
    def _bridge(self) -> str:
        return f"nbtest{self._number}"

    @property
    def _net(self) -> str:
        return f"10.77.{self._number}"

    @property
    def _port(self) -> int:
        return 6390 + self._number

    def _link(self, host: int) -> str:
        return f"nbt{self._number}-{host}"

    def _unlink(self) -> None:
        for link in (*map(self._link, range(1, 10)), self._bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True)

    def add(self, host: int, gpus: int = 0, silent_dns: bool = False) -> None:
        """Make one more host of this number, with a Ray node that believes to have GPUs; its DNS may never answer."""
        self._make(host)
        self._put(host, "/etc/resolv.conf", f"nameserver {self._net}.250\n")  # where nobody is
        if not silent_dns:
            # What torch asks for is the IPv6 form of an IPv4 address.
            forms = (f"{form}{self._net}." for form in ("", "::ffff:"))
            names = [f"{form}{number} host{number - 1}\n" for form in forms for number in range(1, 10)]
            self._put(host, "/etc/hosts", "127.0.0.1 localhost\n" + "".join(names))
        node = [f"--address={self.address}", f"--node-ip-address={self.address_of(host)}", "--num-cpus=2"]
        self._run([*self.inside(host), *_START, *node, f"--num-gpus={gpus}"])

    def _put(self, host: int, path: str, text: str) -> None:
        file = Path(self._folder, f"{os.path.basename(path)}-{host}")
        file.write_text(text)
        self._run([*self.inside(host), "mount", "--bind", file, path])

    def address_of(self, host: int) -> str:
        """The host's own."""
        return f"{self._net}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What to put before a command to run it on that host."""
        return ["nsenter", "--target", str(self._inside[host]), *"--mount --uts --ipc --net --pid --".split()]

    def cut(self, host: int) -> None:
        """Disconnect the host."""
        _ip(f"link set {self._link(host)} nomaster")

    def kill(self, host: int) -> None:
        """Switch the host off."""
        os.kill(self._inside[host], signal.SIGKILL)
        self.cut(host)

    def end_head(self) -> None:
        """End the cluster's head, with all of Ray's processes on this machine."""
        assert self._head is not None
        for process in psutil.Process(self._head.pid).children(recursive=True):
            process.kill()

    def kill_raylet(self, host: int) -> None:
        """End Ray's own process on the host, and nothing else."""
        for process in psutil.Process(self._inside[host]).children(recursive=True):
            if process.name() == "raylet":
                process.kill()

    def _make(self, host: int) -> None:
        setup = f"hostname host{host} && mount -t tmpfs shm /dev/shm && exec sleep infinity"
        command = [
            *_KILLED,
            "unshare",
            *"--net --pid --uts --ipc --mount --fork --mount-proc --kill-child".split(),
            "sh",
            "-c",
            setup,
        ]
        self._holders[host] = subprocess.Popen(command)
        children = Path(f"/proc/{self._holders[host].pid}/task/{self._holders[host].pid}/children")
        _wait(lambda: children.read_text().split())
        self._inside[host] = int(children.read_text())
        _ip(f"link add {self._link(host)} type veth peer name eth0 netns {self._inside[host]}")
        _ip(f"link set {self._link(host)} master {self._bridge} up")
        for command_inside in ("link set lo up", f"addr add {self.address_of(host)}/24 dev eth0", "link set eth0 up"):
            self._run([*self.inside(host), "ip", *command_inside.split()])

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((f"{self._net}.1", self._port), 1).close()
            return True
        return False

    def _run(self, command: list[object]) -> None:
        words = [*map(str, command)]
        done = subprocess.run(words, env=_ENVIRONMENT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def _wait(there: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)
