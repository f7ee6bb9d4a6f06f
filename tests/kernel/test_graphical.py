"""The front end's own debugger (JupyterLab's bug button, VS Code's Debug Cell) stops ranks: its requests, over the
control channel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from debugged import Debugged
from kernels import Cell, ExecutedKernel, Kernel, ok, prepare, ranks_of, wait_until
from methods import EVERY_METHOD

LOOP = """
import time
n = 0
while n < 100_000:
    n += 1
    time.sleep(0.01)
n"""


@pytest.fixture(scope="module")
def one_for_all(workplace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with ExecutedKernel(tmp_path_factory.mktemp("debugged")) as found:
        prepare(found)
        yield found


@pytest.fixture
def kernel(one_for_all: Kernel) -> Iterator[Kernel]:
    yield one_for_all
    assert not ranks_of(one_for_all.pid)
    assert "Traceback" not in one_for_all.terminal, one_for_all.terminal


@pytest.fixture
def debugged(kernel: Kernel) -> Iterator[Debugged]:
    with Debugged(kernel) as found:
        found.switch_on()
        yield found


def paused(cell: Cell, ranks: int) -> None:
    """Wait until the table says it of so many ranks."""
    cell.see(
        lambda: cell.reply.outputs and cell.reply.table["text/plain"].count("paused") == ranks, "the table says so"
    )


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_rank_stops_steps_and_goes_on(debugged: Debugged, method: str) -> None:
    code = f"""%%spawn 2 -m {method}
def scaled(lr):
    x = lr * rank
    return x + 1

y = scaled(2.0)
y"""
    cell = debugged.stopping(code, 4)
    stack = [("scaled", 4), ("<module>", 6)]
    assert debugged.stops_of(2) == [(f"rank {rank}: {name}", line) for rank in (0, 1) for name, line in stack]
    of_zero, _, of_one, _ = debugged.frames()
    assert debugged.variables(of_zero) == {"lr": "2.0", "x": "0.0"}
    assert debugged.variables(of_one) == {"lr": "2.0", "x": "2.0"}
    assert debugged.evaluate("x * 10", of_one) == "20.0"
    paused(cell, 2)
    assert "4  return x + 1" in cell.reply.table["text/plain"]
    stack = debugged.step(cell)
    assert stack[0][0].startswith("rank 1"), "the rank that is looked at comes first"
    if stack[0][1] == 6:  # from Python 3.12 on it stops where the function has returned to, too
        debugged.step(cell)
    assert sorted(debugged.stops_of(2)) == [("rank 0: <module>", 7), ("rank 1: <module>", 7)]
    assert not debugged.ask("scopes", frameId=of_one["id"])["success"], "that frame is no more"
    debugged.request("next", threadId=1)  # beyond the last line
    reply = ok(cell.wait())
    assert reply.result == "[0] 1.0\n[1] 3.0" and debugged.stopped == []
    assert "debugger" not in reply.text() + reply.text("stderr")


def test_kept_ranks_and_a_condition_on_one(debugged: Debugged) -> None:
    kernel = debugged.kernel
    ok(kernel.execute("%%spawn 2 --keep\nv = rank + 1"))
    code = "%%ranks\nfor j in range(20):\n    q = j * v\nq"
    cell = debugged.stopping(code, {"line": 3, "condition": "j == 7 and rank == 1"})
    (frame,) = debugged.frames()
    assert frame["name"] == "rank 1: <module>" and debugged.evaluate("j", frame) == "7"
    debugged.request("setExpression", expression="v", value="100", frameId=frame["id"])
    assert debugged.go_on(cell).result == "[0] 19\n[1] 1900"
    debugged.switch_off()
    assert ok(kernel.execute("%%ranks\nimport sys\nv, sys.gettrace()")).result == "[0] (1, None)\n[1] (100, None)"
    debugged.switch_on()
    cell = debugged.stopping(code, 4)
    assert len(debugged.stops_of(2)) == 2
    debugged.go_on(cell)
    ok(kernel.execute("%ranks stop"))


def test_tensors_are_listed_with_what_they_are(debugged: Debugged) -> None:
    code = """%%spawn 2
import torch, numpy as np
def train():
    few = torch.tensor([[1.0, 2.5], [rank, 4.0]], requires_grad=True)
    few.sum().backward()
    many, array = torch.arange(6000.0).reshape(60, 100), np.arange(100.0)
    net, nested = torch.nn.Linear(4, 2), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    loss = torch.tensor(float("nan"))
    return few.shape
