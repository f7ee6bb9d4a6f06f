"""Debugging ranks from a real kernel, over its stdin as a front end has it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from kernels import Kernel, Reply, ok, plain, wait_gone, wait_until
from methods import EVERY_METHOD
from users import User


def said(reply: Reply, rank: int) -> str:
    """What a rank printed, without colours."""
    return plain("\n".join(reply.of(rank)))


def pids(reply: Reply) -> list[int]:
    """Of the ranks, which have printed them."""
    found = [int(pid) for pid in re.findall(r"^\[\d\] +pid (\d+)$", reply.text(), re.MULTILINE)]
    assert found, reply
    return found


REDUCED = """%%spawn 3 -b gloo -m {method} -o out
import torch, torch.distributed as dist
x = torch.tensor([float(rank)])
if rank == 1:
    breakpoint()
dist.all_reduce(x)
x.item()"""


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_breakpoint_in_one_rank_while_the_others_wait_for_it(kernel: Kernel, method: str) -> None:
    user = User(kernel, REDUCED.format(method=method))
    assert user.prompt() == "[1] ipdb> "
    shown = plain(user.cell.reply.text())
    assert re.search(r"\[1\] +> Cell In\[\d+\]\(5\)<.*>\(\)", shown) and "----> 5     breakpoint()" in shown
    assert "debugging" in user.cell.reply.table["text/plain"]
    assert "tensor([1.])" in user.say("p x")
    assert "rank = 1" not in user.say("!x += 100")
    shown = user.say("n")
    assert "----> 6 dist.all_reduce(x)" in shown
    assert user.say("c").count("ipdb") == 0
    ok(user.cell.wait())
    assert kernel.value("list(out)") == [103.0] * 3


def test_help_names_what_is_for_all_ranks(kernel: Kernel) -> None:
    user = User(kernel, "%%spawn 2\nprint('begun')\nbreakpoint()")
    shown = user.say("help")
    assert "Documented commands" in shown and "For all ranks (type help <topic>):" in shown
    assert "ranks  rank  all  diff" in shown
    assert "gives the command n to every rank" in user.say("h all")
    user.until(lambda: user.cell.reply.table["text/plain"].count("begun") == 2, "not what the debugger has shown last")
    user.say("all c")
    ok(user.cell.wait())


LOCKSTEP = """%%spawn 3 -b gloo -m {method} -o out
import torch, torch.distributed as dist
x = torch.tensor([float(rank)])
breakpoint()
dist.all_reduce(x)
x *= 2
x.item()"""


def test_lockstep(kernel: Kernel, method: str) -> None:
    user = User(kernel, LOCKSTEP.format(method=method))
    first = int(user.prompt()[1])
    wait_until(lambda: user.say("ranks").count("debugging, line 4: breakpoint()") == 3, "all have stopped")
    other = (first + 1) % 3
    user.say(f"rank {other}")
    assert user.prompt() == f"[{other}] ipdb> "
    assert re.search(r"\[0-2\] +> Cell In\[\d+\]\(5\)<.*>\(\)", user.say("all n"))
    assert re.search(r"\[0-2\] +> Cell In\[\d+\]\(6\)<.*>\(\)", user.say("")), "an empty line repeats"
    assert re.search(r"\[0-2\] +tensor\(\[3\.\]\)", user.say("all p x"))
    user.say("all c")
    ok(user.cell.wait())
    assert kernel.value("list(out)") == [6.0] * 3


def test_steps_go_from_statement_to_statement_and_end_with_the_cell(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 1 -m {method}\nimport json\nbreakpoint()\ny = json.dumps([rank])\nfor i in range(2):\n    z = i\ny"
    user = User(kernel, cell)
    user.prompt()
    lines = [user.say("n") for _ in range(6)]
    assert [
        int(message[1]) for message in (re.search(r"Cell In\[\d+\]\((\d+)\)", shown) or "??" for shown in lines)
    ] == [
        4,
        5,
        6,
        5,
        6,
        5,
    ]
    while not user.cell.over:
        shown = user.say("s")
        assert "Cell In" in shown or user.cell.over, "never in code that is not the user's"
    ok(user.cell.wait())


def test_a_function_of_another_cell_and_of_a_library(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("import json\ndef shout(word):\n    loud = word.upper()\n    breakpoint()\n    return loud"))
    number = kernel.value("len(In) - 2")
    user = User(kernel, f"%%spawn 2 -m {method} -o out\nword = shout('a') if rank else json.dumps('b')\nword")
    assert user.prompt() == "[1] ipdb> "
    where = user.say("w")
    # IPython 7 keeps no numbers of other cells: their files' names are shown
    assert (f"Cell In[{number}](4)shout()" in where or "(4)shout()" in where) and "(2)<" in where
    assert "interactiveshell" not in where and "nbspawn" not in where and "hidden" not in where
    assert "'A'" in user.say("p loud") and "'a'" in user.say("u", "p word if 'word' in dir() else 'a'")
    assert "Breakpoint 1 at" in user.say("d", "b json.dumps")
    user.say("!loud = 'changed'")
    user.say("c")
    ok(user.cell.wait())
    assert kernel.value("list(out)") == ['"b"', "changed"]


@pytest.mark.parametrize(
    "stop",
    [
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
        "from IPython.core.debugger import Pdb; Pdb().set_trace()",
        "import ipdb; ipdb.set_trace()",
    ],
)
def test_other_ways_into_the_debugger(kernel: Kernel, method: str, stop: str) -> None:
    user = User(kernel, f"%%spawn 2 -m {method}\nx = 5\nif rank == 0:\n    {stop}\nx")
    assert user.prompt().startswith("[0] ")
    assert "5" in user.say("p x")
    assert "Stopped here too" not in user.say("c")
    ok(user.cell.wait())


def test_interact(kernel: Kernel) -> None:
    user = User(kernel, "%%spawn 2 -m fork -o out\nx = [3]\nif rank == 1:\n    breakpoint()\nx[0]")
    user.say("interact")
    assert user.prompt() in ("[1] >>> ", "[1] In : ")
    assert "12" in user.say("x[0] * 4")
    user.say("x[0] = 7", "exit()")
    user.say("c")
    ok(user.cell.wait())
    assert kernel.value("list(out)") == [3, 7]


FAILS = """%%spawn 3 -b gloo -m {method} {options}
import torch.distributed as dist
def loss(total):
    scaled = total * 2
    return 1 / scaled
