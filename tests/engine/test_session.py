"""``nbspawn.Session`` in Python: state, subsets, push and pull, failures that leave the ranks usable, ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import rank_functions as ranks
import torch
from kernels import who_said
from leftovers import gone

import nbspawn
import nbspawn._session.supervisor
from nbspawn import Session

pytestmark = pytest.mark.usefixtures("nothing_left")

ALL_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture
def three(nothing_left: None) -> Iterator[Session]:
    """Three ranks with a process group. (How they were started makes no difference; test_kept.py has both ways.)"""
    with Session(3, backend="gloo", start_method="forkserver", timeout=120.0) as session:
        session.execute("import torch, torch.distributed as dist, time, os\nstate = rank * 10")
        yield session


def test_cells_and_functions_share_the_ranks_variables(three: Session) -> None:
    assert list(three.execute("state += 1\nstate")) == [1, 11, 21]
    assert list(three.execute("def double(x):\n    return x * 2\ndouble(state)")) == [2, 22, 42]
    assert list(three.run(ranks.of_main, "state")) == [1, 11, 21], "a function finds them in __main__"
    assert list(three.execute(ALL_REDUCE)) == [3.0] * 3
    assert [value for value in three.run(ranks.square)] == [0, 1, 4]


def test_indexing(three: Session) -> None:
    assert list(three[2].execute("state")) == [20] and three[2].execute("state").ranks == (2,)
    assert three[1:].ranks == (1, 2) and three[[0, 2]].ranks == (0, 2) and three[-1].ranks == (2,)
    assert three[1:][0].ranks == (1,) and len(three[:2]) == 2 and len(three) == 3
    three[0].execute("state = 'other'")
    assert list(three.execute("state")) == ["other", 10, 20]
    with pytest.raises(nbspawn.UsageError, match="there is no rank 3: the indices are 0 to 2"):
        three[3]


def test_push_and_pull(three: Session) -> None:
    three.push({"state": 5}, lr=0.5)
    three[1].push(lr=0.25)
    assert list(three.pull("lr")) == [0.5, 0.25, 0.5] and list(three[1:].pull("state")) == [5, 5]
    with pytest.raises(nbspawn.RankRaisedError, match="NameError: name 'nothing' is not defined"):
        three.pull("nothing")
    assert list(three.execute("state")) == [5, 5, 5]
    with pytest.raises(nbspawn.PayloadError, match="guard"):
        three.push(guard=threading.Lock())


def test_arguments_and_limits_of_a_command(three: Session) -> None:
    assert list(three.run(ranks.of_main, name="state")) == [0, 10, 20]
    assert three[1:].run(ranks.of_main, "state").by_rank == {1: 10, 2: 20}
    assert three.execute("torch.full((2,), rank)") == [torch.full((2,), rank) for rank in range(3)]
    with pytest.raises(nbspawn.RunTimeoutError, match="timeout of 0.3 s"):
        three.execute("time.sleep(60)", timeout=0.3)
    assert list(three.execute("state")) == [0, 10, 20]


def test_a_command_in_the_background(three: Session, capsys: pytest.CaptureFixture[str]) -> None:
    handle = three.execute("go_on = True\nwhile go_on: time.sleep(0.01)", background=True)
    assert isinstance(handle, nbspawn.BackgroundRun) and handle.running() and not handle.done()
    with pytest.raises(TimeoutError, match=r"after 0.2 s the ranks still run; cancel\(\) stops them"):
        handle.result(timeout=0.2)
    with pytest.raises(nbspawn.UsageError, match="the ranks work on"):
        three.execute("1")
    assert handle.cancel() and isinstance(handle.exception(30), KeyboardInterrupt)
    assert handle.cancelled() and not handle.cancel()
    with pytest.raises(KeyboardInterrupt):
        handle.result()

    handle = three.run(ranks.square, background=True)
    assert list(handle.result(30)) == [0, 1, 4] and handle.exception() is None and not handle.cancelled()
    handle = three.execute("print('about to fail')\n1 / 0", background=True)
    assert isinstance(handle.exception(30), nbspawn.RankRaisedError)
    with pytest.raises(nbspawn.RankRaisedError, match="ZeroDivisionError"):
        handle.result()
    printed = capsys.readouterr().out
    assert who_said(printed, "about to fail") == {0, 1, 2} and "ZeroDivisionError" in printed


def test_ranks_are_started_and_ended_by_hand(nothing_left: None) -> None:
    session = Session(2, start_method="forkserver")
    with pytest.raises(nbspawn.StartError, match="none have been started"):
        session.log_path(0)
    assert session.start() is session and session.alive and len(session.pids) == 2
    assert session.start().pids == session.pids
    session.close()
    assert not session.alive and session.ended == "they were stopped"
    session.restart()
    assert list(session.execute("rank")) == [0, 1]
    session.close()


def test_what_can_only_be_inherited(three: Session) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    try:
        with pytest.raises(nbspawn.SpawnError, match=r"queue|Queue|only when they are started"):
            three.push(queue=queue)
    finally:
        queue.close()
        queue.join_thread()
    assert list(three.execute("state")) == [0, 10, 20]


def test_an_exception_leaves_the_ranks_usable(three: Session) -> None:
    before = three.pids
    with pytest.raises(nbspawn.RankRaisedError) as caught:
        three.execute("if rank == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))")
    assert caught.value.rank == 1 and "<execute 2>" in "\n".join(caught.value.lines)
    assert list(three.execute(ALL_REDUCE)) == [3.0] * 3 and list(three.execute("state")) == [0, 10, 20]
    assert three.pids == before


@pytest.mark.parametrize(
    "cell",
    [
        "dist.recv(torch.ones(1), (rank + 1) % 3)",
        "dist.barrier() if rank else time.sleep(600)",
        "group = dist.new_group([0, 1])\ndist.barrier() if rank else dist.barrier(group=group)",
    ],
    ids=["all wait", "one sleeps", "another group"],
)
def test_ranks_that_wait_for_each_other_are_freed(three: Session, cell: str) -> None:
    """gloo's waits hear of no interrupt, and none of the ranks leaves by itself."""
    before = three.pids
    with pytest.raises(nbspawn.RunTimeoutError):
        three.execute(cell, timeout=0.5)
    assert list(three.execute(ALL_REDUCE)) == [3.0] * 3 and three.pids == before


