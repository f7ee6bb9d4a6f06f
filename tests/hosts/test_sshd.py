"""``--on ssh:…`` with real servers, on hosts that are namespaces of this machine (support/sshd.py)."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import sshd
from kernels import Kernel, ok, wait_until
from sshd import Servers


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Where there can be no hosts these tests are skipped, but not by root on CI, where that would go unnoticed."""
    reason = sshd.missing()
    if reason and "CI" in os.environ and os.geteuid() == 0:
        pytest.fail(reason)
    elif reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Two, as hardened as the CIS benchmark demands: no forwarding of any kind, one session a connection."""
    with Servers(2, "DisableForwarding yes\nMaxSessions 1") as servers:
        yield servers


@pytest.fixture
def reached(kernel: Kernel, servers: Servers) -> Iterator[Kernel]:
    ok(kernel.execute(f"import os\nos.environ['NBSPAWN_SSH'] = {servers.client!r}"))
    yield kernel
    ok(kernel.execute("%ranks release\ndel os.environ['NBSPAWN_SSH']"))


def test_a_cell_over_two_hosts(reached: Kernel, servers: Servers) -> None:
    cell = "import socket, torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\n"
    cell += "int(ones), socket.gethostname(), os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME']"
    reply = ok(reached.execute(f"%%spawn 4 --on ssh:host1,host2 -b gloo\n{cell}"))
    first = servers.address_of(1)
    assert reply.result == f"[0-1] (4, 'host1', '{first}', 'eth0')\n[2-3] (4, 'host2', '{first}', 'eth0')"
    reply = reached.execute(
        "%%spawn 4 --on ssh:host1,host2 -b gloo\nimport torch.distributed as dist\n"
        "if rank == 3: {}['hieght']\ndist.barrier()"
    )
    assert reply.evalue.startswith("rank 3 of 4 (host2): "), reply


def test_a_firewall_between_hosts(reached: Kernel, servers: Servers) -> None:
    """ssh reaches both, and they do not reach each other."""
    first = servers.address_of(1)
    servers.run([*servers.inside(2), "ip", "route", "add", "unreachable", first])
    for hosts in ("host2,host1", "host1,host2"):
        reply = reached.execute(f"%%spawn 2 --on ssh:{hosts}\nrank")
        assert " does not reach host" in reply.evalue
        assert "allow that in the firewall between them" in reply.evalue
    assert (
        f"host2 does not reach host1 at {first}, port " in reached.execute("%%spawn 2 --on ssh:host2,host1\n1").evalue
    )
    servers.run([*servers.inside(2), "ip", "route", "del", "unreachable", first])


@pytest.mark.extended
def test_a_check_of_hosts(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSPAWN_SSH", servers.client)

    def check(hosts: str) -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "nbspawn", "--check", "--on", f"ssh:{hosts}"]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = re.sub(r"\(\S+ s\)", "()", done.stdout).splitlines()
        return done.returncode, [line for line in lines if not line.startswith("Starting agents")]

    code, lines = check("host1,host2")
    assert code == 0 and lines[-1] == "All is well.", lines
    assert re.fullmatch(r" +host1: Python [\d.]+, torch \S+, \d+ CPUs, 0 GPUs", lines[1]), lines
    assert "ok        Who reaches whom ()" in lines and "ok        An all_reduce of all, by gloo ()" in lines
    code, lines = check("host1,refused")
    assert code == 1 and lines[2].startswith("FAILED    ssh:refused/"), lines
    assert "it refuses the login: " in lines[3] and lines[-1] == "1 of 2 checks have failed."


def test_a_laptop_and_one_host(reached: Kernel) -> None:
    """Kept ranks, Stop, and the table."""
    ok(reached.execute("%%spawn 2 --on ssh:host2 -b gloo --keep\nimport time\nmine = rank"))
    cell = reached.submit("%%ranks\nprint('begun')\ntime.sleep(600)")
    cell.until_ranks("begun", range(2))
    reached.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert ok(reached.execute("%%ranks\nmine")).result == "[0] 0\n[1] 1"
    ok(reached.execute("%ranks stop"))


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("refused", r"it refuses the login: .*Make `ssh refused true` work .*ssh says: .*Permission denied"),
        ("unknown", r"this machine does not know its host key: connect once in a terminal \(ssh unknown\)"),
        ("changed", r"its host key is not the one that this machine knows.*ssh says: .*CHANGED"),
        ("closed", r"no SSH server listens there\. ssh says: .*Connection refused"),
        ("nowhere", r"there is no route to it\. ssh says: .*No route to host"),
        ("host1/no/python", r"there is no /no/python there .*--on ssh:host1/path/to/python"),
        ("host1,refused", r"it refuses the login"),
    ],
)
def test_each_refusal_ends_with_what_ssh_says(reached: Kernel, host: str, why: str) -> None:
    count = host.count(",") + 1
    reply = reached.execute(f"%%spawn {count} --on ssh:{host}\nrank")
    refusing = host.split(",")[-1].partition("/")[0]
    assert re.match(rf"no agent could be started on {refusing}: {why}", reply.evalue, re.DOTALL), reply


def test_what_dies_is_named_and_nothing_is_left(reached: Kernel, servers: Servers) -> None:
    """The server's process on one host; the last test: then the link to one."""
    for host, lose in ((1, lambda: living(servers, 1, "@notty")[0].kill()), (2, lambda: servers.cut(2))):
        ok(reached.execute(f"%%spawn 2 --on ssh:host{host} --keep\nimport time"))
        cell = reached.submit("%%ranks\nprint('begun')\ntime.sleep(600)")
        cell.until_ranks("begun", range(2))
        lose()
        assert f"its node host{host} was lost" in cell.wait(60).evalue
        if host == 1:
            wait_until(lambda: not living(servers, 1, "nbspawn"), "the agent ends")


def living(servers: Servers, host: int, word: str) -> list[psutil.Process]:
    """The processes there in whose command the word is."""
    found = []
    for process in psutil.Process(servers.pid(host)).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline()):
                found.append(process)
    return found
