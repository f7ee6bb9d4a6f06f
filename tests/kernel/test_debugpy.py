"""``--debugpy``: a debugger of the Debug Adapter Protocol attaches to one rank, as VS Code does."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import Kernel, ok, wait_until
from methods import PATIENCE
from users import User

from nbspawn._rank.debug.listener import UserOnlyListener

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's connection")


@contextmanager
def another_user() -> Iterator[None]:
    """What this process connects meanwhile is the other user's."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


class Debugger:
    """The least that a client of the protocol has to say."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", port))
        self._file = self._socket.makefile("rb")
        self._sent = 0
        self._heard: list[dict[str, Any]] = []

    def attach(self) -> None:
        self.ask("initialize", adapterID="test")
        attaching = self.send("attach")
        self.event("initialized")
        self.ask("configurationDone")
        self._wait(lambda heard: heard.get("request_seq") == attaching)

    def send(self, command: str, **arguments: Any) -> int:
        self._sent += 1
        body = json.dumps({"seq": self._sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._sent

    def ask(self, command: str, **arguments: Any) -> Any:
        number = self.send(command, **arguments)
        answer = self._wait(lambda heard: heard.get("request_seq") == number)
        assert answer["success"], answer
        return answer.get("body")

    def event(self, name: str) -> Any:
        return self._wait(lambda heard: heard.get("event") == name).get("body")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _wait(self, wanted: Any) -> dict[str, Any]:
        while not any(wanted(heard) for heard in self._heard):
            length = 0
            while line := self._file.readline().strip():
                if line.startswith(b"Content-Length:"):
                    length = int(line.split(b":")[1])
            self._heard.append(json.loads(self._file.read(length)))
        found = next(heard for heard in self._heard if wanted(heard))
        self._heard.remove(found)
        return found


CELL = """%%spawn 2 --debugpy -b gloo -m {method} -o out
import debugpy, torch, torch.distributed as dist
x = torch.tensor([float(rank)])
if rank == 1:
    debugpy.wait_for_client()
    breakpoint()
    x += 1
dist.all_reduce(x)
x.item()"""


def ports(user: User) -> dict[int, int]:
    """Read until the view tells of both ranks."""

    def message() -> list[tuple[str, str]]:
        return re.findall(r"rank (\d+) at (\d+)", user.cell.reply.table["text/plain"])

    user.until(lambda: user.cell.reply.saved and len(message()) == 2, "the view tells the ports")
    return {int(rank): int(port) for rank, port in message()}


def test_attach_inspect_assign_step(kernel: Kernel, method: str) -> None:
    user = User(kernel, CELL.format(method=method))
    port = ports(user)[1]
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for rank in kernel.ranks()
        for connection in rank.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", port) in listening and {address for address, _ in listening} == {"127.0.0.1"}
    debugger = Debugger(port)
    debugger.attach()
    thread = debugger.event("stopped")["threadId"]
    frame = debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert frame["line"] == 6
    source = debugger.ask("source", sourceReference=frame["source"]["sourceReference"])["content"]
    assert source.splitlines()[5] == "    breakpoint()"
    assert "1." in debugger.ask("evaluate", expression="x", frameId=frame["id"])["result"]
    debugger.ask("evaluate", expression="x += 100", frameId=frame["id"], context="repl")
    debugger.ask("next", threadId=thread)
    thread = debugger.event("stopped")["threadId"]
    assert debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]["line"] == 7
    debugger.ask("continue", threadId=thread)
    reply = user.cell.wait()
    debugger.close()
    assert reply.status == "ok", reply
    assert kernel.value("list(out)") == [102.0, 102.0]
    assert "debugpy listens" not in reply.table["text/plain"] and not user.cell.reply.prompts


def test_stop_while_the_debugger_holds_a_rank(kernel: Kernel) -> None:
    user = User(kernel, CELL.format(method="forkserver"))
    debugger = Debugger(ports(user)[1])
    debugger.attach()
    debugger.event("stopped")
    kernel.interrupt()
    reply = user.cell.wait()
    debugger.close()
    assert reply.ename == "KeyboardInterrupt"


def test_breakpoint_asks_in_the_cell_while_nobody_is_attached(kernel: Kernel) -> None:
    user = User(kernel, "%%spawn 2 --debugpy -o out\nx = rank\nif rank: breakpoint()\nx")
    assert user.prompt() == "[1] ipdb> "
    user.say("!x = 7", "c")
    assert user.cell.wait().status == "ok"
    assert kernel.value("list(out)") == [0, 7]


def test_nothing_listens_unless_asked_for(kernel: Kernel) -> None:
    assert kernel.execute("from pathlib import Path").status == "ok"
    reply = kernel.execute("%%spawn 2 -o out\nimport psutil\n[c.status for c in psutil.Process().net_connections()]")
    assert reply.status == "ok"
    assert kernel.value("['LISTEN' in each for each in out]") == [False, False]


@pytest.mark.extended
@as_root
def test_other_users_are_turned_away(kernel: Kernel) -> None:
    user = User(kernel, CELL.format(method="forkserver"))
    port = ports(user)[1]
    with another_user():
        stranger = Debugger(port)
    assert stranger._socket.recv(1) == b"", "closed, and no answer"
    stranger.close()
    debugger = Debugger(port)
    debugger.attach()
    thread = debugger.event("stopped")["threadId"]
    debugger.ask("continue", threadId=thread)
    reply = ok(user.cell.wait())
    debugger.close()
    assert "a connection to this rank's debugger was closed: it does not come from" in reply.text()


def user_in_proc(port: int) -> int:
    """Whose the socket with this port of its own is, as Linux says."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return next(int(line.split()[7]) for line in lines if line.split()[1].endswith(f":{port:04X}"))


@as_root
@pytest.mark.parametrize("family, host", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_a_connection_is_its_user_s(family: int, host: str) -> None:
    """Also when its user has closed it: it still delivers what was sent, and Linux says then that it is root's."""

    def connected() -> socket.socket:
        connection = socket.socket(family)
        connection.connect((host, port))
        connection.sendall(b"run this")
        return connection

    with UserOnlyListener() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        door.settimeout(PATIENCE)
        port = door.getsockname()[1]
        with another_user():
            stranger, gone = connected(), connected()
        left = gone.getsockname()[1]
        gone.close()
        wait_until(lambda: user_in_proc(left) == 0, "the system has forgotten whose the closed connection was")
        with stranger, connected() as own:
            connection, address = door.accept()
            connection.close()
            assert address[1] == own.getsockname()[1]


@pytest.mark.parametrize(
    "lacking, says",
    [
        ("from nbspawn._rank.program import connections\ndel connections.other_ends\n"
         "def other_ends(): raise FileNotFoundError('/proc/net/tcp')\nconnections.other_ends = other_ends",
         "--debugpy needs Linux and its /proc/net/tcp"),
        ("import debugpy.server, pydevd\npydevd.PyDB._WaitForConnectionThread.run = lambda self: None",
         "listens in a way that cannot be closed to other users"),
    ],
)  # fmt: skip
def test_no_port_where_users_cannot_be_told_apart(own_kernel: Kernel, lacking: str, says: str) -> None:
    ok(own_kernel.execute(lacking))
    reply = own_kernel.execute("%%spawn 2 --debugpy -m fork\nprint('runs')")
    assert reply.ename == "RankRaisedError" and says in reply.traceback, reply
    assert "runs" not in reply.text()
