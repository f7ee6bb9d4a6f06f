"""Ranks that stay: state across cells, some of them, failures that leave them usable, ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
from kernels import PATIENCE, Kernel, lives, ok, once, wait_gone, wait_until

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
    assert "the process group of this call has ended: ranks were stopped, or one of them failed" in reply.traceback
    ok(kept.execute(make))
    ok(kept.execute(train))


MODELS = """%%ranks
import torch.distributed.optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

calls = []

def hook(state, bucket):
    calls.append(state)
    return default_hooks.allreduce_hook(state, bucket)

def made(**options):
    torch.manual_seed(0)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), **options)

def hooked(state, hook):
    model = made()
    model.register_comm_hook(state, hook)
    return model

def gradient(model, factor=1.0):
    model.zero_grad()
    model(torch.full((3, 2), factor * (rank + 1.0))).sum().backward()
    return model.module.weight.grad.flatten().tolist()

models = {
    'plain': made(),
    'static graph': made(static_graph=True),
    'views': made(gradient_as_bucket_view=True),
    'unused parameters': made(find_unused_parameters=True),
    'hook': hooked(None, hook),
    'hook with a group': hooked(dist.group.WORLD, hook),
    'compressed': hooked(None, default_hooks.fp16_compress_hook),
}
group = dist.new_group([0, 1, 2])
built_in, of_group = made(), made(process_group=group)
built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(made().parameters(), torch.optim.SGD, lr=0.1)
[[gradient(model) for model in models.values()] for _ in range(2)][-1]"""


@once
def test_what_was_made_with_the_group_follows_the_new_one_or_is_refused(kept: Kernel, patient: None) -> None:
    """Each model reduces as it did: with a static graph, with its hooks."""
    assert ok(kept.execute(MODELS)).result == f"[0-2] {[[6.0, 6.0]] * 7}"
    for stopped in ("time.sleep(600)", "dist.all_reduce(torch.ones(1)) if rank else time.sleep(600)", "1 / (rank - 1)"):
        begun = "late = models['plain'](torch.full((3, 2), rank + 1.0)).sum()\nmine = dist.new_subgroups(1)[0]"
        ok(kept.execute(f"%%ranks\nimport torch.distributed._functional_collectives as functional\n{begun}"))
        cell = kept.submit(f"%%ranks\nprint('begun')\n{stopped}")
        if "sleep" in stopped:
            cell.until_ranks("begun", range(3))
            kept.interrupt()
        cell.wait()
        late = kept.execute(
            "%%ranks\nwith torch.no_grad(): models['plain'](torch.ones(1, 2))\nlate.backward()"
        )  # after an error outside of the group it is the same group
        refused = "the forward of this DistributedDataParallel came before its process group ended" in late.traceback
        assert refused == ("sleep" in stopped) and (refused or late.status == "ok")
        again = "calls.clear()\nfound = [[gradient(model, 2.0) for model in models.values()] for _ in range(3)]"
        assert ok(kept.execute(f"%%ranks\n{again}\nfound[-1], len(calls)")).result == f"[0-2] {([[12.0, 12.0]] * 7, 6)}"
        for use, says in (
            ("gradient(of_group)", "this DistributedDataParallel was made with a process group that has ended"),
            ("gradient(built_in)", "this DistributedDataParallel was made with a process group that has ended"),
            ("dist.all_reduce(torch.ones(1), group=group)", "the process group of this call has ended"),
            ("optimizer.step()", "What was built on the old one must be created again"),
        ):
            assert says in kept.execute(f"%%ranks\n{use}").traceback
        value = "dist.all_reduce(one := torch.ones(1), group=dist.new_group([0, 1, 2]))\none.item()"
        assert ok(kept.execute(f"%%ranks\n{value}")).result == "[0-2] 3.0"
        reply = kept.execute("%%ranks\nfunctional.all_reduce(torch.ones(1), 'sum', mine).wait()")
        assert ("Could not resolve the process group" in reply.traceback) == refused, "or it is another's name now"


@pytest.mark.parametrize(
    "where",
    ["time.sleep(600)", *(f"if rank != 1: dist.{call}()\ntime.sleep(600)" for call in ("barrier", "new_group"))],
)
def test_stop_leaves_all_usable(kept: Kernel, where: str) -> None:
    """Also what is made while the others wait in the group's store."""
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
    wait_gone(before[:1] if when == "during" else before[1:2])
    reply = kept.execute("%%ranks\nstate")
    if when == "during":
        assert reply.ename == "UsageError" and "`%%spawn 4 --keep` starts others" in reply.traceback
        assert "the kept ranks have ended (rank 0: process 0 terminated with exit code 3)" in reply.traceback
    else:  # it may be noticed by this cell, or just before
        assert reply.ename in ("UsageError", "RankExitedError") and "signal SIGKILL" in reply.traceback
    wait_gone(before)
    kept.assert_no_rank()
    assert "3 ranks · ended: rank" in ok(kept.execute("%ranks")).text()
    assert ok(kept.execute("%ranks restart")).text().count(" idle ") == 3
    reply = kept.execute("%%ranks\nhalf(1)")
    assert "name 'half' is not defined" in reply.traceback, "a fresh session has no variables"
    cell = "%%ranks\nimport torch.distributed as dist\nrank, dist.get_world_size()"
    assert ok(kept.execute(cell)).result == "[0] (0, 3)\n[1] (1, 3)\n[2] (2, 3)"