train()"""
    cell = debugged.stopping(code, 9)
    debugged.stops_of(2)
    frame = next(frame for frame in debugged.frames() if frame["name"] == "rank 1: train")
    shown = {name: (one["type"], one["value"]) for name, one in debugged.listed(frame).items()}
    few = "Tensor 2×2 float32 cpu: tensor([[1.0000, 2.5000], [1.0000, 4.0000]])"
    assert shown["few"] == (few, few), "JupyterLab shows the type of what has parts, VS Code the value"
    assert shown["many"][0] == "Tensor 60×100 float32 cpu: min 0, mean 3000, max 5999"
    assert shown["array"][0] == "ndarray 100 float64: min 0, mean 49.5, max 99"
    assert shown["net"][0] == "Linear, 10 parameters, training"
    assert shown["loss"][0] == "Tensor nan float32 cpu", "the value comes first: the space is short"
    assert list(debugged.listed(frame, of="net")) == ["weight", "bias", "training", "in_features", "out_features"]
    parts = debugged.listed(frame, of="few")
    assert list(parts) == ["shape", "dtype", "device", "requires_grad", "grad", "[0]", "[1]"]
    assert (
        parts["[1]"]["value"] == "Tensor 2 float32 cpu: tensor([1., 4.])" and parts["[1]"]["evaluateName"] == "few[1]"
    )
    assert list(debugged.listed(frame, of="nested")) == ["dtype", "device", "requires_grad"]
    debugged.request("copyToGlobals", srcVariableName="few", dstVariableName="taken", srcFrameId=frame["id"])
    assert debugged.evaluate("taken.grad", frame) == "tensor([[1., 1.],\n        [1., 1.]])"
    rich = debugged.request("richInspectVariables", variableName="many", frameId=frame["id"])
    assert rich["data"]["text/plain"].startswith("tensor([[")
    reply = debugged.go_on(cell)
    assert reply.result == "[0-1] torch.Size([2, 2])" and not reply.text("stderr")


def test_functions_of_other_cells_and_own_modules(debugged: Debugged) -> None:
    kernel = debugged.kernel
    defined = "def doubled(x):\n    y = 2 * x\n    return y"
    mine = kernel.folder / "mine.py"
    mine.write_text("def halved(x):\n    z = x / 2\n    return z\n")
    ok(kernel.execute(defined))
    ok(kernel.execute("import mine"))
    debugged.breakpoints(defined, 3)
    debugged.breakpoints_in(str(mine), 3)
    cell = kernel.submit("%%spawn 2\nmine.halved(doubled(rank))")
    debugged.until(cell, "stopped")
    assert debugged.stops_of(2)[:2] == [("rank 0: doubled", 3), ("rank 0: <module>", 2)]
    debugged.request("continue", threadId=1)
    debugged.until(cell, "stopped")
    assert debugged.stops_of(2)[0] == ("rank 0: halved", 3)
    assert debugged.frames()[0]["source"]["path"] == str(mine)
    assert debugged.go_on(cell).result == "[0] 0.0\n[1] 1.0"
    ok(kernel.execute("import nbspawn\ndef f(i):\n    return doubled(i)"))
    cell = kernel.submit("list(nbspawn.spawn(f, nprocs=2))")
    debugged.until(cell, "stopped")
    assert debugged.stops_of(2)[:2] == [("rank 0: doubled", 3), ("rank 0: f", 3)]
    assert debugged.go_on(cell).result == "[0, 2]"


def test_stop_ends_paused_ranks(debugged: Debugged) -> None:
    cell = debugged.stopping("%%spawn 2\nx = rank\ny = 2\nimport time\ntime.sleep(600)", 3)
    debugged.stops_of(2)
    debugged.kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "Ranks 0-1 were at line 3." in reply.traceback
    wait_until(lambda: debugged.stopped == [], "the debugger knows that they have gone")
    assert not ranks_of(debugged.kernel.pid)


def test_kept_ranks_that_were_stopped_while_paused_run_the_next_cell(debugged: Debugged) -> None:
    kernel = debugged.kernel
    ok(kernel.execute("%%spawn 2 --keep -g 60\nv = rank"))
    cell = debugged.stopping("%%ranks\nx = v\ny = 2\ny", 3)
    debugged.stops_of(2)
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt" and debugged.stopped == []
    assert ok(kernel.execute("%%ranks\nx + 1")).result == "[0] 1\n[1] 2"
    ok(kernel.execute("%ranks stop"))


def test_the_debugger_is_switched_off_while_they_are_paused(debugged: Debugged) -> None:
    kernel = debugged.kernel
    ok(kernel.execute("%%spawn 2 --keep\npass"))  # to load the debugger alone may take them 3 s
    cell = debugged.stopping("%%ranks --timeout 3\nx = rank\ny = 2\ny", 3)
    debugged.stops_of(2)
    paused(cell, 2)
    cell.see(lambda: re.search(r" [4-9]\.\d s\n", cell.reply.table["text/plain"]), "more than three seconds pass")
    debugged.switch_off()
    assert ok(cell.wait()).result == "[0-1] 2"
    ok(kernel.execute("%ranks stop"))


@pytest.mark.extended
def test_kept_ranks_while_it_is_switched_off_and_on_and_pauses_them(debugged: Debugged) -> None:
    kernel = debugged.kernel
    ok(kernel.execute("%%spawn 2 --keep\nimport os"))

    def opened() -> object:
        return ok(kernel.execute("%%ranks\nlen(os.listdir('/proc/self/fd'))")).result

    before = opened()
    for _ in range(2):
        debugged.switch_off()
        opened()
        debugged.switch_on()
        wait_until(lambda: opened() == before, "the sockets of the last time are closed, by the debugger's own threads")
    debugged.request("pause", threadId=1)  # there is nothing to pause
    assert opened() == before and not debugged.told("stopped")
    ok(kernel.execute("%ranks stop"))


@pytest.mark.extended
def test_a_thread_of_the_user_s_stops_while_the_rank_waits_for_it(debugged: Debugged) -> None:
    code = """%%spawn 2
