"""Starts agents on hosts by the system's SSH client: all that they and the kernel say to each other goes over its
standard input and output (relay.py). A host needs Python and torch; nbspawn itself is sent.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nbspawn._engine.cluster import relay, sent_packages
from nbspawn._engine.kernel import descriptors
from nbspawn._process import traced
from nbspawn._protocol import connection
from nbspawn.errors import UsageError

_OPTIONS = {
    "BatchMode": "yes",  # nobody can answer a question
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # one that the user has opened is used, and none is left behind
    "ClearAllForwardings": "yes",  # the user's: their ports may be in use
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "EscapeChar": "none",
    "ForwardX11": "no",
    "LogLevel": "ERROR",  # without the server's banner
}
_BEGIN = 'import os;R=lambda n:b"".join(os.read(0,1)for _ in range(n));exec(R(int(R(8))))'
"""Reads the relay's text, after its length in eight digits, and runs it. A shell would read ahead."""
_EXIT_NO_PROGRAM = {126: "{python} cannot be run there", 127: "there is no {python} there"}
_EXIT_SSH = 255


@dataclass(frozen=True)
class Host:
    """One of ``--on``: its ``name`` as for ssh, with the user if one is given, ``port`` ('' for the default), and the
    path of its interpreter."""

    name: str
    port: str
    python: str

    def __str__(self) -> str:
        user, at, name = self.name.rpartition("@")
        port = f":{self.port}" if self.port else ""
        path = self.python if self.python != sys.executable else ""
        return f"{user}{at}{f'[{name}]' if ':' in name else name}{port}{path}"


def hosts(where: str) -> list[Host]:
    """The hosts of 'ssh:one,user@two:2222,three/opt/env/bin/python': a path is also that of the hosts before it that
    have none; the default is the kernel's own. Raises UsageError."""
    found: list[Host] = []
    python = sys.executable
    for part in reversed(where.partition(":")[2].split(",")):
        match = re.fullmatch(
            r"(?P<name>(?:[\w.+-]+@)?(?:\[[\w:.%]+\]|[\w.-]+))(?::(?P<port>\d+))?(?P<path>/.*)?", part.strip()
        )
        if match is None or match["name"].startswith("-"):
            raise UsageError(
                f"{part!r:.60} is no host: --on ssh:HOST,HOST, each as for ssh: USER@HOST:PORT/PATH/TO/PYTHON"
            )
        python = match["path"] or python
        found.append(Host(re.sub(r"[\[\]]", "", match["name"]), match["port"] or "", python))
    return found[::-1]


class SshHosts:
    """Agents on these hosts. Equal to others on the same ones."""

    address = ""
    needs_modules = True
    news_seconds = 0.2

    def __init__(self, where: str) -> None:
        self._hosts = hosts(where)
        self.nodes = len(self._hosts)
        self._relay: subprocess.Popen[bytes] | None = None
        self._ends: list[list[socket.socket]] = []
        self._heard = bytearray()
        self._ended: dict[int, str] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SshHosts) and other._hosts == self._hosts

    def __hash__(self) -> int:
        return hash(tuple(self._hosts))

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """Start the relay, which runs ssh."""
        program = command()[0]
        if shutil.which(program) is None:
            raise UsageError(f"--on ssh needs OpenSSH's client: there is no {program} here")
        archive = sent_packages.code()
        commands = [_command(host) for host in self._hosts]
        pairs = [[socket.socketpair() for _ in connection.PURPOSES] for _ in self._hosts]
        self._ends = [[ours for ours, _ in parts] for parts in pairs]
        theirs = [[its.fileno() for _, its in parts] for parts in pairs]
        self._ended.clear()
        self._heard.clear()
        try:
            with traced.not_in_children():
                self._relay = subprocess.Popen(
                    [sys.executable, "-I", "-S", relay.__file__, "near"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Stop interrupts the kernel's process group
                    pass_fds=[fd for fds in theirs for fd in fds],
                    bufsize=0,
                )
        finally:
            for parts in pairs:
                for _, its in parts:
                    its.close()
        assert self._relay.stdin is not None and self._relay.stdout is not None
        for pipe in (self._relay.stdin, self._relay.stdout):
            descriptors.close_after_fork(pipe.fileno())
        os.set_blocking(self._relay.stdout.fileno(), False)
        tasks: list[dict[str, Any]] = []
        for node, (words, fds) in enumerate(zip(commands, theirs, strict=True)):
            task = {
                "archive": len(archive),
                "python": ".".join(platform.python_version_tuple()[:2]),
                "connections": len(connection.PURPOSES),
                "several": self.nodes > 1,
                "node": node,
            }
            tasks.append({"command": words, "fds": fds, "task": task})
        with suppress(OSError):  # it has ended
            begin = memoryview(relay.packed(tasks) + archive)
            while begin:
                begin = begin[self._relay.stdin.write(begin) :]

    def name(self, node: int) -> str:
        """The host's, as the user has given it."""
        return self._hosts[node].name

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> Mapping[bytes, socket.socket]:
        """The connections to the agent that ``prepare`` has had started there."""
        return dict(zip(connection.PURPOSES, self._ends[node], strict=True))

    def failures(self) -> Mapping[int, str]:
        if self._relay is None:
            return {}
        assert self._relay.stdout is not None
        over = False
        with suppress(BlockingIOError):
            while part := os.read(self._relay.stdout.fileno(), 65536):
                self._heard += part
            over = True
        *lines, rest = bytes(self._heard).split(b"\n")
        self._heard[:] = rest
        for line in map(json.loads, lines):
            host = self._hosts[line["node"]]
            explain = lost if line["connected"] else explained
            self._ended[line["node"]] = explain(host, line["code"], line["said"]) or line["why"]
        if over:
            for node in range(self.nodes):
                self._ended.setdefault(node, "the process of this machine that runs ssh has ended")
        return self._ended

    def close(self) -> None:
        process, self._relay = self._relay, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            descriptors.unmark(pipe.fileno())
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        process.stdout.close()


def count(where: str, asked: int | None) -> int:
    """As many as ``where`` names. Raises UsageError for another number."""
    there = len(hosts(where))
    if asked not in (None, there):
        raise UsageError(f"--nnodes {asked}, but {where!r:.60} names {there} hosts")
    return there


def starter(where: str, nprocs: int, nodes: int, backend: str | None) -> SshHosts:
    """Agents on the hosts that ``where`` names."""
    return SshHosts(where)


def found(where: str) -> tuple[list[tuple[str, str]], int]:
    """The hosts, and how many they are."""
    named = hosts(where)
    return [(host.name, host.python) for host in named], len(named)


def singly(where: str) -> list[str]:
    """Each host alone."""
    return [f"ssh:{host}" for host in hosts(where)]


def command() -> list[str]:
    """The SSH client, which NBSPAWN_SSH replaces, as GIT_SSH_COMMAND does for git."""
    given = os.environ.get("NBSPAWN_SSH", "")
    try:
        return shlex.split(given) or ["ssh"]
    except ValueError as error:
        raise UsageError(f"NBSPAWN_SSH is {given!r}: {error}") from None


def _command(host: Host) -> list[str]:
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    port = ["-p", host.port] if host.port else []
    return [*command(), "-T", *options, *port, "--", host.name, f"exec {_quoted(host.python)} -I -S -c '{_BEGIN}'"]


def _quoted(path: str) -> str:
    """For any login shell: sh, fish and csh all know single quotes."""
    if path.startswith("/~/"):  # as in git's URLs
        return "~/" + _quoted(path[3:])
    if re.fullmatch(r"[\w@%+:,./~-]+", path):
        return path
    if set(path) & set("'!\n\\"):
        raise UsageError(f"{path!r} cannot be named in every login shell: make a link to it")
    return f"'{path}'"


_KNOWN = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that this machine knows. Find out why before you remove the old one "
        "(ssh-keygen -R {name})",
    ),
    (
        "Host key verification failed",
        "this machine does not know its host key: connect once in a terminal (ssh {host}), and compare the fingerprint",
    ),
    (
        "Permission denied",
        "it refuses the login: a password cannot be given here. Make `ssh {host} true` work without one (ssh-copy-id, "
        "ssh-agent), or open a shared connection in a terminal (ControlMaster, ControlPath and ControlPersist in "
        "~/.ssh/config)",
    ),
    ("Too many authentication failures", "it refuses the login: your agent offers too many keys (IdentitiesOnly)"),
    ("Could not resolve hostname", "this machine does not know that name"),
    ("timed out", "it does not answer within 10 s"),
    ("No route to host", "there is no route to it"),
    ("Connection refused", "no SSH server listens there"),
    ("kex_exchange_identification", "its SSH server has closed new connections five times in a row (MaxStartups?)"),
)
"""What OpenSSH says, and what that means."""