def test_a_group_of_the_users_own_can_be_made_again(nothing_left: None) -> None:
    make = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')"
    with Session(2, start_method="forkserver", timeout=120.0) as two:
        two.execute(make)
        with pytest.raises(nbspawn.RankRaisedError, match="ZeroDivisionError"):
            two.execute("if rank == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))")
        two.execute("dist.destroy_process_group()")
        two.execute(make)
        assert list(two.execute(ALL_REDUCE)) == [2.0, 2.0]


@pytest.mark.extended
def test_a_wrapped_model_uses_the_group_that_is_made_anew(three: Session) -> None:
    three.execute("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))")
    step = "model.zero_grad()\nmodel(torch.full((1, 2), float(rank))).backward()\nmodel.module.weight.grad.tolist()"
    assert list(three.execute(step)) == [[[1.0, 1.0]]] * 3
    with pytest.raises(nbspawn.RankRaisedError, match="ZeroDivisionError"):
        three.execute("if rank == 2:\n    1 / 0\n" + step)
    assert list(three.execute(step)) == [[[1.0, 1.0]]] * 3


def test_a_rank_that_dies_ends_the_session_and_restart_starts_it_again(three: Session) -> None:
    before = three.pids
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(nbspawn.RankExitedError, match="rank 1 of 3.*SIGKILL"):
        three.execute("state")
    assert not three.alive and "rank 1" in three.ended
    assert gone(before)
    with pytest.raises(nbspawn.StartError, match=r"have ended .rank 1.*restart\(\) starts them again"):
        three.execute("state")
    three.restart()
    assert list(three.execute("rank, world_size")) == [(rank, 3) for rank in range(3)]
    assert not set(three.pids) & set(before)
    three.execute("import torch, torch.distributed as dist")
    assert list(three.execute(ALL_REDUCE)) == [3.0] * 3


def test_a_rank_that_leaves(three: Session) -> None:
    with pytest.raises(nbspawn.RankExitedError, match="rank 2 of 3: .*exit code 7"):
        three.execute("import sys\nif rank == 2:\n    sys.exit(7)")
    assert not three.alive


@pytest.mark.timing
def test_ranks_without_anything_to_do_end(nothing_left: None) -> None:
    with Session(2, start_method="fork", idle_timeout=0.5) as two:
        assert list(two.execute("rank")) == [0, 1]
        pids = two.pids
        two.execute("import time\ntime.sleep(0.7)")
        assert two.alive, "that was work"
        assert gone(pids)
        with pytest.raises(nbspawn.StartError, match="had nothing to do for 0.5 s"):
            two.execute("rank")


def test_some_ranks_may_be_the_first_to_be_asked(nothing_left: None) -> None:
    with Session(3, start_method="forkserver") as session:
        assert list(session[1:].execute("rank")) == [1, 2]
        assert list(session.execute("rank")) == [0, 1, 2]


def test_usage_errors(three: Session) -> None:
    for which in ([], slice(3, None), 3, "a"):
        with pytest.raises(nbspawn.UsageError, match="there is no rank .*: the indices are 0 to 2"):
            three[which]  # type: ignore[index]
    with pytest.raises(nbspawn.UsageError, match=r"run\(\) takes a function, got 5"):
        three.run(5)  # type: ignore[arg-type]
    with pytest.raises(nbspawn.UsageError, match="nprocs must be between 1 and 512, got 0"):
        Session(0)
    with pytest.raises(nbspawn.UsageError, match="idle_timeout must be a positive number of seconds, got -1"):
        Session(2, idle_timeout=-1)
    with pytest.raises(nbspawn.UsageError, match="timeout must be a number of seconds, 0 or more, got nan"):
        Session(2, timeout=float("nan"))


def test_who_was_stopped_did_not_end_of_an_earlier_error(nothing_left: None) -> None:
    session = Session(2, start_method="forkserver")
    with pytest.raises(nbspawn.RankRaisedError):
        session.execute("nope")
    session.close()
    assert repr(session) == "<Session of 2 ranks: they were stopped>"


def test_children_of_idle_ranks_end_with_them(nothing_left: None) -> None:
    with Session(2, start_method="forkserver") as two:
        child = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True).pid"
        children = list(two.execute(child))
        assert all(map(psutil.pid_exists, children))
    assert gone(children)


@pytest.mark.timing
def test_commands_are_quick(three: Session) -> None:
    """No pause of a poll or a timer between a command and its end. (Not a benchmark: that is benchmarks/compare.py.)"""
    began = time.monotonic()
    for _ in range(50):
        three.run(ranks.square)
    assert time.monotonic() - began < 50 * 0.04
