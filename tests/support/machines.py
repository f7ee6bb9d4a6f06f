"""Several hosts on one machine: namespaces on a bridge, each with its own network, processes, host name, shared memory
and connections to the others. Needs root, and iproute2.
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
from collections.abc import Callable, Mapping
from pathlib import Path

_SETS = 9  # on one machine, each with names, network and ports of its own
# A test run that is killed leaves nothing that runs. (While unshare waits, it ignores SIGTERM.)
TERMINATED, KILLED = (["setpriv", "--pdeathsig", signal] for signal in ("TERM", "KILL"))
TORCHRUN = Path(sys.executable).with_name("torchrun")


def missing() -> str:
    """Why there can be no such hosts here; '' if there can."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    mine = f"nbtry{os.getpid()}"  # other workers try, too
    tried = subprocess.run(["ip", "link", "add", mine, "type", "bridge"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"namespaces are not allowed: {tried.stderr.strip()}"
    _ip(f"link del {mine}")
    return ""


class Machines:
    """``hosts`` named host1, host2, ...; a context manager. Other test runs may have some at the same time."""

    def __init__(self, hosts: int) -> None:
        self._count = hosts
        self.number = 0
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._inside: dict[int, int] = {}
        self.folder = ""
        self._only = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Machines:
        # All processes of the machine's network see the name, and it ends with this one: a bridge that is there though
        # nobody has the name is of a test run that was killed.
        for self.number in range(1, _SETS + 1):
            with contextlib.suppress(OSError):
                self._only.bind(f"\0{self._bridge}")
                break
        else:
            raise RuntimeError(f"this machine has {_SETS} such sets of hosts already")
        self._unlink()
        _ip(f"link add {self._bridge} type bridge")
        self.folder = tempfile.mkdtemp(prefix="nbr-", dir="/tmp")
        try:
            for address in (f"{self.net}.1/24", f"{self.net6}1/64 nodad"):
                _ip(f"addr add {address} dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            self.prepare()
            for host in range(1, self._count + 1):
                self.add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        # A host that was cut off lives on, without a process, until its connections have timed out.
        self._unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._only.close()

    def prepare(self) -> None:
        """Do what comes before the hosts."""

    def add(self, host: int) -> None:
        """Make one more host of this number."""
        self._holders[host], self._inside[host] = self._make(host)

    @property
    def net(self) -> str:
        """The first three parts of all addresses; this machine's last one is 1."""
        return f"10.77.{self.number}"

    @property
    def net6(self) -> str:
        """The same of IPv6."""
        return f"fd77:{self.number}::"

    @property
    def _bridge(self) -> str:
        return f"nbtest{self.number}"

    def link(self, host: int) -> str:
        """This machine's interface to the host."""
        return f"nbt{self.number}-{host}"

    def _unlink(self) -> None:
        for link in (*map(self.link, range(1, 10)), self._bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True)

    def put(self, host: int, path: str, text: str) -> None:
        """Have this text in the host's file, which is there already."""
        file = Path(self.folder, f"{os.path.basename(path)}-{host}")
        file.write_text(text)
        self.run([*self.inside(host), "mount", "--bind", file, path])

    def address_of(self, host: int) -> str:
        """The host's own."""
        return f"{self.net}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What to put before a command to run it on that host."""
        return ["nsenter", "--target", str(self._inside[host]), *"--mount --uts --ipc --net --pid --".split()]

    def pid(self, host: int) -> int:
        """The first process on the host."""
        return self._inside[host]

    def cut(self, host: int) -> None:
        """Disconnect the host."""
        _ip(f"link set {self.link(host)} nomaster")

    def kill(self, host: int) -> None:
        """Switch the host off."""
        os.kill(self._inside[host], signal.SIGKILL)
        self.cut(host)

    def _make(self, host: int) -> tuple[subprocess.Popen[bytes], int]:
        setup = f"hostname host{host} && mount -t tmpfs shm /dev/shm && exec sleep infinity"
        options = "--net --pid --uts --ipc --mount --fork --mount-proc --kill-child".split()
        holder = subprocess.Popen([*KILLED, "unshare", *options, "sh", "-c", setup])
        self._holders[host] = holder
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        wait(lambda: children.read_text().split())
        inside = self._inside[host] = int(children.read_text())
        _ip(f"link add {self.link(host)} type veth peer name eth0 netns {inside}")
        _ip(f"link set {self.link(host)} master {self._bridge} up")
        for command_inside in (
            "link set lo up",
            f"addr add {self.address_of(host)}/24 dev eth0",
            f"addr add {self.net6}{host + 1}/64 dev eth0 nodad",
            "link set eth0 up",
        ):
            self.run([*self.inside(host), "ip", *command_inside.split()])
        return holder, inside

    def torchrun(self, program: str) -> list[str]:
        """The lines "rank ..." that this program prints under ``torchrun``, on two ranks of each of two hosts."""
        script = Path(self.folder, "script.py")
        script.write_text(f"{program}os._exit(0)\n")  # as in tests/programs/torchrun.py
        options = f"--nnodes 2 --nproc-per-node 2 --master-addr {self.address_of(1)} --master-port 29511".split()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        started = [
            subprocess.Popen(
                [*self.inside(host), TORCHRUN, *options, "--node-rank", str(host - 1), script],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host in (1, 2)
        ]
        return [line for one in started for line in one.communicate()[0].splitlines() if line.startswith("rank ")]

    def run(self, command: list[object], env: Mapping[str, str] | None = None) -> None:
        """Run a command, which must succeed."""
        words = [*map(str, command)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def wait(there: Callable[[], object]) -> None:
    """Wait until that is so."""
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)