dist.barrier()
if rank == 1:
    loss(0)
dist.barrier()"""


def test_post_mortem(kernel: Kernel, method: str) -> None:
    user = User(kernel, FAILS.format(method=method, options="--pdb"))
    assert user.prompt() == "[1] ipdb> "
    shown = plain(user.cell.reply.text())
    assert "ZeroDivisionError: division by zero" in shown and "----> 5     return 1 / scaled" in shown
    assert "(0, 0)" in user.say("p total, scaled")
    assert "----> 8     loss(0)" in user.say("u")
    wait_until(lambda: user.say("p 1") and user.cell.reply.table["text/plain"].count("waiting") == 2, "peers wait")
    assert user.cell.reply.table["text/plain"].count("debugging") == 1
    user.say("q")
    reply = user.cell.wait()
    assert reply.ename == "RankRaisedError" and "rank 1 of 3: ZeroDivisionError" in reply.traceback
    assert "----> 5     return 1 / scaled" in reply.traceback and "loss(total)" in reply.traceback


def test_post_mortem_by_the_notebooks_own_switch(kernel: Kernel) -> None:
    ok(kernel.execute("%pdb on"))
    try:
        for method in ("fork", "forkserver"):
            user = User(kernel, FAILS.format(method=method, options=""))
            assert user.prompt() == "[1] ipdb> "
            user.say("q")
            reply = user.cell.wait()
            assert reply.ename == "RankRaisedError" and len(reply.prompts) == 1
            assert kernel.value("get_ipython().call_pdb") is True
    finally:
        kernel.execute("%pdb off")


def test_post_mortem_of_all_ranks(kernel: Kernel) -> None:
    user = User(kernel, "%%spawn 3 --pdb\nx = rank * 10\n1 / 0")
    first = int(user.prompt()[1])
    wait_until(lambda: user.say("ranks").count("debugging") >= 3, "all have stopped")
    shown = user.say("all p x")
    for rank in range(3):
        assert re.search(rf"\[{rank}\] +{rank * 10}\b", shown)
    user.say("q")
    reply = user.cell.wait()
    assert reply.ename == "RankRaisedError" and "ZeroDivisionError" in reply.traceback
    assert first in range(3)


@pytest.mark.parametrize("hook, asks", [("ray.util.rpdb._driver_set_trace", True), ("0", False)])
def test_another_hook_of_breakpoint_is_the_users_but_not_rays(
    kernel: Kernel, method: str, hook: str, asks: bool
) -> None:
    """The variable is the kernel's own once that has connected to a Ray cluster."""
    user = User(kernel, f"%%spawn 1 -m {method} --env PYTHONBREAKPOINT={hook}\nbreakpoint()\n7")
    if asks:
        user.say("c")
    assert ok(user.cell.wait()).result == "[0] 7" and len(user.cell.reply.prompts) == asks


