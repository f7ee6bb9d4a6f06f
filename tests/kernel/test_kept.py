"""Ranks that stay: state across cells, some of them, failures that leave them usable, ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
from kernels import PATIENCE, Kernel, lives, ok, once, wait_gone

START = """%%spawn 3 --keep -b gloo -m {method}
import os, time, torch, torch.distributed as dist
state = rank * 10
def half(x):
    return x / 2
state"""


@pytest.fixture
def kept(kernel: Kernel, method: str) -> Iterator[Kernel]:
    """Three ranks that stay."""
    ok(kernel.execute(START.format(method=method)))
    yield kernel
    kernel.execute("%ranks stop")


def pids(kernel: Kernel) -> list[int]:
    return [int(pid) for pid in re.findall(r"^ +\d+  \w+ +(\d+) ", ok(kernel.execute("%ranks")).text(), re.MULTILINE)]


def test_variables_functions_and_the_group_stay(kept: Kernel) -> None:
    assert ok(kept.execute("%%ranks\nstate += 1\nstate")).result == "[0] 1\n[1] 11\n[2] 21"
    assert ok(kept.execute("%%ranks\n_")).result == "[0] 1\n[1] 11\n[2] 21"
    assert ok(kept.execute("%%ranks\nt = torch.ones(1); dist.all_reduce(t)\nhalf(t.item())")).result == "[0-2] 1.5"
    ok(kept.execute("%%ranks -o out\ndef later(x):\n    return half(x) + rank"))
    ok(kept.execute("%%ranks -o out\nlater(2)"))
    assert kept.value("list(out)") == [1.0, 2.0, 3.0]
    assert "half" not in kept.value("list(globals())")


def test_a_function_of_an_earlier_cell_in_a_traceback(kept: Kernel) -> None:
    reply = kept.execute("%%ranks\nimport inspect\nprint(inspect.getsource(half))\nhalf('x')")
    assert reply.ename == "RankRaisedError" and "TypeError" in reply.traceback
    assert "----> 5     return x / 2" in reply.traceback and "----> 4 half('x')" in reply.traceback
    assert "def half(x):" in reply.text()
    assert ok(kept.execute("%%ranks\nstate")).result == "[0] 0\n[1] 10\n[2] 20", "the ranks live on"


@once
def test_some_ranks(kept: Kernel) -> None:
    reply = ok(kept.execute("%%ranks 0,2\ntime.sleep(0.3)\nstate += 5\nstate"))
    assert reply.result == "[0] 5\n[2] 25"
    assert reply.table["text/plain"].startswith("Ranks 0 and 2 of 3 · kept ranks · ")
    assert reply.table["text/plain"].count("idle") == 1
    assert ok(kept.execute("%%ranks 1:\nstate")).result == "[1] 10\n[2] 25"
    assert ok(kept.execute("%%ranks -1\nstate")).result == "[2] 25"
    reply = kept.execute("%%ranks 7\nstate")
    assert reply.ename == "UsageError" and "there is no rank 7: the ranks are 0 to 2" in reply.traceback


@once
def test_push_and_pull(kept: Kernel) -> None:
    ok(kept.execute("lr, weights = 0.5, __import__('torch').arange(1000)"))
    reply = kept.execute("%%ranks\nlr")
    assert "NameError" in reply.traceback and "%%ranks --push lr sends it" in reply.traceback
    reply = ok(kept.execute("%%ranks --push lr,weights --pull state\nstate = lr * rank\nweights.sum().item()"))
    assert reply.result == "[0-2] 499500" and kept.value("list(state)") == [0.0, 0.5, 1.0]
    assert "no variable 'nothing' to push" in kept.execute("%%ranks --push nothing\n1").traceback


def test_a_failure_while_the_others_wait_leaves_all_usable(kept: Kernel) -> None:
    before = pids(kept)
    reply = kept.execute("%%ranks\nif rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    assert reply.ename == "RankRaisedError" and "rank 1 of 3: ZeroDivisionError" in reply.traceback
    assert "The process group was broken, and is created again." in reply.table["text/plain"]
    reply = ok(kept.execute("%%ranks\nt = torch.ones(1); dist.all_reduce(t)\nt.item(), state"))
    assert reply.result == "[0] (3.0, 0)\n[1] (3.0, 10)\n[2] (3.0, 20)"
    assert pids(kept) == before


@once
def test_what_was_built_on_a_group_that_is_no_more_says_so(kept: Kernel) -> None:
    """fully_shard has a device mesh, whose groups torch has forgotten."""
    make = "%%ranks\nfrom torch.distributed.fsdp import fully_shard\nmodel = fully_shard(torch.nn.Linear(3, 3))"
    ok(kept.execute(make))
    train = "%%ranks\nmodel(torch.ones(1, 3)).sum().backward()"
    ok(kept.execute(train))
    reply = kept.execute("%%ranks\ndist.new_subgroups(2)")
    assert reply.status == "error" and "created again after" not in reply.traceback, "another error, and before"
    kept.execute("%%ranks\nif rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    reply = kept.execute(train)
    assert "is not initialized" in reply.traceback
    assert "The process group was created again after an error. What was built on the old one" in reply.traceback
    ok(kept.execute(make))
    ok(kept.execute(train))


@pytest.mark.parametrize("where", ["time.sleep(600)", "time.sleep(600) if rank == 1 else dist.barrier()"])
def test_stop_leaves_all_usable(kept: Kernel, where: str) -> None:
    before = pids(kept)
    for _ in range(2):
        cell = kept.submit(f"%%ranks\nprint('begun')\n{where}")
        cell.until_ranks("begun", range(3))
        kept.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        assert ok(kept.execute("%%ranks\nt = torch.ones(1); dist.all_reduce(t)\nt.item()")).result == "[0-2] 3.0"
    assert pids(kept) == before


@once
def test_stop_reaches_ranks_in_which_an_earlier_cell_has_ignored_it(kept: Kernel) -> None:
    before = pids(kept)
    ok(kept.execute("%%ranks\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"))
    cell = kept.submit("%%ranks\nprint('begun')\ntime.sleep(600)")
    cell.until_ranks("begun", range(3))
    kept.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert pids(kept) == before


@once
def test_a_timeout_leaves_all_usable(kept: Kernel) -> None:
    reply = kept.execute("%%ranks -t 1\ntime.sleep(600)")
    assert reply.ename == "RunTimeoutError" and "time.sleep(600)" in reply.traceback
    assert ok(kept.execute("%%ranks\nstate")).result == "[0] 0\n[1] 10\n[2] 20"


@pytest.mark.parametrize("when", ["during", "between"])
def test_a_rank_that_dies_ends_the_session(kept: Kernel, when: str) -> None:
    before = pids(kept)
    if when == "during":
        reply = kept.execute("%%ranks\nif rank == 0: os._exit(3)\ndist.barrier()")
        assert reply.ename == "RankExitedError" and "exit code 3" in reply.traceback
    else:
        os.kill(before[1], signal.SIGKILL)
    wait_gone(before[:1] if when == "during" else before[1:2], 5)
    reply = kept.execute("%%ranks\nstate")
    if when == "during":
        assert reply.ename == "UsageError" and "`%%spawn 4 --keep` starts others" in reply.traceback
        assert "the kept ranks have ended (rank 0: process 0 terminated with exit code 3)" in reply.traceback
    else:  # it may be noticed by this cell, or just before
        assert reply.ename in ("UsageError", "RankExitedError") and "signal SIGKILL" in reply.traceback
    wait_gone(before, 5)
    kept.assert_no_rank()
    assert "3 ranks · ended: rank" in ok(kept.execute("%ranks")).text()
    assert ok(kept.execute("%ranks restart")).text().count(" idle ") == 3
    reply = kept.execute("%%ranks\nhalf(1)")
    assert "name 'half' is not defined" in reply.traceback, "a fresh session has no variables"
    cell = "%%ranks\nimport torch.distributed as dist\nrank, dist.get_world_size()"
    assert ok(kept.execute(cell)).result == "[0] (0, 3)\n[1] (1, 3)\n[2] (2, 3)"


@once
def test_profile_of_a_kept_cell(kept: Kernel) -> None:
    table = ok(kept.execute("%%ranks --timings\nrank;")).table["text/plain"]
    assert "run " in table and "start " not in table and "teardown" not in table


@pytest.fixture
def limit(kept: Kernel) -> Iterator[Callable[[float], None]]:
    """Sets the seconds after which a cell of kept ranks shows a table."""
    ok(kept.execute("from nbspawn._notebook import view as nbspawn_view"))
    usual = kept.value("nbspawn_view.AT_ONCE")

    def put(seconds: float) -> None:
        ok(kept.execute(f"nbspawn_view.AT_ONCE = {seconds}"))

    yield put
    put(usual)


@once
def test_what_ends_at_once_shows_no_table(kept: Kernel, limit: Callable[[float], None]) -> None:
    limit(PATIENCE)
    assert [output["type"] for output in ok(kept.execute("%%ranks\nstate")).outputs] == ["execute_result"]
    assert ok(kept.execute("%%ranks\nstate;")).outputs == []
    reply = ok(kept.execute("%%ranks\nprint('said')"))
    assert [output["type"] for output in reply.outputs] == ["stdout"] and reply.of(2) == ["said"]
    limit(0)
    assert ok(kept.execute("%%ranks\nprint('said')")).table["text/plain"].count("done") == 3


@once
def test_post_mortem_and_locals_for_one_cell(kept: Kernel) -> None:
    cell = kept.submit("%%ranks 1 --pdb --locals\nhalf('x')", answers=["p x", "q"])
    reply = cell.wait()
    assert [prompt for prompt, _ in reply.prompts] == ["[1] ipdb> ", "[1] ipdb> "] and "'x'" in reply.of(1)
    assert "x = 'x'" in reply.traceback
    assert kept.execute("%%ranks 1\nhalf('x')").prompts == [], "it was for that cell"


def test_all_wait_for_each_other_and_stop_leaves_them_usable(kept: Kernel) -> None:
    before = pids(kept)
    cell = kept.submit("%%ranks\nprint('begun')\ndist.recv(torch.ones(1), (rank + 1) % 3)")
    cell.until_ranks("begun", range(3))
    kept.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "is created again" in reply.table["text/plain"]
    assert ok(kept.execute("%%ranks\nt = torch.ones(1); dist.all_reduce(t)\nt.item()")).result == "[0-2] 3.0"
    assert pids(kept) == before


@once
def test_the_verbs_of_ranks_that_are_idle(kept: Kernel) -> None:
    assert "the ranks are idle" in ok(kept.execute("%ranks stacks")).text()
    assert "nothing to interrupt" in ok(kept.execute("%ranks interrupt")).text()
    assert "Rank 1: idle; the debugger opens" in ok(kept.execute("%ranks debug 1")).text()
    reply = ok(kept.submit("%%ranks\nstate += 1\nstate", answers=["!state = 5", "c"]).wait())
    assert reply.result == "[0] 1\n[1] 6\n[2] 21" and "[1] ipdb> " in reply.prompts[0]
    assert ok(kept.execute("%%ranks\nstate")).prompts == []
    reply = kept.execute("%ranks dance")
    assert reply.ename == "UsageError" and "expected one of stop, restart" in reply.traceback
    assert kept.complete("%ranks st") == ["stacks", "stop"] and {"off", "on"} <= set(kept.complete("%ranks auto o"))
    assert "--push" in kept.complete("%%ranks --pu")


def test_the_debugger_in_a_kept_cell(kept: Kernel) -> None:
    cell = kept.submit("%%ranks\nif rank == 1: breakpoint()\nstate", answers=["!state = 77", "c"])
    assert ok(cell.wait()).result == "[0] 0\n[1] 77\n[2] 20"


def test_several_sessions(kept: Kernel, method: str) -> None:
    reply = kept.execute("%%spawn 2 --keep\nrank")
    assert reply.ename == "UsageError" and "end them with `%ranks stop`, or" in reply.traceback
    ok(kept.execute(f"%%spawn 2 --keep --name eval -m {method}\nx = rank + 5"))
    for _ in range(3):
        assert ok(kept.execute("%%ranks @eval\nx")).result == "[0] 5\n[1] 6"
        assert ok(kept.execute("%%ranks\nstate")).result == "[0] 0\n[1] 10\n[2] 20"
    assert ok(kept.execute("%%ranks @eval 1\nx")).result == "[1] 6"
    message = ok(kept.execute("%ranks")).text()
    assert "3 ranks" in message and "2 ranks @eval" in message
    ok(kept.execute("%ranks stop @eval"))
    assert "@eval" not in ok(kept.execute("%ranks")).text()
    assert "there are no kept ranks named 'eval'" in kept.execute("%%ranks @eval\nx").traceback


@once
@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%spawn 2 --name x\n1", "--name needs --keep or --background: other ranks end with the cell"),
        ("%%spawn 2 --idle-timeout 5\n1", "--idle-timeout needs --keep: other ranks end with the cell"),
        (
            "%%spawn 2 --name y --keep --idle-timeout -1\n1",
            "idle_timeout must be a positive number of seconds, got -1.0",
        ),
        ("%%spawn 2 --keep --name a-b\n1", "'a-b' cannot be a name"),
        ("%%ranks 0..1\n1", "neither ranks, such as 0,2 or 1:, nor a name"),
        ("%%ranks @nobody\n1", "`%%spawn 4 --keep --name nobody` starts some"),
        ("%%ranks --background --pull x\n1", "--pull cannot be used with --background"),
        ("%%ranks\nfor x in", "SyntaxError"),
        ("%ranks auto on @nobody", "there are no kept ranks named 'nobody'"),
        ("%ranks logs 9", "there is no rank 9: the ranks are 0 to 2"),
        ("%ranks debug x", "'x' is neither ranks, such as 0,2 or 1:, nor a name"),
        ("%ranks 'logs", 'No closing quotation in "\'logs"'),
        ("%%ranks 0,\n1", "'0,' is neither ranks"),
        ("%%ranks 3:\n1", "3: selects none of the 3 ranks"),
        ("%%ranks\n \n", "write what the ranks should run below the %%ranks line"),
    ],
)
def test_usage_errors(kept: Kernel, cell: str, says: str) -> None:
    before = pids(kept)
    reply = kept.execute(cell)
    assert reply.status == "error" and says in reply.traceback
    assert all(map(lives, before)) and pids(kept) == before


def test_ranks_without_anything_to_do_end(kernel: Kernel) -> None:
    ok(kernel.execute("%%spawn 2 --keep --idle-timeout 0.3\nx = rank"))
    kernel.assert_no_rank(10)
    reply = kernel.execute("%%ranks\nx")
    assert reply.ename == "UsageError" and "they had nothing to do for 0.3 s" in reply.traceback
    ok(kernel.execute("%ranks stop"))


@once
def test_output_of_a_kept_cell(kept: Kernel) -> None:
    cell = "%%ranks\nprint('said', rank)\nfrom IPython.display import HTML, display\ndisplay(HTML('x'))"
    reply = ok(kept.execute(cell))
    assert all(f"said {rank}" in reply.of(rank) for rank in range(3))
    assert sum(output.get("data", {}).get("text/html") == "x" for output in reply.outputs) == 3
    path = ok(kept.execute("%ranks logs 1")).text().strip()
    with open(path) as log:
        assert "said 1" in log.read()


def test_stop_ends_them_and_what_they_have_started(kept: Kernel) -> None:
    before = pids(kept)
    ok(kept.execute("%%ranks --pull child\nimport subprocess\nchild = subprocess.Popen(['sleep', '600']).pid"))
    children = kept.value("list(child)")
    assert all(map(lives, [*before, *children]))
    ok(kept.execute("%ranks stop"))
    wait_gone([*before, *children], 5)
    kept.assert_no_rank()


def test_a_restarted_kernel_leaves_none(own_kernel: Kernel) -> None:
    ok(own_kernel.execute(START.format(method="forkserver")))
    before = pids(own_kernel)
    assert len(before) == 3
    own_kernel.restart(now=True)
    wait_gone(before, 5)


def test_unloading_ends_them(own_kernel: Kernel) -> None:
    ok(own_kernel.execute(START.format(method="fork")))
    before = pids(own_kernel)
    ok(own_kernel.execute("%unload_ext nbspawn"))
    wait_gone(before, 5)
