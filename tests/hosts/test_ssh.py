"""``--on ssh:…`` without a server (support/fake_ssh.py): what is sent, what is said, and what ends with what."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from leftovers import gone
from methods import SUPPORT
from nodes import Kept, call

import nbspawn
from nbspawn._engine.cluster import agents, own_modules, relay, sent_packages, ssh
from nbspawn._engine.cluster.ssh import Host, SshHosts
from nbspawn._notebook import arguments

clean = pytest.mark.usefixtures("nothing_left")
FAKE = f"{sys.executable} {SUPPORT}/fake_ssh.py"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSPAWN_SSH", FAKE)


@pytest.fixture
def hosts(workplace: str, client: None) -> Iterator[SshHosts]:
    """Two of them."""
    yield SshHosts("ssh:one,two")
    agents.release()


def relays() -> list[psutil.Process]:
    there = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in there if "near" in child.cmdline()]


# ---------------------------------------------------------------- what is given


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("one", [Host("one", "", sys.executable)]),
        ("me@one:2222/opt/bin/python", [Host("me@one", "2222", "/opt/bin/python")]),
        (
            "one,two/a/python,three",
            [Host("one", "", "/a/python"), Host("two", "", "/a/python"), Host("three", "", sys.executable)],
        ),
        ("[fe80::1%eth0]:22/p", [Host("fe80::1%eth0", "22", "/p")]),
        ("one/~/env/bin/python", [Host("one", "", "/~/env/bin/python")]),
    ],
)
def test_hosts(given: str, found: list[Host]) -> None:
    assert ssh.hosts(f"ssh:{given}") == found
    assert [ssh.hosts(alone) for alone in ssh.singly(f"ssh:{given}")] == [[host] for host in found]


@pytest.mark.parametrize("given", ["", "one,,two", "-oProxyCommand=x", "one two", "one;rm", "one:port"])
def test_what_is_no_host(given: str) -> None:
    with pytest.raises(nbspawn.UsageError, match="is no host: --on ssh:HOST"):
        ssh.hosts(f"ssh:{given}")


def test_as_many_nodes_as_hosts() -> None:
    with pytest.raises(nbspawn.UsageError, match="--nnodes 3, but 'ssh:one,two' names 2 hosts"):
        nbspawn.spawn(abs, nprocs=4, on="ssh:one,two", nnodes=3)
    given = arguments.parse("--nproc-per-node 3 --on ssh:one,two")
    assert arguments.launch_options(given, False).nprocs == 6
    with pytest.raises(nbspawn.UsageError, match="2 nodes need as many ranks at least, got 1"):
        nbspawn.spawn(abs, nprocs=1, on="ssh:one,two")


@pytest.mark.parametrize(
    ("code", "said", "meaning"),
    [
        (255, "Host key verification failed.", "does not know its host key: connect once in a terminal (ssh me@box)"),
        (255, "me@box: Permission denied (publickey).", "Make `ssh me@box true` work without one"),
        (255, "ssh: connect to host box port 22: Connection timed out", "it does not answer within 10 s"),
        (127, "sh: 1: exec: /p: not found", "there is no /p there (sh: 1: exec: /p: not found). Name its interpreter"),
        (
            126,
            "sh: 1: exec: /p: Permission denied",
            "/p cannot be run there (sh: 1: exec: /p: Permission denied). Name",
        ),
        (
            3,
            "warning\nnbspawn: /p is Python 3.9, and the kernel's is 3.11",
            "/p is Python 3.9, and the kernel's is 3.11",
        ),
        (255, "something new", "ssh says: something new"),
        (1, "", "ssh has ended with exit code 1, and has said nothing"),
        (1, "ValueError: invalid literal for int() with base 10: b''", "StdinNull or ForkAfterAuthentication"),
    ],
)
def test_why_there_is_no_agent(code: int, said: str, meaning: str) -> None:
    assert meaning in ssh.explained(Host("me@box", "", "/p"), code, said)


@pytest.mark.parametrize(
    ("code", "said", "meaning"),
    [
        (
            255,
            "a rank's words\nTimeout, server box not responding.\nmore words",
            "ssh says: Timeout, server box not responding.",
        ),
        (0, "a warning\nnbspawn: the agent has ended with signal 9", "the agent has ended with signal 9"),
        (
            0,
            "ImportError: no\nnbspawn: the agent has ended with exit code 1",
            "the agent has ended with exit code 1 (ImportError: no)",
        ),
        (1, "ModuleNotFoundError: No module named 'torch'\nnbspawn: the agent has ended", "/p has no torch there."),
        (-9, "a rank's words", "ssh was killed by signal 9"),
        (255, "a rank's words", ""),
    ],
)
def test_why_an_agent_has_ended(code: int, said: str, meaning: str) -> None:
    found = ssh.lost(Host("me@box", "", "/p"), code, said)
    assert meaning in found and bool(meaning) is bool(found)


# ---------------------------------------------------------------- runs


def everything(rank: int, array: Any) -> Any:
    import torch
    import torch.distributed as dist

    total = torch.ones(1) * rank
    dist.all_reduce(total)
    return float(total), array[rank:], nbspawn.__file__, os.environ["HOME"]


@clean
def test_ranks_on_hosts(hosts: SshHosts) -> None:
    """They meet, large data travel both ways, and nbspawn itself was sent."""
    large = np.arange(3_000_000)
    found = call(hosts, everything, large, backend="gloo")
    for rank, (total, array, file, _) in enumerate(found):
        assert total == 6.0 and np.array_equal(array, large[rank:]) and "/nbspawn-code-" in file
    with pytest.raises(nbspawn.RankRaisedError, match="rank 3 of 4 .*ZeroDivisionError"):
        call(hosts, lambda rank: 1 / (rank - 3))
    with Kept(hosts) as kept:
        kept.execute("mine = rank")
        assert kept.execute("mine") == [0, 1, 2, 3]
    agents.release()
    assert not relays()


@clean
def test_one_host_meets_at_a_file(workplace: str, client: None) -> None:
    one = SshHosts("ssh:one")
    assert call(one, lambda rank: os.environ["MASTER_ADDR"], nprocs=2, backend="gloo") == ["127.0.0.1"] * 2
    agents.release()


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An interpreter with torch and what that requires."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    for distribution in sent_packages.with_required("torch", ["numpy"]):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(str(distribution.locate_file(name)))
    return tmp_path / "bin" / "python"


@clean
def test_a_host_with_python_and_torch_alone(workplace: str, client: None, bare: Path) -> None:
    def there(rank: int) -> list[bool]:
        from importlib.util import find_spec

        return [find_spec(name) is not None for name in ("numpy", "ipykernel", "jedi")]

    host = SshHosts(f"ssh:box{bare}")
    assert call(host, there, nprocs=2) == [[False] * 3] * 2
    with Kept(host, nprocs=2, backend="gloo") as kept:
        assert all("/nbspawn-modules-" in file for file in kept.execute("import IPython; IPython.__file__"))
        with pytest.raises(nbspawn.RankRaisedError, match="rank 1 of 2.*ZeroDivisionError"):
            kept.execute("1 / (rank - 1)")
    agents.release()


@clean
def test_a_host_without_torch(workplace: str, client: None, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    with pytest.raises(nbspawn.StartError, match=r"no agent could be started on box: \S+ has no torch there\. Install"):
        call(SshHosts(f"ssh:box{tmp_path}/bin/python"), abs, nprocs=1)  # type: ignore[arg-type]


@clean
def test_own_modules_are_sent_and_edits_follow(
    hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_modules, "_both", lambda path: ("/not/there",))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "deep.py").write_text("value = 1")

    def value(rank: int) -> tuple[int, str]:
        from package import deep  # type: ignore[import-not-found]

        return deep.value, deep.__file__

    def fail(rank: int) -> None:
        from package import failing  # type: ignore[import-not-found]

        failing.fail()

    for number in (1, 22):
        (tmp_path / "package" / "deep.py").write_text(f"value = {number}")
        for found, path in call(hosts, value):
            assert found == number and "nbspawn-modules-" in path
    with Kept(hosts, autoreload=True) as kept:
        assert kept.execute("from package import deep; deep.value") == [22] * 4
        (tmp_path / "package" / "deep.py").write_text("value = 333")
        assert kept.execute("deep.value") == [333] * 4
    (tmp_path / "package" / "failing.py").write_text("def fail():\n    1 / 0")
    with pytest.raises(nbspawn.RankRaisedError) as caught:
        call(hosts, fail)
    assert 'File "/not/there/package/failing.py", line 2' in str(caught.value), "the name that the user knows"


@clean
def test_what_is_deleted_or_in_another_directory_is_not_there(
    hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_modules, "_both", lambda path: ("/not/there",))
    for folder, name in (("a", "first.py"), ("a", "second.py"), ("b", "third.py")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("")
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "b")

    def there(rank: int) -> list[str]:
        from importlib.util import find_spec

        names = ("first", "second", "third")
        return [name for name in names if find_spec(name)] + os.listdir("linked" if os.path.exists("linked") else ".")

    monkeypatch.chdir(tmp_path / "a")
    assert call(hosts, there) == [["first", "second", "third.py"]] * 4
    (tmp_path / "a" / "first.py").unlink()
    assert call(hosts, there) == [["second", "third.py"]] * 4
    monkeypatch.chdir(tmp_path / "b")
    assert call(hosts, there) == [["third", "third.py"]] * 4


@clean
def test_edits_of_what_a_host_has_of_its_own(
    workplace: str,
    client: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two hosts has a clone of the repository, below its home directory."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nHOME={tmp_path}\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    here, there = tmp_path / "here", tmp_path / "home" / "there"
    for folder in (here, there):
        folder.mkdir(parents=True)
        (folder / "cloned.py").write_text("value = 1")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(own_modules, "_both", lambda path: ("~/there",) if path == str(here) else (path,))

    def value(rank: int) -> tuple[int, str]:
        from cloned import value  # type: ignore[import-not-found]

        return value, os.path.dirname(sys.modules["cloned"].__file__ or "")

    two = SshHosts(f"ssh:one{sys.executable},two{other}")
    (first, path), (second, sent) = call(two, value, nprocs=2)
    assert (first, second, path) == (1, 1, str(there)) and "nbspawn-modules-" in sent
    with Kept(two, nprocs=2, autoreload=True) as kept:
        assert kept.execute("import cloned; cloned.value") == [1, 1]
        (here / "cloned.py").write_text("value = 22")
        assert kept.execute("cloned.value") == [1, 22]
        assert kept.engine.notes[0].startswith("cloned.py has changed here, but")
    for found, path in call(two, value, nprocs=2):
        assert found == 22 and "nbspawn-modules-" in path
    agents.release()


@clean
@pytest.mark.skipif(os.geteuid() != 0, reason="the same directory is closed to the host's user alone")
def test_a_directory_of_another_user_at_the_same_path(
    workplace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as if the host had none."""
    user = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search"
    monkeypatch.setenv("NBSPAWN_SSH", f"{user} {FAKE}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    tmp_path.chmod(0)

    def place(rank: int) -> tuple[str, str]:
        import mine  # type: ignore[import-not-found]

        return os.path.dirname(mine.__file__), os.getcwd()

    for path, here in call(SshHosts("ssh:one"), place, nprocs=2):
        assert "/nbspawn-modules-" in path and here == path
    tmp_path.chmod(0o700)
    agents.release()


@clean
def test_of_too_many_those_that_were_imported(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_modules, "_both", lambda path: ("/not/there",))
    monkeypatch.setattr(own_modules, "MOST_FILES", 2)
    for number in range(4):
        (tmp_path / f"many{number}.py").write_text("")
    importlib.import_module("many1"), importlib.import_module("many2")
    assert call(hosts, lambda rank: sorted(os.listdir())) == [["many1.py", "many2.py"]] * 4
    (tmp_path / "many2.py").unlink()
    assert call(hosts, lambda rank: sorted(os.listdir())) == [["many1.py"]] * 4
    for name in ("many1", "many2"):
        del sys.modules[name]


@clean
def test_a_host_that_cannot_write(
    workplace: str, client: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file size that is limited fails as a full disk does."""
    python = tmp_path / "python"
    monkeypatch.setattr(own_modules, "_both", lambda path: ("/not/there",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.py").write_text("#" * 300_000)
    for blocks, why in (
        (400, "has not taken the notebook's modules: .*too large"),
        (1, "cannot be written to .*large"),
    ):
        python.write_text(f'#!/bin/sh\nulimit -f {blocks}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        with pytest.raises(nbspawn.StartError, match=why):
            call(SshHosts(f"ssh:box{python}"), abs, nprocs=1)  # type: ignore[arg-type]
        agents.release()


@clean
def test_modules_that_a_host_has_are_not_sent(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("")

    def place(rank: int) -> tuple[str, str]:
        import there  # type: ignore[import-not-found]

        return there.__file__, os.getcwd()

    assert call(hosts, place) == [(str(tmp_path / "there.py"), str(tmp_path))] * 4


# ---------------------------------------------------------------- ends


@clean
@pytest.mark.parametrize(
    ("victim", "why"),
    [
        ("near", "the process of this machine that runs ssh has ended"),
        ("sh -c exec", "ssh was killed by signal 9"),
        ("nbspawn._agent", "the agent has ended with signal 9"),
    ],
)
def test_what_is_killed_is_named_and_nothing_is_left(workplace: str, client: None, victim: str, why: str) -> None:
    one = SshHosts("ssh:one")
    with Kept(one, nprocs=2) as kept:
        kept.execute("import time")
        pids = kept.pool.pids()
        family = psutil.Process(relays()[0].pid).children(recursive=True) + relays()
        processes = {
            "near": lambda: relays()[0],
            "sh -c exec": lambda: relays()[0].children()[0],
            "nbspawn._agent": lambda: next(one for one in family if "nbspawn._agent" in one.cmdline()),
        }
        threading.Timer(0.5, processes[victim]().kill).start()
        with pytest.raises(nbspawn.RankExitedError) as caught:
            kept.execute("time.sleep(60)")
        assert why in str(caught.value)
    assert gone([*pids, *(one.pid for one in family)])
    assert call(SshHosts("ssh:one"), abs, nprocs=2) == [0, 1]
    agents.release()


@pytest.mark.parametrize(
    ("path", "quoted"),
    [("/a/b", "/a/b"), ("/a b/$c", "'/a b/$c'"), ("/~/e/python", "~/e/python"), ("/~/e f/python", "~/'e f/python'")],
)
def test_the_path_of_an_interpreter_for_a_shell(path: str, quoted: str) -> None:
    assert f"exec {quoted} -I" in ssh._command(Host("one", "", path))[-1]


@clean
def test_a_server_that_closes_some_of_many_connections(
    workplace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again (MaxStartups)."""
    busy = tmp_path / "busy"
    said = "kex_exchange_identification: read: Connection reset by peer"
    busy.write_text(f'#!/bin/sh\nmkdir {tmp_path}/once && {{ echo "{said}" >&2; exit 255; }}\nexec {FAKE} "$@"\n')
    busy.chmod(0o755)
    monkeypatch.setenv("NBSPAWN_SSH", str(busy))
    assert call(SshHosts("ssh:one"), abs, nprocs=1) == [0]  # type: ignore[arg-type]
    agents.release()


@clean
def test_a_client_that_is_not_there(workplace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSPAWN_SSH", "/no/ssh")
    with pytest.raises(nbspawn.UsageError, match="--on ssh needs OpenSSH's client: there is no /no/ssh here"):
        call(SshHosts("ssh:one"), abs, nprocs=2)  # type: ignore[arg-type]
    monkeypatch.setenv("NBSPAWN_SSH", "ssh 'open")
    with pytest.raises(nbspawn.UsageError, match="NBSPAWN_SSH is .*No closing quotation"):
        call(SshHosts("ssh:one"), abs, nprocs=2)  # type: ignore[arg-type]


@clean
@pytest.mark.parametrize(
    ("python", "why"),
    [("/no/python", "there is no /no/python there"), (f"{SUPPORT}/fake_python", "is Python 2.7, and the kernel's is")],
)
def test_an_interpreter_that_does_not_fit(workplace: str, client: None, python: str, why: str) -> None:
    with pytest.raises(nbspawn.StartError, match=f"no agent could be started on box: .*{why}") as caught:
        call(SshHosts(f"ssh:box{python}"), abs, nprocs=2)  # type: ignore[arg-type]
    assert "Welcome" not in str(caught.value), "what a login prints is not the reason"


# ---------------------------------------------------------------- the relay


class Ends:
    """Two relays, connected by pipes, each in a thread; ``outer`` and ``inner`` are the sockets beyond them."""

    def __init__(self, seconds: float = 10.0) -> None:
        (a, b), (c, d) = os.pipe(), os.pipe()
        pairs = [[socket.socketpair() for _ in range(2)] for _ in range(2)]
        self.outer, self.inner = ([ours for ours, _ in side] for side in pairs)
        self.told, self.over = os.pipe()
        self.why: list[str] = []

        def run(source: int, sink: int, side: int) -> None:
            try:
                relay.Relay(source, sink, [its for _, its in pairs[side]], seconds, self.told).run()
            except relay.Ended as why:
                self.why.append(str(why))
            for fd in (source, sink):
                os.close(fd)
            for _, its in pairs[side]:
                its.close()

        self.threads = [threading.Thread(target=run, args=given) for given in ((a, d, 0), (c, b, 1))]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        for end in (*self.outer, *self.inner):
            end.close()
        for thread in self.threads:
            thread.join()
        os.close(self.told)
        os.close(self.over)


@clean
def test_a_connection_that_is_not_read_holds_up_no_other() -> None:
    ends = Ends()
    large = os.urandom(20_000_000)
    sending = threading.Thread(target=ends.outer[0].sendall, args=(large,))
    sending.start()
    for number in range(50):
        ends.outer[1].sendall(bytes([number]))
        assert ends.inner[1].recv(10) == bytes([number])
        ends.inner[1].sendall(b"back")
        assert ends.outer[1].recv(10) == b"back"
    assert sending.is_alive(), "it waits for the one that does not read"
    found = bytearray()
    while len(found) < len(large):
        found += ends.inner[0].recv(1 << 20)
    sending.join()
    assert found == large
    ends.close()


@clean
def test_what_was_said_last_arrives() -> None:
    ends = Ends()

    def say() -> None:
        ends.inner[0].sendall(b"x" * 3_000_000)
        ends.inner[0].close()

    threading.Thread(target=say).start()
    found = bytearray()
    while part := ends.outer[0].recv(1 << 20):
        found += part
    assert len(found) == 3_000_000
    ends.close()


def test_a_slow_line_has_little_on_its_way() -> None:
    connection = relay._Connection(0, socket.socket())
    for arrived, window in ((0, 1 << 18), (2_000_000, 1_000_000), (100 << 20, 4 << 20)):
        connection.arrived = arrived
        connection.choose_window(2.0)
        assert connection.window == window
    connection.end.close()


@clean
def test_a_silent_other_side_ends_the_relay() -> None:
    (source, held), (not_read, sink) = os.pipe(), os.pipe()
    ours, theirs = socket.socketpair()
    told, over = os.pipe()
    with pytest.raises(relay.Ended, match=r"nothing was heard from the other side for 0.2 s"):
        relay.Relay(source, sink, [theirs], 0.2, told).run()
    for fd in (source, held, not_read, sink, told, over):
        os.close(fd)
    ours.close()
    theirs.close()
