"""``--on ssh:…`` with real servers, on hosts that are namespaces of this machine (support/sshd.py)."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
import sshd
from kernels import Kernel, ok, plain, wait_until
from on_hosts import over_ssh
from sshd import Servers
from users import User

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "over_ssh.ipynb"
TRAINING = Path(__file__).parents[1] / "programs" / "digits.py"


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


@pytest.mark.extended
def test_the_same_losses_as_under_torchrun(reached: Kernel, servers: Servers) -> None:
    """To the last digit, on as many hosts."""
    training = TRAINING.read_text()
    lines = servers.torchrun(training)
    reply = ok(reached.execute(f"%%spawn 4 --on ssh:host1,host2 --threads 1\n{training}"))
    ours = [line for rank in range(4) for line in reply.of(rank) if line.startswith("rank ")]
    assert len(lines) == 28 and sorted(ours) == sorted(lines)


@pytest.mark.extended
def test_the_notebook(servers: Servers) -> None:
    """As it was saved, and once more."""
    again = "".join(str(reply.outputs) for reply in over_ssh(NOTEBOOK, servers))
    shown = "".join(str(cell.get("outputs", "")) for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    for whole in (plain(shown.replace("\\x1b", "\x1b")), plain(again.replace("\\x1b", "\x1b"))):
        assert "All is well." in whole and "[0-1] training on host1" in whole
        assert "1 module was sent to host1 (0.1 KB)." in whole
        assert re.search(r"rank \d of 2 \(host1\): RuntimeError: The size of tensor a .* \(line 2\)", whole)
        assert re.search(r"File /\S+/features.py:3, in normalized", whole) and "nbspawn-modules-" not in whole
        assert "[0-1] tensor([3.])" in whole and "[2] (6, 'host2', 'local rank 0 of node 1')" in whole


def test_ipv6(reached: Kernel, servers: Servers) -> None:
    cell = "import os, torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\n"
    reply = ok(reached.execute(f"%%spawn 2 --on ssh:six1,six2 -b gloo\n{cell}int(ones), os.environ['MASTER_ADDR']"))
    assert reply.result == f"[0-1] (2, '{servers.net6}2')"


def test_the_debugger_on_a_host_without_a_way_back(reached: Kernel, servers: Servers) -> None:
    """It lies behind a gate, and knows no route to this machine."""
    route = [*servers.inside(2), "ip", "route"]
    servers.run([*route, "add", "unreachable", f"{servers.net}.1"])
    ok(reached.execute("%%spawn 2 --on ssh:behind -b gloo --keep\nimport torch, torch.distributed as dist\nx = rank"))
    user = User(reached, "%%ranks\ny = torch.ones(1) * (x + 1)\nbreakpoint()\ndist.all_reduce(y)\nint(y)")
    try:
        assert "host2" in user.say("p __import__('socket').gethostname()")
        assert re.search(r"\[0\] +1\n\[1\] +2\n", user.say("all p int(y)"))
        user.say("all n", "all n")
        assert "3" in user.say("p int(y)")
        user.say("all c")
        assert ok(user.cell.wait()).result == "[0-1] 3"
        ok(reached.execute("%ranks stop"))
    finally:
        user.leave()
        servers.run([*route, "del", "unreachable", f"{servers.net}.1"])


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_a_laptop_that_sleeps(reached: Kernel) -> None:
    """For a minute, much longer than a link may be silent."""
    ok(reached.execute("%%spawn 2 --on ssh:host1 --keep\nimport time\nmine = rank"))
    cell = reached.submit("%%ranks\nprint('begun')\ntime.sleep(65)\nmine")
    cell.until_ranks("begun", range(2))
    laptop = psutil.Process(reached.pid)
    asleep = [laptop, *laptop.children(recursive=True)]
    for process in asleep:
        process.suspend()
    time.sleep(60)  # what is tested
    for process in asleep:
        process.resume()
    assert ok(cell.wait(60)).result == "[0] 0\n[1] 1"
    ok(reached.execute("%ranks stop"))


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
    assert code == 1 and lines[2].startswith("FAILED    ssh:refused ("), lines
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
        ("nobody.invalid", r"this machine does not know that name\. ssh says: .*Could not resolve hostname"),
        pytest.param(
            "silent",
            r"it does not answer within 10 s\. ssh says: .*Connection timed out",
            marks=pytest.mark.extended,
        ),
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
