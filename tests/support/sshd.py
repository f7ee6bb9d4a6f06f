"""Hosts (machines.py) with an SSH server each, and a client's configuration for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import machines
from machines import Machines

SSHD = "/usr/sbin/sshd"  # it wants an absolute path


def missing() -> str:
    """Why there can be no such hosts here; '' if there can."""
    return machines.missing() or ("" if os.path.exists(SSHD) and shutil.which("ssh") else "there is no OpenSSH server")


class Servers(Machines):
    """``host1`` and so on, and: ``refused`` accepts no key, ``unknown`` has one that nobody knows, ``changed`` another
    one than is known, ``closed`` no server, ``nowhere`` is no host, ``silent`` does not answer; ``six1`` is host1 by
    IPv6, and so on; ``behind`` is host2 by way of ``gate``, a further host. ``more`` are lines of the servers'
    configuration, but not of the gate's.
    """

    def __init__(self, hosts: int, more: str = "") -> None:
        super().__init__(hosts)
        self._more = more

    def __enter__(self) -> Servers:
        super().__enter__()
        self.add(self.gate)
        # No machine has this address, but nothing says so.
        known = f"{self.net}.240 lladdr 02:00:00:00:00:f0 nud permanent dev {self._bridge}"
        self.run(["ip", "neigh", "replace", *known.split()])
        return self

    @property
    def gate(self) -> int:
        """The gate's number."""
        return self._count + 1

    def prepare(self) -> None:
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("id", "other"):
            self._key(name)
        shutil.copy(self._path("id.pub"), self._path("authorized_keys"))
        names = []
        for host in range(1, self._count + 1):
            address = self.address_of(host)
            names += [f"Host host{host}\nHostName {address}\n"]
            names += [f"Host six{host}\nHostName {self.net6}{host + 1}\nHostKeyAlias {address}\n"]
        first = self.address_of(1)
        names += [f"Host gate\nHostName {self.address_of(self.gate)}\n"]
        names += [f"Host behind\nHostName {self.address_of(2)}\nProxyJump gate\n"]
        names += [f"Host refused\nHostName {first}\nIdentityFile {self._path('other')}\n"]
        names += [
            f"Host {name}\nHostName {first}\nUserKnownHostsFile {self._path(name)}\n" for name in ("unknown", "changed")
        ]
        names += [f"Host silent\nHostName {self.net}.240\n"]
        names += [f"Host closed\nHostName {first}\nPort 4\n", f"Host nowhere\nHostName {self.net}.250\n"]
        names += [f"Host * !refused\nIdentityFile {self._path('id')}\n"]
        names += ["Host *\nUser root\nIdentitiesOnly yes\nGlobalKnownHostsFile /dev/null\n"]
        names += [f"UserKnownHostsFile {self._path('known_hosts')}\n"]
        Path(self._path("config")).write_text("".join(names))
        Path(self._path("unknown")).touch()

    def add(self, host: int) -> None:
        super().add(host)
        key = self._key(f"host{host}")
        for file, known in (("known_hosts", key), ("changed", self._key(f"wrong{host}"))):
            with open(self._path(file), "a") as lines:
                lines.write(f"{self.address_of(host)} {known}\n")
        config = Path(self._path(f"sshd{host}.conf"))
        config.write_text(
            f"Port 22\nHostKey {self._path(f'host{host}')}\nAuthorizedKeysFile {self._path('authorized_keys')}\n"
            f"StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin prohibit-password\n{self._more if host != self.gate else ''}\n"
        )
        self.run([*self.inside(host), SSHD, "-f", config])

    @property
    def client(self) -> str:
        """For NBSPAWN_SSH."""
        return f"ssh -F {self._path('config')}"

    @property
    def python(self) -> str:
        """This interpreter, which all hosts have."""
        return sys.executable

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _key(self, name: str) -> str:
        """A new key; returns its public half, without the comment."""
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._path(name)], check=True)
        return " ".join(Path(self._path(f"{name}.pub")).read_text().split()[:2])