@once
@pytest.mark.parametrize("killed", [0, 1])
def test_an_earlier_error_is_not_why_ranks_have_ended(kept: Kernel, killed: int) -> None:
    before = pids(kept)
    assert "mine" in kept.execute("%%ranks\nif rank == 1: raise ValueError('mine')").evalue
    os.kill(before[killed], signal.SIGKILL)
    wait_until(lambda: "3 ranks · ended: " in ok(kept.execute("%ranks")).text(), "it is noticed, and the others end")
    reply = kept.execute("%%ranks\nrank")
    why = "rank 0: process 0 terminated with signal SIGKILL", "a rank has ended; before that, rank 1: ValueError: mine"
    assert reply.ename == "UsageError" and why[killed] in reply.evalue
    ok(kept.execute("%ranks restart"))


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
    table = ok(kept.execute("%%ranks\nprint('said')")).table
    assert table["text/plain"].count("done") == 3
    assert sum(f'title="pid {rank.pid}"' in table["text/html"] for rank in kept.ranks()) == 3


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
    assert "(did you mean `%ranks stacks`?)" in kept.execute("%ranks stack").traceback
    assert "`%ranks debug` expects R, got nothing" in kept.execute("%ranks debug").traceback
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
    assert ok(kept.execute("%ranks stop @eval")).text() == "Ranks 0-1 @eval: ended.\n"
    assert "@eval" not in ok(kept.execute("%ranks")).text()
    assert "there are no kept ranks named 'eval'" in kept.execute("%%ranks @eval\nx").traceback


@once
@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%spawn 2 --name x\n1", "--name needs --keep or --background: other ranks end with the cell"),
        ("%%spawn 2 --idle-timeout 5\n1", "idle_timeout is for kept ranks (--keep): others end with the cell"),
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
    wait_gone([*before, *children])
    kept.assert_no_rank()


def test_unloading_ends_them(unloaded: Kernel) -> None:
    ok(unloaded.execute(START.format(method="fork")))
    before = pids(unloaded)
    ok(unloaded.execute("%unload_ext nbspawn"))
    wait_gone(before)


@once
def test_variables_that_do_not_load_leave_the_ranks_own_alone(kept: Kernel) -> None:
    """A function comes first, with the notebook's values, and then the argument that fails."""
    ok(
        kept.execute("""weights = 'of the notebook'
class Late:
    def __reduce__(self):
        return eval, ("1 / 0",)
late = Late()
def use(rank, late):
    return weights
session = get_ipython().find_cell_magic('spawn').__self__.sessions['']""")
    )
    ok(kept.execute("%%ranks\nweights = f'trained by {rank}'"))
    reply = kept.execute(
        "import nbspawn\nfrom nbspawn._engine.jobs import FunctionJob\nsession.run(FunctionJob(use, (late,)))"
    )
    assert reply.ename == "PayloadError" and "division by zero" in reply.traceback
    assert ok(kept.execute("%%ranks 1\nweights")).result == "[1] 'trained by 1'"


def test_a_session_that_nobody_holds_ends(own_kernel: Kernel) -> None:
    """A cell that makes one is run again."""
    ok(own_kernel.execute("import gc, os, nbspawn"))
    for _ in range(3):
        ok(own_kernel.execute("s = nbspawn.Session(2)\ns.start()\ngc.collect();"))
        wait_until(lambda: len(own_kernel.ranks()) == 2, "the ranks of the last one are left")
    before = own_kernel.value("len(os.listdir('/dev/fd'))")
    ok(own_kernel.execute("s = nbspawn.Session(2)\ns.start()\ngc.collect();"))
    wait_until(lambda: own_kernel.value("len(os.listdir('/dev/fd'))") == before, "its descriptors are closed")
    listed = ok(own_kernel.execute("%ranks")).text()
    assert listed.count("2 ranks of a Session") == 1 and str(own_kernel.ranks()[0].pid) in listed, listed
    ok(own_kernel.execute("s.close()"))
    wait_until(lambda: not own_kernel.ranks(), "no rank is left")
    assert "no ranks are alive" in ok(own_kernel.execute("%ranks")).text()


def test_closing_a_session_that_works_ends_its_ranks(own_kernel: Kernel) -> None:
    cell = """import threading, time, nbspawn
s = nbspawn.Session(2)
s.start()
seen = []
def work():
    try: s.execute('import time; time.sleep(600)')
    except BaseException as error: seen.append(type(error).__name__)
thread = threading.Thread(target=work)
thread.start()
while not any(state == 'running' for state in s._pool.states()): time.sleep(0.01)
s.close()
thread.join(60)
seen, thread.is_alive()"""
    assert ok(own_kernel.execute(cell)).result == "(['KeyboardInterrupt'], False)"
    wait_until(lambda: not own_kernel.ranks(), "no rank is left")
