"""Stop frees kept ranks that wait in gloo by ending the connections between ranks, and nobody else's."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import PATIENCE, Kernel, ok, once

CONNECT = """import os, socket
def connect():
    return socket.create_connection(("127.0.0.1", {port}))
of_python = connect()
native = connect().detach()  # known to no object of Python's, as those of libpq and gRPC"""
START = "%%spawn 3 --keep -b gloo -m {method}\nimport torch, torch.distributed as dist"
NOT_TOLD = "def other_ends(): raise FileNotFoundError\nconnections.other_ends = other_ends"
WAIT = "dist.recv(torch.ones(1), (rank + 1) % 3)"


class Server:
    """Holds the other ends of connections, in this process."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]

    def hears(self, *words: str) -> bool:
        """Each of them comes, and nothing else; the end of a connection would be an empty word."""
        missing = {*words}
        while missing and (ready := select.select(self._sockets, [], [], 30)[0]):
            for one in ready:
                if one is self._listener:
                    self._sockets.append(one.accept()[0])
                elif (word := one.recv(100).decode()) in missing:
                    missing.remove(word)
                else:
                    return False
        return not missing

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_rank_stays(kernel: Kernel) -> Iterator[None]:
    yield
    kernel.execute("%ranks stop")


def stop_while_all_wait(kernel: Kernel, code: str, sign: str = "◍ waiting") -> None:
    """Run it in three ranks, press Stop when the table shows the sign for each, and find them alive."""
    before = ok(kernel.execute("%%ranks\nimport os; os.getpid()")).result
    cell = kernel.submit(f"%%ranks -g 60\n{code}")
    cell.read_until(
        lambda: cell.reply.outputs and cell.reply.table["text/plain"].count(sign) == 3, "all wait", PATIENCE
    )
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert ok(kernel.execute("%%ranks\nos.getpid()")).result == before, cell.reply


def test_connections_to_others_live_on(kernel: Kernel, server: Server, method: str) -> None:
    """The notebook's, which forked ranks inherit, and the ranks' own."""
    connect = CONNECT.format(port=server.port)
    ok(kernel.execute(connect))
    ok(kernel.execute(START.format(method=method)))
    ok(kernel.execute(f"%%ranks\n{connect}"))
    stop_while_all_wait(kernel, WAIT)
    ok(kernel.execute("%%ranks\nof_python.send(b'%d' % rank), os.write(native, b'%d, native' % rank)"))
    ok(kernel.execute("of_python.send(b'kernel'), os.write(native, b'kernel, native')"))
    senders = "0", "1", "2", "kernel"
    assert server.hears(*senders, *(f"{sender}, native" for sender in senders))
    assert ok(kernel.execute("%%ranks\nt = torch.ones(1); dist.all_reduce(t)\nt.item()")).result == "[0-2] 3.0"
    ok(kernel.execute("of_python.close(), os.close(native)"))


@pytest.mark.extended
def test_where_the_system_does_not_tell_who_is_at_the_other_end(kernel: Kernel, server: Server) -> None:
    """As macOS does not. What a rank has inherited stays, and so do Python's sockets."""
    ok(kernel.execute(CONNECT.format(port=server.port)))
    ok(kernel.execute(START.format(method="fork")))
    ok(kernel.execute(f"%%ranks\nfrom nbspawn._rank.program import connections\n{NOT_TOLD}"))
    ok(kernel.execute(f"%%ranks\nimport socket; of_python = socket.create_connection(('127.0.0.1', {server.port}))"))
    stop_while_all_wait(kernel, WAIT)
    ok(kernel.execute("%%ranks\nof_python.send(b'%d' % rank)"))
    ok(kernel.execute("of_python.send(b'kernel'), os.write(native, b'kernel, native')"))
    assert server.hears("0", "1", "2", "kernel", "kernel, native")
    ok(kernel.execute("of_python.close(), os.close(native)"))


GROUPS = {
    "subgroup": ("dist.init_process_group('gloo')\npair = dist.new_group([0, 1])",
                 "dist.recv(torch.ones(1), 1 - rank, pair) if rank < 2 else dist.barrier()"),
    "store of rank 0": ("dist.init_process_group('gloo', 'tcp://127.0.0.1:{port}', rank=rank, world_size=3)", WAIT),
    "rank 0 waits for its own store": (
        "", "dist.init_process_group('gloo', 'tcp://127.0.0.1:{port}', rank=min(rank, 1), world_size=3)"),
}  # fmt: skip


@once
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_the_cell_s_own(kernel: Kernel, group: str, method: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    make, wait = (code.format(port=port) for code in GROUPS[group])
    ok(kernel.execute(f"%%spawn 3 --keep -m {method}\nimport torch, torch.distributed as dist\n{make}"))
    stop_while_all_wait(kernel, wait)


MEET = """%%spawn 3 --keep -m {method}
import datetime, torch, torch.distributed as dist
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(hostname="::1")]
options._timeout = datetime.timedelta(minutes=10)
group = dist.ProcessGroupGloo(dist.FileStore("{store}", 3), rank, 3, options)"""


@pytest.mark.extended
@once
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_gloo_over_ipv6(kernel: Kernel, method: str, tmp_path: Path) -> None:
    ok(kernel.execute(MEET.format(method=method, store=tmp_path / "store")))
    stop_while_all_wait(kernel, "group.recv([torch.ones(1)], (rank + 1) % 3, 0).wait()", sign="group.recv(")