_OF_SSH = re.compile(
    r"ssh[:_]|client_loop|Connection |Timeout,|Read from |Write failed|Received disconnect|Disconnected"
)
"""The beginnings of what ssh says when a connection ends."""


def lost(host: Host, exit_code: int, said: str) -> str:
    """Why the agent that was there has ended, where its command has ended with this code and ``said`` that; '' if that
    does not tell."""
    lines = _lines(said)
    if missing := next(filter(None, (_missing(host, line) for line in lines)), ""):
        return missing
    for line in reversed(lines):
        if line.startswith("nbspawn: "):
            before = lines[lines.index(line) - 1] if lines.index(line) else ""
            is_error = "exit code" in line and re.match(r"\w+(Error|Exception)\b", before)
            return line.removeprefix("nbspawn: ") + (f" ({before})" if is_error else "")
        if exit_code == _EXIT_SSH and _OF_SSH.match(line):
            return f"ssh says: {line}"
    return f"ssh was killed by signal {-exit_code}" if exit_code < 0 else ""


def _lines(said: str) -> list[str]:
    return [line.strip() for line in said.splitlines() if line.strip()]


def _missing(host: Host, line: str) -> str:
    missing = re.search(r"No module named '(torch|IPython)'", line)
    return (
        missing
        and (
            f"{host.python} has no {missing[1]} there. Install it, or name another interpreter: "
            f"--on ssh:{host.name}/path/to/python"
        )
        or ""
    )


def explained(host: Host, exit_code: int, said: str) -> str:
    """Why there is no agent on the host, where its command has ended with this code and ``said`` that; '' if that does
    not tell. It ends with ssh's own line."""
    lines = _lines(said)
    last = lines[-1] if lines else ""
    if exit_code in _EXIT_NO_PROGRAM:
        why = _EXIT_NO_PROGRAM[exit_code].format(python=host.python)
        return f"{why} ({last}). Name its interpreter: --on ssh:{host.name}/path/to/python"
    if exit_code == _EXIT_SSH:
        for sign, meaning in _KNOWN:
            if line := next((line for line in lines if sign in line), ""):
                name = host.name.rpartition("@")[2]
                return f"{meaning.format(host=host.name, name=name)}. ssh says: {line}"
    if "invalid literal for int()" in last:  # of _BEGIN
        return "ssh sends it no input: is there StdinNull or ForkAfterAuthentication in ~/.ssh/config?"
    if own := [line for line in lines if line.startswith("nbspawn: ")]:
        return own[-1].removeprefix("nbspawn: ") + (f" ({last})" if last != own[-1] else "")
    return f"ssh says: {last}" if last else f"ssh has ended with exit code {exit_code}, and has said nothing"
