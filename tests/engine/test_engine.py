"""The engine's promises: the first cause is told, nothing outlives a run, a rank finds what torchrun would give it."""

from __future__ import annotations

import importlib
import multiprocessing.forkserver
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_functions as ranks
from leftovers import State, alive, assert_nothing_beyond, directories, gone, kept_logs, marked_pids, until
from methods import PATIENCE, SUPPORT
from rank_functions import LONG

import nbspawn
from nbspawn._engine import launch
from nbspawn._engine.run import local, logs, rendezvous
from nbspawn._engine.start import fork_safety, forkserver
from nbspawn._rank import main
from nbspawn._rank.report import sampler
from nbspawn._session import supervisor, views

pytestmark = pytest.mark.usefixtures("nothing_left")

light_methods = pytest.mark.parametrize("method", ["fork", "forkserver"])


def spawn(fn: Any, *args: Any, nprocs: int = 2, method: str = "fork", **options: Any) -> Any:
    if options.get("join", True):
        options.setdefault("timeout", 120.0)
    return nbspawn.spawn(fn, args, nprocs=nprocs, start_method=method, **options)


def script(text: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A kernel's stand-in in a process of its own; ``text`` may use rank_functions as ``ranks``."""
    head = "import sys, nbspawn, rank_functions as ranks\nif __name__ == '__main__':\n"
    body = "".join(f"    {line}\n" for line in text.strip().splitlines())
    env = {**os.environ, "PYTHONPATH": SUPPORT}
    return subprocess.Popen([sys.executable, "-c", head + body, *arguments], text=True, env=env, **options)


# ---------------------------------------------------------------- the first cause


@light_methods
@pytest.mark.parametrize("turn", range(4))
def test_first_failure_in_time_is_told_and_echoes_follow(method: str, turn: int) -> None:
    """Peers that wait in a collective hear "Connection closed by peer", often before the failed rank's end is seen."""
    with pytest.raises(nbspawn.RankRaisedError) as caught:
        spawn(ranks.one_leaves_a_collective, 2, nprocs=4, method=method, backend="gloo")
    error = caught.value
    assert error.rank == 2
    assert str(error).startswith("rank 2 of 4: ZeroDivisionError: the root cause")
    assert str(error).rstrip().endswith("ZeroDivisionError: the root cause")
    assert str(error).count("Traceback (most recent call last)") == 1
    assert "\n".join(error.lines).count("Traceback (most recent call last)") == 1
    followers = [line for line in error.lines if line.startswith("also rank")]
    assert len(followers) <= len(error.others)
    assert 2 not in {other.rank for other in error.others}
    assert all(other.time >= 0 and "\n" not in other.what for other in error.others)


# ---------------------------------------------------------------- ends without the rank's word


@light_methods
@pytest.mark.parametrize("code", [0, 7])
def test_os_exit_is_a_failure(method: str, code: int) -> None:
    """Exit code 0 too: the rank never said that it had finished."""
    with pytest.raises(nbspawn.RankExitedError, match=f"terminated with exit code {code}") as caught:
        spawn(ranks.os_exit, code, nprocs=1, method=method)
    assert caught.value.exit_code == code
    assert "last words" in Path(caught.value.log_path).read_text()


@light_methods
def test_segfault_shows_faulthandlers_stack(method: str) -> None:
    with pytest.raises(nbspawn.RankExitedError, match="terminated with signal SIGSEGV") as caught:
        spawn(ranks.segfault, nprocs=1, method=method)
    error = caught.value
    assert (error.exit_code, error.signal_name) == (-signal.SIGSEGV, "SIGSEGV")
    for text in (str(error), "\n".join(error.lines)):
        assert "Fatal Python error: Segmentation fault" in text
        assert re.search(r'rank_functions.py", line \d+, in segfault', text)


@light_methods
def test_sigkill_names_the_memory(method: str) -> None:
    with pytest.raises(nbspawn.RankExitedError, match="terminated with signal SIGKILL.*memory") as caught:
        spawn(ranks.signal_self, signal.SIGKILL, nprocs=2, method=method)
    assert caught.value.signal_name == "SIGKILL"


@light_methods
def test_failed_rank_leaves_at_once_whatever_its_teardown_does(method: str) -> None:
    with pytest.raises(nbspawn.RankRaisedError, match="with a teardown that hangs"):
        spawn(ranks.raise_with_teardown_that_hangs, nprocs=2, method=method)


def test_a_spawned_rank_does_what_is_the_users_when_it_ends(tmp_path: Path) -> None:
    assert spawn(ranks.goes_on_afterwards, f"{tmp_path}/said", method="spawn") == ["returned"] * 2
    assert [(tmp_path / f"said-{rank}").read_text() for rank in range(2)] == ["thread atexit"] * 2


# ---------------------------------------------------------------- children of ranks, orphans


@light_methods
@pytest.mark.parametrize("end", ["return", "raise"])
def test_children_of_ranks_end_with_the_run(method: str, end: str, tmp_path: Path) -> None:
    if end == "return":
        spawn(ranks.start_children, str(tmp_path), end, method=method)
    else:
        with pytest.raises(nbspawn.RankRaisedError):
            spawn(ranks.start_children, str(tmp_path), end, method=method)
    children = marked_pids(tmp_path)
    assert children
    assert gone(children)


@light_methods
def test_rank_can_load_data_with_workers(method: str) -> None:
    """They start as the kernel's own would, not through the kernel's fork server."""
    assert list(spawn(ranks.load_data_with_workers, method=method)) == [120.0, 120.0]


@light_methods
def test_killed_kernel_leaves_no_rank_and_no_child_of_one(method: str, tmp_path: Path) -> None:
    """The ranks hold the GIL in C: no handler of theirs could notice anything."""
    before = directories()
    kernel = script(
        "nbspawn.spawn(ranks.stuck_in_c_with_grandchild, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])",
        str(tmp_path),
        method,
    )
    assert until(lambda: len(list(tmp_path.glob("pids-*"))) == 2)
    family = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
    assert set(marked_pids(tmp_path)) <= set(family)
    kernel.kill()
    kernel.wait()
    assert gone(family), [psutil.Process(pid).cmdline() for pid in family if alive(pid)]
    assert until(lambda: not directories() - before)


def test_a_rank_that_begins_after_its_kernels_end_ends(tmp_path: Path) -> None:
    lifeline = tmp_path / "lifeline"
    os.mkfifo(lifeline)
    os.close(os.open(lifeline, os.O_RDWR))
    text = "import pathlib, sys, time\nfrom nbspawn._rank.program import process\n"
    text += "process.die_with_kernel(pathlib.Path(sys.argv[1]))\ntime.sleep(600)"
    ran = subprocess.run([sys.executable, "-c", text, lifeline], start_new_session=True, timeout=PATIENCE)
    assert ran.returncode == -signal.SIGKILL


@pytest.mark.timing
def test_stopped_rank_blocks_neither_poll_nor_join(tmp_path: Path) -> None:
    context = spawn(ranks.mark_and_sleep, str(tmp_path), join=False)
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    os.kill(context.pids()[1], signal.SIGSTOP)
    assert until(lambda: psutil.Process(context.pids()[1]).status() == psutil.STATUS_STOPPED)
    for call in (
        lambda: context.poll(0.1),
        lambda: context.join(timeout=0.1),
        context.interrupt,
        lambda: context.stacks({}),
    ):
        started = time.monotonic()
        call()
        assert time.monotonic() - started < 0.5
    context.terminate(grace_period=0.2)  # SIGTERM waits for a stopped process; SIGKILL does not
    with pytest.raises(nbspawn.SpawnError):  # of rank 0 if its KeyboardInterrupt is quicker than SIGTERM
        context.join(timeout=PATIENCE)
    assert gone(context.pids())


# ---------------------------------------------------------------- nothing grows


@pytest.mark.extended
def test_fifty_runs_leak_nothing() -> None:
    before = State.now()
    for turn in range(50):
        method = "forkserver" if turn % 2 else "fork"
        kind = turn % 5
        if kind in (0, 4):
            assert list(spawn(ranks.mixed_end, turn, method=method)) == [turn, turn]
        else:
            with pytest.raises(nbspawn.RankRaisedError if kind == 1 else nbspawn.RankExitedError):
                spawn(ranks.mixed_end, turn, method=method, grace_period=0.0)
    assert len(kept_logs()) == 10  # of the last five failed runs
    assert_nothing_beyond(before)


def test_successful_run_leaves_no_directory(workplace: str) -> None:
    before = directories()
    spawn(ranks.succeed)
    assert directories() <= before, "the shared kernel's may be there"


# ---------------------------------------------------------------- torch.distributed


@light_methods
def test_environment_is_enough_for_init_process_group(method: str) -> None:
    assert list(spawn(ranks.all_reduce_here, nprocs=3, method=method)) == [3.0] * 3


@light_methods
def test_backend_makes_and_destroys_the_group(method: str) -> None:
    assert list(spawn(ranks.all_reduce_in_ready_group, nprocs=2, method=method, backend="gloo")) == [(1.0, 2)] * 2


@pytest.mark.parametrize("backend", ["gloo", None])
def test_a_rank_that_has_met_its_peers_and_ends_does_not_fail_them(backend: str | None) -> None:
    """It failed one in four to eight of these runs: gloo lets go who is connected, and who was not lost its peer."""
    for _ in range(20):
        spawn(ranks.succeed if backend else ranks.meet_and_leave, backend=backend)


@light_methods
def test_function_that_brings_its_own_address_and_port(method: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert list(spawn(ranks.tutorial, 2, port, method=method)) == [1.0, 1.0]


def test_store_listens_on_the_loopback_only(tmp_path: Path) -> None:
    context = spawn(ranks.mark_and_sleep, str(tmp_path), join=False)
    mine = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert mine == ["127.0.0.1"]
    context.close()


def test_works_where_the_hosts_own_name_does_not_resolve() -> None:
    if os.getuid() != 0 or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("only root may rename a host for one process")
    text = (
        "import rank_functions as ranks, nbspawn\n"
        "if __name__ == '__main__':\n"
        "    assert list(nbspawn.spawn(ranks.look_up_own_name, nprocs=1)) == ['']\n"
        "    print(list(nbspawn.spawn(ranks.all_reduce_here, nprocs=2)))\n"
        "    print(list(nbspawn.spawn(ranks.all_reduce_in_ready_group, nprocs=2, backend='gloo')))\n"
    )
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname nowhere-xyz; exec "$0" -c "$1"', sys.executable, text]
    env = {**os.environ, "PYTHONPATH": SUPPORT}
    ran = subprocess.run(renamed, capture_output=True, text=True, timeout=150, env=env)
    assert ran.stdout.splitlines() == ["[1.0, 1.0]", "[(1.0, 2), (1.0, 2)]"], ran.stdout + ran.stderr


# ---------------------------------------------------------------- what a rank is given


@light_methods
def test_options_are_seen_in_the_rank(method: str) -> None:
    options = {"env": {"MY_OPTION": "1", "OMP_NUM_THREADS": "3"}, "threads": 2}
    for seen in spawn(ranks.surroundings, "MY_OPTION", method=method, **options):
        assert seen["env"] == {"MY_OPTION": "1"}
        assert seen["threads"] == (2 if method == "forkserver" or fork_safety.openmp_can_be_paused() else 1)
        assert seen["session"]


@light_methods
def test_environment_is_torchruns(method: str) -> None:
    names = ["RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK"]
    first, second = spawn(ranks.environment, method=method)
    assert [first[name] for name in names] == ["0", "0", "0", "2", "2", "2", "0"]
    assert [second[name] for name in names] == ["1", "1", "1", "2", "2", "2", "0"]
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]


def test_rank_under_a_warm_server_finds_the_launchs_surroundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server's own are as old as the server."""
    assert forkserver.server.warm
    monkeypatch.setenv("LATER_THAN_THE_SERVER", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PATH")
    monkeypatch.syspath_prepend("/a/path/of/this/launch")
    monkeypatch.chdir(tmp_path)
    (seen,) = spawn(
        ranks.surroundings, "LATER_THAN_THE_SERVER", "OMP_NUM_THREADS", "PATH", nprocs=1, method="forkserver"
    )
    assert seen["env"] == {"LATER_THAN_THE_SERVER": "yes", "OMP_NUM_THREADS": "1", "PATH": None}
    assert seen["cwd"] == str(tmp_path)
    assert seen["path"] == sys.path
    assert seen["threads"] == 1


def test_module_that_was_edited_between_two_runs_is_fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for answer in ("old", "a newer one"):
        (tmp_path / "edited_in_between.py").write_text(f"def answer():\n    return {answer!r}\n")
        importlib.invalidate_caches()
        assert list(spawn(ranks.run_module, "edited_in_between", method="forkserver")) == [answer] * 2


def test_numpys_random_numbers_differ_between_ranks_and_runs() -> None:
    pytest.importorskip("numpy")
    drawn = [*spawn(ranks.numpy_draw, method="forkserver"), *spawn(ranks.numpy_draw, method="forkserver")]
    assert len(set(drawn)) == 4


# ---------------------------------------------------------------- files


def test_run_directory_is_private_and_so_are_its_files(tmp_path: Path) -> None:
    context = spawn(ranks.mark_and_sleep, str(tmp_path), join=False)
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    private = context.files.private
    for directory in (private, private.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for rank in range(2):
        assert stat.S_IMODE(context.files.log(rank).stat().st_mode) == 0o600
    assert all(Path(file).parent == private for file in context.error_files)
    context.close()
    assert not private.exists()


@light_methods
def test_log_dir_keeps_the_logs(method: str, tmp_path: Path) -> None:
    logs = tmp_path / "not" / "there yet"
    for text in ("first", "second"):
        spawn(ranks.say, text, method=method, log_dir=str(logs))
        assert {file.name: file.read_text() for file in logs.iterdir()} == {
            f"rank-{rank}.log": f"{text} {rank}\n" for rank in range(2)
        }
    assert not kept_logs()


# ---------------------------------------------------------------- time and interrupts


@light_methods
def test_timeout_says_where_every_rank_stood(method: str, tmp_path: Path) -> None:
    with pytest.raises(nbspawn.RunTimeoutError, match=r"timeout of 0\.5 s") as caught:
        spawn(ranks.mark_and_sleep, str(tmp_path), method=method, timeout=0.5, grace_period=0.2)
    assert "Ranks 0 and 1" in str(caught.value) or "Ranks 0-1" in str(caught.value)
    assert "mark_and_sleep" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


@contextmanager
def interrupted_when_running(folder: Path) -> Iterator[None]:
    """By a user who sees that both ranks run."""

    def press() -> None:
        if until(lambda: len(list(folder.glob("running-*"))) == 2):
            os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=press)
    user.start()
    try:
        yield
    finally:
        user.join()


@light_methods
def test_users_interrupt_stops_the_ranks_once(method: str, tmp_path: Path) -> None:
    with interrupted_when_running(tmp_path), pytest.raises(KeyboardInterrupt):
        spawn(ranks.fall_to_interrupt, str(tmp_path), method=method, grace_period=LONG)
    assert len(list(tmp_path.glob("finally-*"))) == 2


def test_an_interrupt_while_ranks_start_lets_those_that_run_tidy_up(tmp_path: Path) -> None:
    """Ranks that have begun are stopped as at any other time."""
    with pytest.raises(KeyboardInterrupt):
        nbspawn.spawn(ranks.interrupt_the_starter, (str(tmp_path),), nprocs=24, start_method="fork", grace_period=LONG)
    begun, tidied = (
        {path.name.partition("-")[2] for path in tmp_path.glob(f"{name}-*")} for name in ("running", "finally")
    )
    assert begun and begun == tidied


@light_methods
def test_second_interrupt_kills_at_once(method: str, tmp_path: Path) -> None:
    def press_twice() -> None:
        if until(lambda: len(list(tmp_path.glob("running-*"))) == 2):
            os.kill(os.getpid(), signal.SIGINT)
        if until(lambda: all(context.stopping for context in local.running)):
            os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=press_twice)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        spawn(ranks.swallow_interrupts, str(tmp_path), method=method, grace_period=LONG)
    user.join()


@pytest.mark.parametrize("joined", [True, False])
def test_an_interrupt_ends_the_wait(joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``select`` that a signal interrupts is taken up again by Python; here nothing else comes that would end it."""
    monkeypatch.setattr(main, "FEATURES", tuple(one for one in main.FEATURES if one is not sampler.sampling))
    for module, name in (
        (local, "_TICK"),
        (logs, "_INTERVAL"),
        (logs, "_LONG_INTERVAL"),
        (supervisor, "_TICK"),
        (views, "BUFFER_TIME"),
    ):
        monkeypatch.setattr(module, name, LONG)

    with interrupted_when_running(tmp_path), pytest.raises(KeyboardInterrupt):
        if joined:
            spawn(ranks.fall_to_interrupt, str(tmp_path))
        context = nbspawn.spawn(ranks.fall_to_interrupt, (str(tmp_path),), nprocs=2, start_method="fork", join=False)
        try:
            context.join()
        finally:
            context.close()


def test_run_off_the_main_thread() -> None:
    """No signal can be taken over there, and the thread's end must not end the ranks."""
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(list(spawn(ranks.square, method="forkserver"))))
    worker.start()
    worker.join()
    assert found == [[0, 1]]


def test_ranks_outlive_the_thread_that_started_them(tmp_path: Path) -> None:
    """torch alone asks for SIGINT at that thread's end."""
    found: list[Any] = []
    worker = threading.Thread(
        target=lambda: found.append(spawn(ranks.mark_and_sleep, str(tmp_path), method="fork", join=False))
    )
    worker.start()
    worker.join()
    context = found.pop()
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    assert context.join(timeout=0.3) is False
    assert all(map(alive, context.pids()))
    context.close()


def test_an_interrupt_while_ranks_start_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the error is kept, which IPython does."""

    def fill(packed: Any, cancelled: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert until(cancelled, 10), "it was not heard"

    assert spawn(ranks.environment, method="forkserver")  # the server stays
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(launch, "fill", fill)
    with pytest.raises(KeyboardInterrupt) as caught:
        spawn(ranks.environment, method="forkserver")
    assert len(os.listdir("/dev/fd")) == before, caught


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_the_store_starts_leaves_nothing(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a user who sees that ranks run, before the call has returned."""

    def interrupted(*where: Any, master_listen_fd: int, **how: Any) -> None:
        if when == "after":
            tcp_store(*where, master_listen_fd=master_listen_fd, **how)  # it is lost
        else:
            os.close(master_listen_fd)
        raise KeyboardInterrupt

    tcp_store = rendezvous.tcp_store
    monkeypatch.setattr(rendezvous, "tcp_store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spawn(ranks.mark_and_sleep, str(tmp_path), join=False)


# ---------------------------------------------------------------- multiprocessing's own state


def test_multiprocessings_global_state_is_untouched() -> None:
    theirs: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    before, pid = multiprocessing.get_start_method(allow_none=True), theirs._forkserver_pid
    for method in ("fork", "forkserver", "spawn"):
        spawn(ranks.succeed, nprocs=1, method=method)
    assert theirs._forkserver_pid == pid
    assert multiprocessing.get_start_method(allow_none=True) == before


@pytest.mark.extended
def test_user_can_still_set_the_start_method() -> None:
    text = """
import multiprocessing
for method in ("fork", "forkserver", "spawn"):
    nbspawn.spawn(ranks.succeed, start_method=method)
multiprocessing.set_start_method("spawn")
nbspawn.spawn(ranks.succeed, start_method="forkserver")
print(multiprocessing.get_start_method())
"""
    child = script(text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = child.communicate(timeout=150)
    assert output == "spawn\n"


def test_too_many_ranks_for_the_open_files_is_told_before_any_is_started() -> None:
    ran = script(
        """
import os, resource
count = lambda: len(os.listdir("/dev/fd"))
list(nbspawn.spawn(ranks.square, nprocs=2))
resource.setrlimit(resource.RLIMIT_NOFILE, (150, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before = count()
try:
    nbspawn.spawn(ranks.square, nprocs=64)
except nbspawn.StartError as error:
    print(error)
print(count() - before, list(nbspawn.spawn(ranks.square, nprocs=2)))
""",
        stdout=subprocess.PIPE,
    )
    message, after = ran.communicate(timeout=150)[0].splitlines()
    assert "64 ranks need" in message and "the system allows 150" in message and "fewer ranks" in message
    assert after == "0 [0, 1]"


def test_a_temp_directory_with_a_long_name(tmp_path: Path) -> None:
    """The name of a unix socket takes about 100 bytes."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "import nbspawn, os; print(list(nbspawn.spawn(pow, (2,), 2, start_method='forkserver')))",
        ],
        env={**os.environ, "TMPDIR": str(deep)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.stdout == "[0, 1]\n", ran.stderr
