"""Ranks on several nodes: agents that are processes of this machine, each a node (support/nodes.py)."""

from __future__ import annotations

import errno
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import rank_functions as ranks
import torch
from leftovers import alive, gone, marked_pids, until
from methods import PATIENCE, SUPPORT
from nodes import Kept, Processes, call
from packaging.version import Version

import nbspawn
from nbspawn._engine.cluster import agents
from nbspawn._engine.cluster.door import Door
from nbspawn._engine.cluster.link import Link
from nbspawn._engine.jobs import CellJob, FunctionJob
from nbspawn._engine.kernel.directories import run_directories
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol import connection, plain
from nbspawn._protocol.agents import FromAgent, Reported, WithBuffers
from nbspawn._protocol.messages import InputReply, RunCell
from nbspawn._protocol.questions import COLLECTIVES, MEMORY
from nbspawn._session.background import BackgroundRun
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.tensor_diff import Tolerance
from nbspawn._session.views import StreamView

clean = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def nodes(workplace: str) -> Iterator[Processes]:
    """Two nodes, whose agents stay for all tests."""
    starter = Processes(2)
    call(starter, places)  # with the first run come fork servers and guardians, which stay
    yield starter
    agents.release()


def places(rank: int) -> tuple[int, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return rank, *(int(os.environ[name]) for name in names)


def sum_of_ranks(rank: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = torch.ones(1) * rank
    dist.all_reduce(found)
    return float(found)


@clean
def test_ranks_are_numbered_over_nodes_as_torchrun_does(nodes: Processes) -> None:
    assert call(nodes, places, nprocs=5) == [
        (0, 0, 5, 0, 3, 0, 2),
        (1, 1, 5, 1, 3, 0, 2),
        (2, 2, 5, 2, 3, 0, 2),
        (3, 3, 5, 0, 2, 1, 2),
        (4, 4, 5, 1, 2, 1, 2),
    ]


@clean
def test_ranks_of_all_nodes_meet(nodes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(nodes, sum_of_ranks) == [6.0] * 4
    assert call(nodes, ranks.succeed, backend="gloo") == [None] * 4


@clean
def test_what_they_print_is_shown_with_the_rank(nodes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    call(nodes, lambda rank: print(f"this is {rank}"))
    shown = capsys.readouterr().out
    assert all(f"[{rank}]" in shown and f"this is {rank}" in shown for rank in range(4))


@clean
def test_the_peak_memory_of_each_is_known(nodes: Processes) -> None:
    view = StreamView()
    pool = Pool(LaunchOptions(nprocs=4, on=nodes))
    pool.run(FunctionJob(ranks.use_for_a_moment, (200_000_000,)), CommandOptions(view=view))
    assert all(rank.peak_memory is not None and rank.peak_memory > 200e6 for rank in view.run.ranks)


@clean
def test_large_arguments_and_results(nodes: Processes) -> None:
    """Over the other connection; several stripes, and values of several sizes."""
    large = np.arange(20_000_000, dtype=np.int64)
    found = call(nodes, lambda rank, given: (given[rank:] * 2, "small", rank), large)
    for rank, (array, small, number) in enumerate(found):
        assert small == "small" and number == rank and np.array_equal(array, large[rank:] * 2)


@clean
def test_the_error_names_rank_and_host_and_ends_the_others(nodes: Processes) -> None:
    def fail(rank: int) -> None:
        if rank == 2:
            print("last words")
            raise KeyError("hieght")
        threading.Event().wait()

    with pytest.raises(nbspawn.RankRaisedError) as caught:
        call(nodes, fail)
    assert str(caught.value).startswith(f"rank 2 of 4 ({socket.gethostname()}): KeyError: 'hieght'")
    assert (caught.value.rank, caught.value.node, caught.value.host) == (2, 1, socket.gethostname())
    assert Path(caught.value.log_path).read_text() == "last words\n", "a copy, on this machine"
    assert re.search(rf"Full logs: {socket.gethostname()}:/\S+, {socket.gethostname()}:/\S+ \(until", str(caught.value))


def test_a_rank_that_is_killed_has_its_number_in_the_run(nodes: Processes) -> None:
    """On its node it has another one."""

    def die(rank: int) -> None:
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(nbspawn.RankExitedError) as caught:
        call(nodes, die)
    assert caught.value.summary.startswith(f"rank 3 of 4 ({socket.gethostname()}): process 3 terminated with signal")


class Typist:
    """Types these lines at prompts, and remembers what was asked."""

    present = True

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def ask(self, prompt: str, password: bool) -> InputReply:
        return InputReply("text", self.lines.pop(0))

    def actions(self) -> tuple[()]:
        return ()


@clean
def test_of_the_end_the_kernel_hears_after_the_value(nodes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a large one takes: the run would be over without it."""
    heard: dict[int, list[str]] = {0: [], 1: []}
    received = Link._received

    def watched(link: Link, body: bytes) -> None:
        message = plain.loaded(FromAgent, body)
        if isinstance(message, WithBuffers):
            heard[link.node].append("value")
        elif isinstance(message, Reported) and message.status.finished:
            heard[link.node].append("end")
        received(link, body)

    with Kept(nodes, nprocs=2) as kept:
        monkeypatch.setattr(Link, "_received", watched)
        values = kept.pool.run(FunctionJob(lambda rank: bytes(1_000_000)))
    assert list(map(len, values)) == [1_000_000] * 2
    assert [kinds[:2] for kinds in heard.values()] == [["value", "end"]] * 2


@clean
def test_a_value_is_compared_over_nodes(nodes: Processes) -> None:
    with Kept(nodes, backend="gloo") as kept:
        kept.execute("import torch\nx = {'a': torch.zeros(1_000_000), 'b': rank // 2}")
        kept.execute("x['a'][:] = 2", only=[3])
        found = kept.pool.compare(range(4), "x", Tolerance())
        assert [one["groups"] for one in found.differing] == [[[0, 1, 2], [3]], [[0, 1], [2, 3]]]
        assert found.differing[0]["closer"][0]["count"] == 1_000_000
        written: list[str] = []
        typist = Typist("diff x", "diff missing", "all c")
        kept.pool.command_options = CommandOptions(view=StreamView(written.append, typist))
        kept.execute("torch.distributed.barrier()\nbreakpoint()")
        text = "".join(written)
        assert f"{found}\n" in text and "[0-3] *** NameError: name 'missing' is not defined" in text


def test_a_session_keeps_variables_over_nodes(nodes: Processes) -> None:
    with Kept(nodes, backend="gloo") as kept:
        kept.execute("import torch, torch.distributed as dist\nkept = torch.ones(1) * rank")
        assert kept.execute("dist.all_reduce(kept)\nfloat(kept)") == [6.0] * 4
        assert kept.execute("float(kept) + pushed.sum()", pushed=np.ones(3_000_000)) == [3_000_006.0] * 4
        assert kept.execute("rank", only=[1, 3]) == [1, 3]
        assert [reading.peak_memory >= reading.memory > 0 for reading in kept.engine.usage()] == [True] * 4
        assert len(set(kept.pool.pids())) == 4 and all(map(alive, kept.pool.pids()))
        pids = kept.pool.pids()
    assert gone(pids)


def test_an_edited_module_reaches_the_ranks_of_each_node(nodes: Processes, tmp_path: Path) -> None:
    """The kernel has not imported it, and each node looks at its own disk."""
    file = tmp_path / "edited_on_nodes.py"
    file.write_text("def answer():\n    return 1\n")
    with Kept(nodes, autoreload=True) as kept:
        kept.execute(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom edited_on_nodes import answer")
        assert kept.execute("answer()") == [1] * 4
        file.write_text("def answer():\n    return 'edited'\n")
        assert kept.execute("answer()", only=[1, 2]) == ["edited"] * 2
        assert kept.execute("answer()") == ["edited"] * 4
        file.write_text("1 / 0")
        with pytest.raises(nbspawn.RankRaisedError, match="ZeroDivisionError"):
            kept.execute("answer()")
    assert "edited_on_nodes" not in sys.modules


def test_an_error_in_one_rank_releases_a_barrier_over_nodes_and_costs_no_rank(nodes: Processes) -> None:
    with Kept(nodes, backend="gloo") as kept:
        kept.execute("import torch.distributed as dist\nkept = rank")
        with pytest.raises(nbspawn.RankRaisedError, match="rank 1 of 4 .*the real one"):
            kept.execute("if rank == 1: raise ValueError('the real one')\ndist.barrier()")
        assert kept.execute("dist.barrier()\nkept") == [0, 1, 2, 3]
        assert kept.pool.regrouped


@pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch has no recorder for gloo")
def test_ranks_on_all_nodes_tell_of_their_collectives_and_their_memory(nodes: Processes) -> None:
    with Kept(nodes, backend="gloo") as kept:
        kept.execute("import time, torch, torch.distributed as dist\ndist.barrier()\nkept = torch.ones(1_000_000)")
        idle = kept.pool.ask(COLLECTIVES)
        assert [report.rank for report in idle.values()] == [0, 1, 2, 3]
        assert [[call.name for call in report.groups[0].calls][-1] for report in idle.values()] == ["barrier"] * 4
        assert [report.tensors for report in kept.pool.ask(MEMORY).values()] == [4_000_000] * 4
        lines = "if rank == 3:\n    time.sleep(600)\ndist.all_reduce(torch.ones(2))"
        job = CellJob(RunCell(lines, "<waits>", transformed=lines), {})
        background = kept.pool.perform(job, None, None, in_background=True)
        assert isinstance(background, BackgroundRun)
        said = "all_reduce float32[2] (line 3): ranks 0-2 are in it, rank 3 has not reached it"
        assert until(lambda: said in background.supervisor.report("collectives").text)
        background.cancel()
        assert isinstance(background.exception(30), KeyboardInterrupt)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.extended
def test_logs_are_copied_from_their_nodes(nodes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    with Kept(nodes) as kept:
        kept.execute("for line in range(200_000): print('line', line, 'of', rank)")
        with monkeypatch.context() as full:
            full.setattr(run_directories, "new", no_space)
            assert kept.pool.log_path(3) == kept.engine.log_path(3)
        for rank in (0, 3):
            lines = Path(kept.pool.log_path(rank)).read_text().splitlines()
            assert lines == [f"line {line} of {rank}" for line in range(200_000)]
        os.unlink(kept.engine.log_path(3).partition(":")[2])
        assert kept.pool.log_path(3) == kept.engine.log_path(3), "it is lost, and nothing else is said of it"


@pytest.mark.extended
def test_nodes_are_asked_while_a_run_in_the_background_is_watched(nodes: Processes) -> None:
    with Kept(nodes) as kept:
        kept.execute("import time")
        job = CellJob(RunCell("for _ in range(10_000): print(rank)\ntime.sleep(600)", "<sleeps>"), {})
        background = kept.pool.perform(job, None, None, in_background=True)
        assert isinstance(background, BackgroundRun)
        assert until(lambda: all(rank.spot("<sleeps>") for rank in background.run.ranks))
        for _ in range(20):
            assert background.supervisor.report("stacks").text.count("Ranks 0-3") == 1
            assert len(kept.pool.memory()) == 4
        background.cancel()
        assert isinstance(background.exception(30), KeyboardInterrupt)


@pytest.mark.extended
def test_the_first_failure_is_found_on_nodes_whose_clocks_differ(workplace: str, tmp_path: Path) -> None:
    """Machines count from their own boot."""
    shifted = ["unshare", "--time", "--monotonic", "-5000" if time.monotonic() > 6000 else "5000", sys.executable]
    if subprocess.run([*shifted, "-c", ""], capture_output=True).returncode:
        pytest.skip("only root may have a clock of its own")
    starter = Processes(2, commands={1: shifted})

    def fail(rank: int, first: int) -> None:
        if rank == first:
            (tmp_path / f"{first}").touch()
            raise KeyError("the cause")
        if rank == 2 - first:
            with suppress(KeyboardInterrupt):  # it may come before
                while not (tmp_path / f"{first}").exists():
                    time.sleep(0.001)
                time.sleep(0.05)
            raise ValueError("a consequence")
        threading.Event().wait()

    try:
        for first in (0, 2):
            with pytest.raises(nbspawn.RankRaisedError, match=f"rank {first} of 4 .*the cause") as caught:
                call(starter, fail, first)
            (other,) = (one for one in caught.value.others if "a consequence" in one.what)
            assert other.rank == 2 - first and other.time < time.monotonic()
            assert "at the same time" not in str(caught.value)
    finally:
        agents.release()


def test_stop_over_nodes(nodes: Processes) -> None:
    with Kept(nodes) as kept:
        kept.execute("import time; kept = rank")
        begun = threading.Event()

        class Watching(StreamView):
            def show(self, run: Any, events: Any) -> None:
                super().show(run, events)
                if all(rank.position.frames for rank in run.ranks) and not begun.is_set():
                    begun.set()
                    os.kill(os.getpid(), signal.SIGINT)

        job = CellJob(RunCell("time.sleep(60)", "<sleeps>"), {})
        with pytest.raises(KeyboardInterrupt) as caught:
            kept.pool.run(job, CommandOptions(view=Watching()))
        assert "Ranks 0-3 were at line 1" in str(caught.value)
        assert kept.execute("kept") == [0, 1, 2, 3]


@pytest.mark.extended
@clean
def test_an_agent_that_is_killed_is_named_and_its_peers_end(workplace: str) -> None:
    starter = Processes(2)
    try:
        with Kept(starter) as kept:
            kept.execute("import time; kept = rank")
            pids = kept.pool.pids()
            os.kill(starter.agents[1].pid, signal.SIGKILL)
            with pytest.raises(
                nbspawn.RankExitedError, match=f"rank 2 of 4 .*its node {socket.gethostname()} was lost"
            ):
                kept.execute("time.sleep(60)")
            assert gone(pids[2:])
        assert gone(pids)
        assert call(starter, places)[3][0] == 3  # with new agents
    finally:
        agents.release()


@pytest.mark.extended
@clean
def test_an_agent_that_dies_between_two_runs_costs_nothing(workplace: str) -> None:
    starter = Processes(2)
    try:
        call(starter, places)
        first = starter.agents[1]
        first.kill()
        first.wait()
        assert call(starter, places)[3][0] == 3
        assert starter.agents[1] is not first
    finally:
        agents.release()


@pytest.mark.extended
def test_all_ends_with_the_kernel(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from nodes import Kept, Processes, call
import rank_functions as ranks

from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.options import LaunchOptions
from nbspawn._session.pool import Pool
if __name__ == "__main__":
    job = FunctionJob(ranks.stuck_in_c_with_grandchild, ({str(tmp_path)!r},))
    Pool(LaunchOptions(nprocs=4, on=Processes(2))).run(job)
"""
    )
    kernel = subprocess.Popen([sys.executable, os.fspath(script)])
    assert until(lambda: len(list(tmp_path.glob("pids-*"))) == 4)
    there = {*marked_pids(tmp_path), *(child.pid for child in psutil.Process(kernel.pid).children(recursive=True))}
    kernel.kill()
    kernel.wait()
    assert gone(there)


def prints_until(rank: int, folder: str) -> int:
    lines = 0
    while not os.path.exists(f"{folder}/enough"):
        print(rank, "x" * 9000)
        Path(folder, f"running-{rank}").touch()
        time.sleep(0.0005)
        lines += 1
    return lines


@pytest.mark.extended
def test_a_kernel_that_is_stopped_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """Connections with data that is not read are ended by the system after some seconds, if they have a timeout."""
    script = tmp_path / "kernel.py"
    script.write_text(
        f"""
import sys
sys.path[:0] = [{str(SUPPORT)!r}, {os.fspath(Path(__file__).parent)!r}]
from test_nodes import *
if __name__ == "__main__":
    lines = call(Processes(2), prints_until, {str(tmp_path)!r}, nprocs=2)
    print("all", sum(lines), file=sys.stderr)
"""
    )
    command = [sys.executable, os.fspath(script)]
    # Unbuffered, Python's text streams pass over short writes, such as that to a full pipe when SIGSTOP interrupts it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as kernel:
        assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
        os.kill(kernel.pid, signal.SIGSTOP)
        time.sleep(9)  # longer than a lost host needs to be noticed
        os.kill(kernel.pid, signal.SIGCONT)
        (tmp_path / "enough").touch()
        shown, said = kernel.communicate(timeout=150)
    lines = re.search(r"^all (\d+)$", said, re.M)
    assert lines is not None, said
    assert shown.count("x" * 9000) == int(lines[1])


@pytest.mark.extended
@clean
def test_idle_agents_give_their_nodes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_IDLE_SECONDS", 0.1)
    starter = Processes(1)
    assert call(starter, places, nprocs=1) == [(0, 0, 1, 0, 1, 0, 1)]
    assert until(lambda: not agents._all and not starter.agents)


@clean
def test_an_idle_agent_that_has_just_ended_is_started_anew(workplace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody knows of its end yet."""
    monkeypatch.setattr(agents.Agents, "look_after", lambda self: None)
    starter = Processes(2)
    call(starter, places)
    starter.agents[1].kill()
    starter.agents[1].wait()
    assert call(starter, places)[3][0] == 3
    agents.release()


@pytest.mark.extended
def test_a_start_that_a_node_refuses_is_an_error_and_the_next_run_works(nodes: Processes) -> None:
    call(nodes, places)
    agent = psutil.Process(nodes.agents[1].pid)
    usual = agent.rlimit(psutil.RLIMIT_NOFILE)
    agent.rlimit(psutil.RLIMIT_NOFILE, (50, usual[1]))
    try:
        message = rf"started on {socket.gethostname()}: 2 ranks need \d+ open files"
        with pytest.raises(nbspawn.StartError, match=message):
            call(nodes, places)
    finally:
        agent.rlimit(psutil.RLIMIT_NOFILE, usual)
    pids = {one.pid for one in nodes.agents.values()}
    assert call(nodes, places)[3][0] == 3 and {one.pid for one in nodes.agents.values()} == pids


@pytest.mark.extended
@clean
def test_an_agent_that_freezes_costs_its_run_and_not_the_next(workplace: str) -> None:
    """What its ranks say later is not for the next run."""
    starter = Processes(2)
    try:
        with Kept(starter) as kept:
            pids = kept.pool.pids()
            frozen = starter.agents[1]
            frozen.send_signal(signal.SIGSTOP)
        frozen.send_signal(signal.SIGCONT)
        assert gone(pids)
        assert call(starter, places)[3][0] == 3
    finally:
        agents.release()


# ---------------------------------------------------------------- agents that do not come


_WITH_GPUS = """
import runpy, sys, torch
from nbspawn._accelerators.cuda import Cuda
from nbspawn._engine import devices
torch.version.cuda = "12.8"
Cuda._has_driver = lambda self: True
Cuda._all = lambda self: 4
devices._available = lambda: ["gloo", "nccl"]
sys.argv[:] = sys.argv[2:]
runpy.run_module("nbspawn._agent", run_name="__main__")
"""
"""Runs an agent on a machine with four GPUs, as far as it knows."""


@pytest.mark.extended
@clean
def test_gpus_of_nodes(workplace: str) -> None:
    """What fits to them is decided there: the kernel may have another build of torch."""

    def backend(rank: int) -> str:
        import torch.distributed as dist

        return dist.get_backend()

    with_gpus = (sys.executable, "-c", _WITH_GPUS)
    assert call(Processes(2, commands={1: with_gpus}), backend, backend="auto") == ["gloo"] * 4
    agents.release()
    seen = call(Processes(2, with_gpus), lambda rank: os.environ["CUDA_VISIBLE_DEVICES"], devices=[1, 3])
    assert seen == ["1,3"] * 4
    with pytest.raises(
        nbspawn.StartError, match="no ranks could be started on .*: --devices 7: there are CUDA devices"
    ):
        call(Processes(2, with_gpus), abs, devices=[7], backend="auto")  # type: ignore[arg-type]
    if not torch.distributed.is_nccl_available():
        with pytest.raises(nbspawn.RankRaisedError, match="NCCL"):
            call(Processes(2, with_gpus), backend, backend="auto")
        with pytest.raises(nbspawn.StartError, match="no ranks could be started on .*: nccl needs GPUs, and this"):
            call(Processes(2), backend, backend="nccl")
    agents.release()


@clean
def test_an_agent_that_does_not_start_is_an_error() -> None:
    with pytest.raises(
        nbspawn.StartError, match="no agent could be started on node 0: its process ended with exit code 1"
    ):
        agents.connected(Processes(2, ["/bin/false"]))


@clean
def test_one_agent_of_two_does_not_start(workplace: str) -> None:
    starter = Processes(2, commands={1: ["/bin/false"]})
    with pytest.raises(
        nbspawn.StartError, match="no agent could be started on node 1: its process ended with exit code 1"
    ):
        agents.connected(starter)
    assert not starter.agents


@clean
def test_a_node_with_other_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Processes(1)
    monkeypatch.setattr(nbspawn, "__version__", "9.9")
    with pytest.raises(nbspawn.StartError, match=rf"the node {socket.gethostname()} has nbspawn .* \(here 9.9\)"):
        agents.connected(starter)


Arrived = dict[int, Mapping[bytes, socket.socket]]


@pytest.fixture
def door() -> Iterator[tuple[Door, bytes, Arrived, Callable[[Callable[[], object]], None]]]:
    """A door for four nodes, its token, who has arrived, and what has it work until something has happened."""
    arrived: Arrived = {}
    token = secrets.token_bytes(32)
    with selectors.DefaultSelector() as selector:
        door = Door("127.0.0.1", token, 4, selector, arrived.__setitem__)

        def work(until: Callable[[], object]) -> None:
            end = time.monotonic() + PATIENCE
            while not until():
                assert time.monotonic() < end
                for key, _ in selector.select(0.05):
                    key.data()

        try:
            yield door, token, arrived, work
        finally:
            door.close()
            for parts in arrived.values():
                for one in parts.values():
                    one.close()


def enter(door: Door, token: bytes, node: int, refused: list[BaseException]) -> threading.Thread:
    """Connect as that node's agent does, in a thread; it ends with a refusal, or when all connections are there."""

    def connect() -> None:
        try:
            for purpose in connection.PURPOSES:
                connection.connect(door.address, token, purpose, node).close()
        except (OSError, EOFError) as refusal:
            refused.append(refusal)

    thread = threading.Thread(target=connect)
    thread.start()
    return thread


@clean
def test_nobody_gets_in_without_the_token(door: Any) -> None:
    door, token, arrived, work = door
    refused: list[BaseException] = []
    for with_token, node in ((secrets.token_bytes(32), 2), (token, 4), (token, 3)):
        thread = enter(door, with_token, node, refused)
        work(lambda thread=thread: not thread.is_alive())
        thread.join()
    work(lambda: 3 in arrived)
    assert list(arrived) == [3] and set(arrived[3]) == set(connection.PURPOSES)
    assert len(refused) == 1, "and who claims to be another node is let out without a word"


@clean
def test_strangers_hold_nobody_up(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who say nothing, a little, or nonsense; and they do not stay."""
    door, token, arrived, work = door
    with ExitStack() as held:
        strangers = [held.enter_context(socket.create_connection(door.address)) for _ in range(300)]
        for number, stranger in enumerate(strangers):
            stranger.sendall((b"", b"C", b"GET / HTTP/1.0\r\n\r\n" * 10)[number % 3])
        threads = [enter(door, token, node, []) for node in range(4)]
        work(lambda: len(arrived) == 4)
        for thread in threads:
            thread.join()
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 11)
        door.dismiss_late()
        for stranger in strangers:
            stranger.settimeout(PATIENCE)
            with suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass


@clean
def test_an_agent_does_not_trust_whoever_answers() -> None:
    """Whoever listens at the kernel's old port could have it run a pickle."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            one, _ = listener.accept()
            with one:
                one.sendall(bytes(32))
                connection.receive_exactly(one, 5 + 32 + 32)
                one.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError, match="does not know this run's token"):
            connection.connect(listener.getsockname(), bytes(32), connection.BULK, 0)
        thread.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_method": "fork"}, "-m fork is for ranks on this machine"),
        ({"devices": [0], "on": "ray", "nnodes": 2}, "--devices is not for ray: the cluster assigns the GPUs"),
        ({"debugpy": True}, "breakpoint\\(\\) works on all nodes"),
        ({"log_dir": "logs"}, "stay on their nodes"),
        ({"nprocs": 1}, "2 nodes need as many ranks at least, got 1"),
        ({"nprocs": "gpu"}, "the number of ranks has to be given"),
        ({"backend": "xla"}, "-b xla is for ranks on this machine"),
    ],
)
def test_what_several_machines_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(nbspawn.UsageError, match=message):
        Pool(LaunchOptions(**{"nprocs": 4, "on": Processes(2), **options}))