import threading
def work():
    x = 10 * rank
    results.append(x)

results = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
results"""
    cell = debugged.stopping(code, 5)
    paused(cell, 2)
    at = "5  results.append(x)"
    cell.see(lambda: cell.reply.table["text/plain"].count(at) == 2, "the table says where the threads have stopped")
    assert debugged.stops_of(2)[0] == ("rank 0: work", 5)
    assert debugged.go_on(cell).result == "[0] [0]\n[1] [10]"


@pytest.mark.extended
def test_ranks_of_two_runs_are_listed_one_run_after_the_other(debugged: Debugged) -> None:
    kernel = debugged.kernel
    behind = debugged.stopping("%%spawn 2 --background\nx = rank\nx", 3)
    debugged.stops_of(2)
    front = debugged.stopping("%%spawn 2\ny = rank\nz = 2\ny", 4)
    wait_until(lambda: len(debugged.stack()) == 4, "the ranks of both stop")
    assert [line for _, line in debugged.stack()] in ([3, 3, 4, 4], [4, 4, 3, 3])
    last = debugged.frames()[-1]
    debugged.variables(last)
    assert debugged.frames()[0]["line"] == debugged.frames()[1]["line"] == last["line"]
    assert debugged.go_on(front).result == "[0] 0\n[1] 1"
    behind.see(lambda: behind.reply.table["text/plain"].count("done") == 2, "the other run ends")
    ok(kernel.execute("%ranks stop"))


@pytest.mark.extended
def test_a_breakpoint_that_is_set_while_ranks_start(debugged: Debugged) -> None:
    code = f"%%spawn 2{LOOP}"
    cell = debugged.kernel.submit(code)
    debugged.breakpoints(code, 5)
    assert debugged.stops_of(2) == [("rank 0: <module>", 5), ("rank 1: <module>", 5)]
    debugged.kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"


@pytest.mark.extended
def test_only_the_user_s_threads_are_traced_and_groups_wait_for_a_day(debugged: Debugged) -> None:
    code = """%%spawn 2
