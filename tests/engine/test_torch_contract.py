"""torch's contract for ``start_processes`` and its ``ProcessContext``, held by nbspawn's drop-in; then ``spawn``'s own.

The first half follows what torch promises of its function: arguments, results, exceptions and their attributes.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import rank_functions as ranks
import torch
from leftovers import alive, gone, marked_pids, until
from methods import EVERY_METHOD, PATIENCE
from torch.multiprocessing import ProcessContext, ProcessExitedException, ProcessRaisedException

import nbspawn

pytestmark = pytest.mark.usefixtures("nothing_left")

every_method = pytest.mark.parametrize("method", EVERY_METHOD)
light_methods = pytest.mark.parametrize("method", ["fork", "forkserver"])


def start(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 2, method: str = "fork", **more: Any) -> Any:
    return nbspawn.start_processes(fn, args=args, nprocs=nprocs, start_method=method, **more)


def join(context: Any, seconds: float = PATIENCE) -> None:
    assert until(lambda: context.join(timeout=0.1), seconds)


# ---------------------------------------------------------------- good ends


@light_methods
def test_success_joined_again_and_again(method: str) -> None:
    context = start(ranks.succeed, method=method, join=False)
    assert isinstance(context, ProcessContext)
    assert len(context.pids()) == len(set(context.pids())) == 2
    assert all(isinstance(pid, int) for pid in context.pids())
    join(context)
    assert context.join() is True
    assert context.join(timeout=0.1, grace_period=1.0) is True
    assert not any(map(alive, context.pids()))
    assert [process.exitcode for process in context.processes] == [0, 0]


@light_methods
def test_joined_start_returns_none(method: str) -> None:
    assert start(ranks.succeed, method=method) is None


def test_default_start_method_is_spawn() -> None:
    assert nbspawn.start_processes(ranks.succeed) is None
    context = nbspawn.start_processes(ranks.succeed, join=False)
    assert "Spawn" in type(context.processes[0]._popen).__name__
    join(context)


@light_methods
def test_first_argument_is_the_rank(method: str) -> None:
    queue = multiprocessing.get_context(method).SimpleQueue()
    start(ranks.put_rank, args=(queue,), method=method)
    assert sorted([queue.get(), queue.get()]) == [0, 1]
    assert queue.empty()
    queue.close()


@every_method
def test_multiprocessings_objects_and_shared_tensors_as_arguments(method: str) -> None:
    mp = multiprocessing.get_context(method)
    queue, event, lock, value = mp.Queue(), mp.Event(), mp.Lock(), mp.Value("i", 0)
    receiving, sending = mp.Pipe(duplex=False)
    shared = torch.zeros(2).share_memory_()
    context = start(ranks.use_everything, (queue, event, lock, value, sending, shared), method=method, join=False)
    assert context.join(timeout=0.1) is False
    event.set()
    got = sorted(queue.get(timeout=100) for _ in range(2))
    join(context)
    assert got == [(0, [0, 0]), (1, [1, 1])]
    assert value.value == 2
    assert shared.tolist() == [1.0, 2.0]
    assert sorted([receiving.recv(), receiving.recv()]) == ["from 0", "from 1"]
    queue.close()
    queue.join_thread()
    receiving.close()
    sending.close()


@light_methods
def test_exit_0_is_success(method: str) -> None:
    start(ranks.sys_exit, args=(0,), method=method)
    start(ranks.sys_exit, args=(None,), method=method)


@light_methods
@pytest.mark.parametrize("daemon", [False, True])
def test_daemon_is_passed_on(method: str, daemon: bool) -> None:
    context = start(ranks.daemonic, method=method, daemon=daemon, join=False)
    assert [process.daemon for process in context.processes] == [daemon, daemon]
    join(context)
    assert list(context.results()) == [daemon, daemon]


@every_method
def test_no_ranks_at_all(method: str) -> None:
    assert start(ranks.raise_in_all, nprocs=0, method=method) is None
    context = start(ranks.raise_in_all, nprocs=0, method=method, join=False)
    assert isinstance(context, ProcessContext) and context.pids() == []
    assert context.join() is True and context.join(timeout=0.1) is True
    if "grace_period" in inspect.signature(ProcessContext.join).parameters:  # not in torch 2.4
        assert context.join(timeout=0.1, grace_period=1.0) is True


# ---------------------------------------------------------------- failures


@light_methods
@pytest.mark.parametrize(("end", "code"), [(ranks.raise_if, 1), (ranks.exit_if, 7)])
def test_exit_code_of_the_rank_that_failed_is_its_own(method: str, end: Any, code: int) -> None:
    """Not that of the SIGTERM for its peers."""
    context = start(end, args=(1,), method=method, join=False)
    with pytest.raises((ProcessRaisedException, ProcessExitedException)):
        context.join()
    assert [process.exitcode for process in context.processes] == [-signal.SIGTERM, code]


@every_method
def test_exception_of_one_rank(method: str) -> None:
    with pytest.raises(ProcessRaisedException, match="\nValueError: legitimate exception from process 1$") as caught:
        start(ranks.raise_if, args=(1,), method=method)
    error = caught.value
    assert isinstance(error, nbspawn.RankRaisedError)
    assert error.error_index == error.rank == 1
    assert not alive(error.pid)
    assert "-- Process 1 terminated with the following error:\n" in str(error)
    assert 'in raise_if\n    raise ValueError(f"legitimate' in str(error)
    assert "nbspawn/_rank/main.py" not in str(error)


@light_methods
def test_exception_of_all_ranks(method: str) -> None:
    with pytest.raises(ProcessRaisedException, match="\nValueError: legitimate exception from process (0|1)$"):
        start(ranks.raise_in_all, method=method)


@light_methods
def test_termination_by_a_signal(method: str) -> None:
    with pytest.raises(ProcessExitedException, match="process 0 terminated with signal (SIGABRT|SIGIOT)") as caught:
        start(ranks.abort_in_0, method=method)
    error = caught.value
    assert isinstance(error, nbspawn.RankExitedError)
    assert (error.exit_code, error.signal_name) == (-signal.SIGABRT, "SIGABRT")
    assert error.error_index == 0


@light_methods
def test_termination_by_an_exit_code(method: str) -> None:
    with pytest.raises(ProcessExitedException, match="process 0 terminated with exit code 123") as caught:
        start(ranks.sys_exit_in_0, args=(123,), method=method)
    assert caught.value.exit_code == 123
    assert caught.value.signal_name is None


@light_methods
def test_exit_with_a_text(method: str) -> None:
    with pytest.raises(ProcessExitedException, match="terminated with exit code 1: no such data set") as caught:
        start(ranks.sys_exit_in_0, args=("no such data set",), method=method)
    assert caught.value.exit_code == 1


def test_exit_codes_are_the_processes_own() -> None:
    """``sys.exit(-1)`` is exit code 255, not signal 1."""
    for code, seen in ((-1, 255), (300, 44), (True, 1)):
        with pytest.raises(ProcessExitedException, match=f"process 0 terminated with exit code {seen}") as caught:
            start(ranks.sys_exit, args=(code,), nprocs=1)
        assert caught.value.exit_code == seen
        assert caught.value.signal_name is None


@light_methods
def test_success_first_exception_later(method: str) -> None:
    queue = multiprocessing.get_context(method).SimpleQueue()
    context = start(ranks.first_0_then_raise, args=(queue,), method=method, join=False)
    assert until(lambda: context.join(timeout=0.05) or context.processes[0].exitcode == 0)
    assert context.join(timeout=0) is False
    queue.put("go")
    with pytest.raises(ProcessRaisedException, match="\nValueError: legitimate exception$"):
        join(context)
    queue.close()


@every_method
def test_ranks_of_a_rank_that_is_killed_go_too(method: str, tmp_path: Path) -> None:
    context = start(ranks.nest, args=(str(tmp_path), method), nprocs=1, method=method, join=False)
    with pytest.raises(ProcessExitedException, match="process 0 terminated with signal SIGTERM"):
        join(context)
    inner = marked_pids(tmp_path)
    assert len(inner) == 2
    assert gone(inner)


def test_error_of_a_nested_run() -> None:
    with pytest.raises(
        ProcessRaisedException, match="\nValueError: legitimate exception from process 1\\s*$"
    ) as caught:
        start(ranks.fail_in_nested, nprocs=1)
    assert "\n" not in caught.value.summary


@every_method
def test_external_sigterm(method: str) -> None:
    """Right after the start, whatever the rank has or has not yet set up."""
    context = start(ranks.sleep_long, method=method, join=False)
    for pid in context.pids():
        os.kill(pid, signal.SIGTERM)
    with pytest.raises(ProcessExitedException, match="terminated with signal SIGTERM") as caught:
        join(context)
    assert caught.value.exit_code == -signal.SIGTERM


@light_methods
def test_keyboard_interrupt_of_the_ranks_own(method: str) -> None:
    """Releases of torch up to 2.13 call it success; a rank that did not finish is a failure."""
    with pytest.raises(ProcessRaisedException, match="\nKeyboardInterrupt: of the rank's own$"):
        start(ranks.raise_keyboard_interrupt, method=method)


def test_errors_survive_pickling() -> None:
    with pytest.raises(nbspawn.RankRaisedError) as raised:
        start(ranks.raise_if, args=(0,))
    with pytest.raises(nbspawn.RankExitedError) as exited:
        start(ranks.sys_exit_in_0, args=(3,))
    for error in (raised.value, exited.value):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        for name in ("error_index", "rank", "pid", "node", "log_path", "others", "lines"):
            assert getattr(copy, name) == getattr(error, name), name
    assert pickle.loads(pickle.dumps(exited.value)).exit_code == 3


# ---------------------------------------------------------------- join: grace and time


@light_methods
def test_rank_that_leaves_within_the_grace_period_is_not_terminated(method: str, tmp_path: Path) -> None:
    context = start(ranks.leave_in_good_order_after_0_raised, (str(tmp_path), 0.4), method=method, join=False)
    with pytest.raises(ProcessRaisedException, match="rank 0 raised"):
        context.join(grace_period=ranks.LONG)
    assert (tmp_path / "left-1").exists()
    assert context.processes[1].exitcode == 0


@light_methods
def test_rank_that_ignores_sigterm_is_killed_after_the_grace_period(method: str, tmp_path: Path) -> None:
    context = start(ranks.ignore_sigterm_but_0_raises, (str(tmp_path),), method=method, join=False)
    started = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="rank 0 raised"):
        context.join(grace_period=0.5)
    assert time.monotonic() - started > 0.9
    assert [process.exitcode for process in context.processes] == [1, -signal.SIGKILL]


@pytest.mark.timing
def test_join_with_a_timeout_never_takes_long(tmp_path: Path) -> None:
    """torch's blocks through the whole grace period, and 30 s without one."""
    context = start(ranks.ignore_sigterm_but_0_raises, (str(tmp_path),), nprocs=3, join=False)
    slowest, error = 0.0, None
    while error is None:
        started = time.monotonic()
        try:
            assert context.join(timeout=0.1, grace_period=0.7) is False
        except ProcessRaisedException as raised:
            error = raised
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 0.5
    assert "rank 0 raised" in str(error)