def test_quit_ends_the_run_and_strands_nobody(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 3 -m {method} -g 600
import os, time
print('pid', os.getpid())
if rank == 2: time.sleep(600)
breakpoint()"""
    user = User(kernel, cell)
    user.prompt()
    user.say("q")
    reply = user.cell.wait()
    assert reply.ename == "KeyboardInterrupt"
    assert "quit in the debugger" in reply.table["text/plain"]
    wait_gone(pids(reply))
    assert kernel.value("6 * 7") == 42


STOPPED = """%%spawn 3 -m {method} -g 600
import os
print('pid', os.getpid())
try:
    breakpoint()
finally:
    print('tidied')"""


@pytest.mark.parametrize("interrupt", ["interrupt", "interrupt_every_process"])
def test_an_interrupt_at_the_prompt_ends_all_ranks_at_theirs(kernel: Kernel, method: str, interrupt: str) -> None:
    user = User(kernel, STOPPED.format(method=method))
    wait_until(lambda: user.say("ranks").count("debugging") >= 3, "all have stopped")
    getattr(kernel, interrupt)()
    reply = user.cell.wait()
    assert reply.ename == "KeyboardInterrupt" and reply.table["text/plain"].count("interrupted") == 3
    assert all("tidied" in said(reply, rank) for rank in range(3))
    wait_gone(pids(reply))


@pytest.mark.parametrize(
    ("method", "end"), [pytest.param("fork", "shutdown", marks=pytest.mark.extended), ("forkserver", "kill")]
)
def test_closing_the_notebook_at_the_prompt_leaves_no_rank(tmp_path: Path, method: str, end: str) -> None:
    with Kernel(tmp_path) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        user = User(kernel, STOPPED.format(method=method))
        user.prompt()
        ranks = pids(user.cell.reply)
        getattr(kernel, end)()
        wait_gone(ranks)


@pytest.mark.parametrize("stop", ["input('n?')", "breakpoint()"])
def test_post_mortem_of_an_error_that_was_raised_below_a_prompt(kernel: Kernel, stop: str) -> None:
    cell = f"%%spawn 2 -m fork --pdb --debugpy\nif rank == 1:\n    {stop}"
    reply = kernel.execute(cell, stdin=False)
    assert "RuntimeError: nobody can answer here" in reply.traceback and "line 3" in reply.traceback
    assert "IndexError" not in reply.traceback and "PYDEV" not in reply.text()
    assert re.search(r"\[1\] +-+> 3     " + re.escape(stop), plain(reply.text()))


@pytest.mark.parametrize("options", ["", "--pdb"])
def test_where_nobody_can_answer_there_is_an_error(kernel: Kernel, method: str, options: str) -> None:
    stop = "1 / 0" if options else "breakpoint()"
    reply = kernel.execute(f"%%spawn 2 -m {method} {options}\nif rank == 1:\n    {stop}", stdin=False)
    if options:
        assert "ZeroDivisionError" in reply.traceback and "nobody can answer here" in reply.text()
    else:
        assert "RuntimeError: nobody can answer here" in reply.traceback and "line 3" in reply.traceback


@pytest.mark.timing
@pytest.mark.extended
def test_no_clock_runs_at_the_prompt(kernel: Kernel) -> None:
    cell = """%%spawn 3 -b gloo -t 2 -g 5
import torch.distributed as dist; dist.barrier()  # all are connected
if rank == 1: breakpoint()
if rank == 2: 1 / 0
dist.barrier()"""
    user = User(kernel, cell)
    user.prompt()
    until = time.monotonic() + 6
    wait_until(lambda: time.monotonic() > until, "the time that the cell has is over three times")
    assert "42" in user.say("p 40 + 2")
    message = user.cell.reply.text()
    assert message.count("Rank 2 has failed: ZeroDivisionError: division by zero (line 4).") == 1
    table = user.cell.reply.table["text/plain"]
    assert "have waited" not in table and "has waited" not in table and "stopping" not in table
    user.say("c")
    reply = user.cell.wait()
    assert reply.ename == "RankRaisedError" and "rank 2 of 3: ZeroDivisionError" in reply.traceback


def test_a_breakpoint_because_a_peer_has_failed(kernel: Kernel, patient: None) -> None:
    cell = """%%spawn 2 -b gloo -g 60
import torch.distributed as dist; dist.barrier()  # all are connected
if rank: 1 / 0
try:
    dist.barrier()
except RuntimeError:
    breakpoint()"""
    user = User(kernel, cell)
    assert "42" in user.say("p 40 + 2")
    user.say("c")
    reply = user.cell.wait()
    assert reply.ename == "RankRaisedError" and "rank 1 of 2: ZeroDivisionError" in reply.traceback


def test_two_ranks_differ_and_their_output_is_not_mixed(kernel: Kernel) -> None:
    user = User(kernel, "%%spawn 2\nif rank:\n    x = 1\n    breakpoint()\nelse:\n    breakpoint()")
    wait_until(lambda: user.say("ranks").count("debugging") >= 2, "both have stopped")
    shown = [
        line[1:2] for line in plain(user.cell.reply.text()).splitlines() if re.match(r"\[[01]\] +(>|-*>? *\d )", line)
    ]
    assert "".join(shown) in (
        "0" * shown.count("0") + "1" * shown.count("1"),
        "1" * shown.count("1") + "0" * shown.count("0"),
    )
    user.say("all c")
    ok(user.cell.wait())


LOOPS = """%%spawn 3 -b gloo -m {method} -o out
import torch, torch.distributed as dist
x = torch.tensor([float(rank)])
if rank == 1:
    x += wait_for(1000)
dist.all_reduce(x)
x.item()"""


@pytest.fixture
def looping(kernel: Kernel) -> Kernel:
    ok(
        kernel.execute(
            "import time\ndef wait_for(limit):\n    count = 0\n    while count < limit:\n        time.sleep(600)\n"
            "        count += 1\n    return count"
        )
    )
    return kernel


def test_break_into_a_rank_that_runs(looping: Kernel, method: str) -> None:
    user = User(looping, LOOPS.format(method=method))
    user.see_controls()
    user.until(lambda: "wait_for" in user.cell.reply.table["text/plain"], "rank 1 is there")
    user.debug(1)
    assert user.prompt() == "[1] ipdb> "
    shown = plain(user.cell.reply.text())
    assert "wait_for" in shown and re.search(r"-+> 5         time.sleep\(600\)", shown), "where it stands, at once"
    assert {user.models[user.button(name)]["disabled"] for name in ("Stop", "Stacks", "Debug rank 1")} == {True}
    assert "(0, 1000)" in user.say("p count, limit")
    assert re.search(r"-+> 5     x \+= wait_for\(1000\)", user.say("u"))
    user.say("d", "!count = 2000")
    user.say_last("c")
    user.click("Stop")
    assert user.cell.wait().ename == "KeyboardInterrupt"


def test_break_into_a_function_that_spawn_runs(looping: Kernel, method: str) -> None:
    cell = f"""import nbspawn
def main(rank, limit):
    if rank == 0: return wait_for(limit)
    return rank
nbspawn.spawn(main, (3,), nprocs=2, start_method={method!r})"""
    user = User(looping, cell)
    user.see_controls()
    user.until(lambda: "time.sleep" in user.cell.reply.table["text/plain"], "rank 0 is there")
    user.debug(0)
    assert user.prompt().startswith("[0] ")
    assert "0" in user.say("p count")
    where = user.say("w")
    assert "main" in where and "wait_for" in where and "nbspawn/" not in where
    user.say("q")
    assert user.cell.wait().ename == "KeyboardInterrupt"


def test_break_into_a_rank_in_native_code(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method} -b gloo -o out
import time, torch.distributed as dist
over = 0
if rank:
    dist.barrier()
    over = 1
else:
    while not over: time.sleep(0.01)
    dist.barrier()
over"""
    user = User(kernel, cell)
    user.see_controls()
    user.until(lambda: "dist.barrier()" in user.cell.reply.table["text/plain"], "rank 1 is in native code")
    user.debug(1)
    user.cell.until("[1] waiting, line 5: dist.barrier()\nRank 1 will stop at the next line of Python")
    user.choose(0)
    user.until(lambda: "Debug all" in str(user.models), "the button says which rank")
    user.click("Debug all")
    assert user.prompt() == "[0] ipdb> "
    user.say("!over = 5")
    user.say("c")
    assert user.prompt() == "[1] ipdb> ", "when its call has returned"
    user.say("c")
    ok(user.cell.wait())
    assert kernel.value("list(out)") == [5, 1]


def test_break_into_a_rank_before_its_first_line(kernel: Kernel, tmp_path: Path, method: str) -> None:
    cell = f"""%%spawn 1 -m {method} -o out
!touch {tmp_path / "in"}; while [ ! -e {tmp_path / "go"} ]; do sleep 0.01; done
x = 5
x"""
    user = User(kernel, cell)
    user.see_controls()
    wait_until((tmp_path / "in").exists, "the command runs")
    user.click("Debug all")
    user.cell.until("Rank 0 will stop at the next line of Python")
    (tmp_path / "go").touch()
    user.prompt()
    assert re.search(r"-+> 3 x = 5", plain(user.cell.reply.text()))
    user.say("n", "!x = 7", "c")
    ok(user.cell.wait())
    assert kernel.value("out[0]") == 7


def test_a_rank_that_is_broken_into_while_it_displays_and_prints(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 1 -m {method} -o out
from IPython.display import display, HTML
count, go = 0, True
handle = display(HTML('0'), display_id=True)
while go:
    count += 1
    handle.update(HTML(str(count)))
count"""
    user = User(kernel, cell)
    user.see_controls()
    user.until(lambda: "HTML object" in str(user.cell.reply.shown), "the first display")
    for _ in range(5):
        user.click("Debug all")
        user.prompt()
        assert "True" in user.say("p go")
        user.say_last("c")
    user.click("Debug all")
    user.prompt()
    user.say("!go = False")
    user.say("c")
    ok(user.cell.wait())
    assert kernel.value("out[0]") > 5