import threading, torch.distributed as dist
from torch.distributed.distributed_c10d import _get_pg_default_device
dist.init_process_group("gloo")
traced = [one.name for one in threading.enumerate() if not getattr(one, "pydev_do_not_trace", False)]
days = dist.group.WORLD._get_backend(_get_pg_default_device()).options._timeout.days
traced, days"""
    cell = debugged.stopping(code, 7)
    debugged.stops_of(2)
    assert debugged.go_on(cell).result == "[0-1] (['MainThread'], 1)"
    names = [thread["name"] for thread in debugged.request("threads")["threads"]]
    assert "MainThread" in names and not [name for name in names if "nbspawn" in name]


def test_the_notebook_s_variables_are_listed_while_ranks_are_paused(debugged: Debugged) -> None:
    ok(debugged.kernel.execute("mine = 41"))
    cell = debugged.stopping("%%spawn 2\nx = rank\nx", 3)
    for _ in range(2):  # JupyterLab asks at each message of the cell
        listed = debugged.request("inspectVariables")["variables"]
        assert "41" in [one["value"] for one in listed if one["name"] == "mine"]
    debugged.go_on(cell)


def test_it_is_switched_on_while_ranks_run(kernel: Kernel) -> None:
    cell = kernel.submit(f"%%spawn 2 --background{LOOP}")
    ok(cell.wait())
    with Debugged(kernel) as debugged:
        debugged.switch_on()
        debugged.breakpoints(f"%%spawn 2 --background{LOOP}", 5)
        debugged.until(cell, "stopped")
        assert debugged.stops_of(2) == [("rank 0: <module>", 5), ("rank 1: <module>", 5)]
        paused(cell, 2)
        debugged.evaluate("n = 100_000", debugged.frames()[0])
        debugged.breakpoints(f"%%spawn 2 --background{LOOP}")
        debugged.request("continue", threadId=1)
        cell.see(lambda: "done" in cell.reply.table["text/plain"], "rank 0 ends")
    ok(kernel.execute("%ranks stop"))


def test_breakpoint_in_the_code_and_ranks_debug_open_it(debugged: Debugged) -> None:
    kernel = debugged.kernel
    cell = debugged.stopping("%%spawn 2\nx = rank\nbreakpoint()\nx += 1\nx")
    assert [line for _, line in debugged.stops_of(2)] == [3, 3]
    assert debugged.step(cell)[0][1] == 4 and not cell.reply.prompts
    assert debugged.go_on(cell).result == "[0] 1\n[1] 2"
    background = kernel.submit(f"%%spawn 2 --background{LOOP}")
    ok(background.wait())
    background.see(lambda: "time.sleep" in background.reply.table["text/plain"], "they run")
    reply = ok(kernel.execute("%ranks debug 1"))
    assert not reply.prompts
    debugged.until(background, "stopped")
    (frame,) = debugged.frames()
    assert frame["name"] == "rank 1: <module>" and "rank 1: paused at line" in reply.text()
    debugged.request("continue", threadId=1)
    ok(kernel.execute("%ranks stop"))


@pytest.mark.extended
def test_with_debugpy_ranks_are_for_its_clients(debugged: Debugged) -> None:
    code = "%%spawn 2 --debugpy\nx = rank\nx"
    debugged.breakpoints(code, 3)
    assert ok(debugged.kernel.execute(code)).result == "[0] 0\n[1] 1" and not debugged.told("stopped")


@pytest.mark.extended
def test_a_rank_that_evaluates_a_collective_lets_the_others_answer(debugged: Debugged) -> None:
    code = "%%spawn 2 -b gloo\nimport torch, torch.distributed as dist\nt = torch.ones(1)\nz = 4\nt.item()"
    cell = debugged.stopping(code, 4)
    debugged.stops_of(2)
    of_zero, of_one = debugged.frames()
    waits = debugged.ask("evaluate", expression="dist.all_reduce(t)", frameId=of_zero["id"], context="repl")
    assert not waits["success"] and "rank 0 has not answered within 10 s" in waits["message"]
    assert debugged.evaluate("rank", of_one) == "1"
    debugged.evaluate("dist.all_reduce(t)", of_one)
    assert debugged.go_on(cell).result == "[0-1] 2.0"


def test_pdb_shows_the_frame_that_raised(debugged: Debugged) -> None:
    cell = debugged.stopping("%%spawn 2 --pdb\ndef inverse(x):\n    return 1 // x\ninverse(rank)")
    assert debugged.stops_of(1) == [("rank 0: inverse", 3), ("rank 0: <module>", 4)]
    assert debugged.variables(debugged.frames()[0])["x"] == "0"
    debugged.request("continue", threadId=1)
    assert cell.wait().ename == "RankRaisedError" and not cell.reply.prompts


@pytest.mark.extended
def test_exceptions(debugged: Debugged) -> None:
    code = "%%spawn 2\ndef inverse(x):\n    return 1 // x\ninverse(rank)"
    raised, of_cell, of_notebook = ("rank 0: inverse", 3), ("rank 0: <module>", 4), ("<module>", 1)
    for kind, stops in ("raised", (raised, of_cell, of_notebook)), ("userUnhandled", (raised, of_notebook)):
        debugged.request("setExceptionBreakpoints", filters=[kind])
        cell = debugged.kernel.submit(code)
        for name, line in stops:
            assert debugged.until(cell, "stopped")["reason"] == "exception"
            shown, at = debugged.stack()[0]
            assert shown.startswith(name) and at == line
            debugged.request("continue", threadId=1)
        assert cell.wait().ename == "RankRaisedError"
        debugged.request("setExceptionBreakpoints", filters=[])


def test_a_collective_that_one_rank_waits_in(debugged: Debugged) -> None:
    code = """%%spawn 2 -b gloo --timeout 30