def test_join_after_an_error_was_raised() -> None:
    context = start(ranks.raise_if, (1,), join=False)
    with pytest.raises(ProcessRaisedException):
        context.join()
    with pytest.raises(ProcessRaisedException):
        context.join()


def test_output_of_ranks_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    start(ranks.say, ("hello from",))
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert sorted(printed) == [["[0]", "hello from 0"], ["[1]", "hello from 1"]]


# ---------------------------------------------------------------- nbspawn.spawn


@every_method
def test_spawn_returns_results_by_rank(method: str) -> None:
    results = nbspawn.spawn(ranks.square, nprocs=3 if method != "spawn" else 2, start_method=method)
    assert list(results) == [0, 1, 4][: len(results)]
    assert results[1] == 1


@light_methods
def test_interrupt_reaches_every_rank_once(method: str, tmp_path: Path) -> None:
    context = nbspawn.spawn(ranks.sleep_for_interrupt, (str(tmp_path),), nprocs=3, join=False, start_method=method)
    assert len(context.pids()) == 3
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 3)
    context.interrupt()
    join(context)
    assert list(context.results()) == ["caught 1"] * 3
    assert len(list(tmp_path.glob("finally-*"))) == 3


@light_methods
def test_finally_runs_in_a_rank_that_falls_to_an_interrupt(method: str, tmp_path: Path) -> None:
    context = nbspawn.spawn(ranks.fall_to_interrupt, (str(tmp_path),), nprocs=2, join=False, start_method=method)
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    with pytest.raises(ValueError, match="join"):
        context.results()
    context.interrupt()
    with pytest.raises(ProcessRaisedException, match="KeyboardInterrupt"):  # they have not ended well
        join(context)
    assert len(list(tmp_path.glob("finally-*"))) == 2
    with pytest.raises(ValueError):
        context.results()