import torch, torch.distributed as dist
t = torch.ones(1)
if rank == 1:
    z = 5
dist.all_reduce(t)
t.item()"""
    cell = debugged.stopping(code, 5)
    assert debugged.stack() == [("rank 1: <module>", 5)]
    assert debugged.step(cell) == [("rank 1: <module>", 6)]
    assert debugged.step(cell) == [("rank 1: <module>", 7)]
    assert debugged.go_on(cell).result == "[0-1] 2.0"


def test_processes_that_ranks_fork_are_not_debugged(debugged: Debugged) -> None:
    code = """%%spawn 2
import os, subprocess, sys
from torch.utils.data import DataLoader
def collate(batch):
    return sum(batch)
said = subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True, check=True).stdout
list(DataLoader(range(6), 3, num_workers=1, collate_fn=collate)), said"""
    debugged.breakpoints(code, 5)
    assert ok(debugged.kernel.execute(code)).result == "[0-1] ([3, 12], '7\\n')"


def test_continue_with_nothing_stopped_is_answered(debugged: Debugged) -> None:
    for command in ("continue", "next"):
        debugged.request(command, threadId=1)
    assert debugged.stopped == []


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["debugCell", "runByLine"])
def test_vs_code_shows_each_rank_as_a_thread(kernel: Kernel, mode: str) -> None:
    code = "%%spawn 2\nx = rank\ny = x + 1\ny"
    with Debugged(kernel, "vscode") as debugged:
        debugged.switch_on(__mode=mode, justMyCode=False)
        cell = debugged.stopping(code, 2)
        if mode == "debugCell":  # a second one would end the step of Run by Line
            later = debugged.until(cell, "stopped")
            assert later["preserveFocusHint"] and "hitBreakpointIds" not in later
        ranks = debugged.threads_of(2)

        def at(*lines: int) -> bool:
            return [debugged.stack(rank) for rank in ranks] == [[("<module>", line)] for line in lines]

        wait_until(lambda: at(2, 2), "both ranks have stopped")
        beyond = debugged.request("stackTrace", threadId=ranks[0], startFrame=1, levels=20)
        assert beyond["stackFrames"] == [] and beyond["totalFrames"] == 1
        debugged.request("next", threadId=ranks[1])
        wait_until(lambda: at(3, 3), "both ranks make the step")
        debugged.request("stepIn", threadId=ranks[0], singleThread=True)
        wait_until(lambda: at(4, 3), "one rank makes a step")
        assert debugged.evaluate("y", debugged.frames(ranks[0])[0]) == "1"
        debugged.request("continue", threadId=ranks[0])
        assert ok(cell.wait()).result == "[0] 1\n[1] 2"


@pytest.mark.extended
def test_a_breakpoint_that_logs_names_the_rank(kernel: Kernel) -> None:
    code = "%%spawn 2\nx = 0\nfor step in range(3):\n    x += step\nx"
    with Debugged(kernel, "vscode") as debugged:
        debugged.switch_on(justMyCode=False)
        debugged.breakpoints(code, *({"line": line, "logMessage": f"{line}: {{x + rank}}"} for line in (4, 5)))
        cell = kernel.submit(code)
        logged = {f"rank {rank}: {line}: {x + rank}\n" for rank in (0, 1) for line, x in ((4, 0), (4, 1), (5, 3))}

        def outputs() -> set[str]:
            return {one["body"]["output"] for one in debugged.events if one["event"] == "output"}

        cell.see(lambda: logged <= outputs(), "each rank's messages")
        assert ok(cell.wait()).result == "[0-1] 3"


@pytest.mark.extended
def test_off_it_costs_nothing(workplace: str, tmp_path: Path) -> None:
    with ExecutedKernel(tmp_path) as kernel:
        prepare(kernel)
        check_that_it_costs_nothing(kernel)


def check_that_it_costs_nothing(kernel: Kernel) -> None:
    loaded = "%%spawn 2\nimport sys\n'debugpy' in sys.modules, 'pydevd' in sys.modules, sys.gettrace()"
    assert ok(kernel.execute(loaded)).result == "[0-1] (False, False, None)"
    debugged = Debugged(kernel)
    debugged.switch_on()
    debugged.switch_off()
    assert ok(kernel.execute(loaded)).result == "[0-1] (False, False, None)"
    ok(kernel.execute("%unload_ext nbspawn"))
    assert "process_request" not in kernel.value("str(list(vars(get_ipython().kernel.debugger)))")