def test_interrupt_that_the_kernel_did_not_announce_is_not_for_a_rank(tmp_path: Path) -> None:
    """VS Code signals every descendant of a kernel."""
    context = nbspawn.spawn(ranks.sleep_for_interrupt, (str(tmp_path),), nprocs=2, join=False)
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    for pid in context.pids():
        os.kill(pid, signal.SIGINT)
    assert context.join(timeout=0.3) is False
    assert not list(tmp_path.glob("finally-*"))
    context.interrupt()
    join(context)
    assert list(context.results()) == ["caught 1"] * 2


@light_methods
def test_terminate(method: str, tmp_path: Path) -> None:
    """It does not wait for the end."""
    context = nbspawn.spawn(ranks.mark_and_sleep, (str(tmp_path),), nprocs=2, join=False, start_method=method)
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    context.terminate(grace_period=ranks.LONG)
    with pytest.raises(ProcessExitedException, match="terminated with signal SIGTERM"):
        context.join(timeout=PATIENCE)
    assert gone(context.pids())
    assert [process.exitcode for process in context.processes] == [-signal.SIGTERM] * 2


def test_terminate_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    context = nbspawn.spawn(ranks.ignore_sigterm, (str(tmp_path),), nprocs=2, join=False, start_method="fork")
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    context.terminate(grace_period=0.3)
    with pytest.raises(ProcessExitedException, match="terminated with signal SIGKILL"):
        context.join()
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL] * 2


def test_keyboard_interrupt_in_join_leaves_the_ranks(tmp_path: Path) -> None:
    """The user's Ctrl-C ends the call, not the ranks: the next one goes on where it was."""
    context = nbspawn.spawn(ranks.mark_and_sleep, (str(tmp_path),), nprocs=2, join=False, start_method="fork")
    assert until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            context.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all(map(alive, context.pids()))
    context.close()
