"""Stop and death: interrupts reach every rank once, and no end of the kernel leaves anything running."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from kernels import Kernel, Reply, lives, ok, once, wait_gone, wait_until
from methods import PATIENCE
from widgets import Screen

FINALLY = """%%spawn 3 -m {method} -g {grace}
import time
try:
    print('ready')
    while True:
        time.sleep(0.01)
finally:
    with open({folder!r} + f'/finally-{{rank}}', 'a') as file:
        file.write('x')
"""


def interrupted(reply: Reply) -> Reply:
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt"), str(reply)
    return reply


def finally_ran(folder: Path, nprocs: int = 3) -> list[str]:
    return [(folder / f"finally-{rank}").read_text() for rank in range(nprocs)]


# ---------------------------------------------------------------- interrupts


@pytest.mark.timing
def test_stop_runs_every_finally_once(kernel: Kernel, method: str, tmp_path: Path) -> None:
    cell = kernel.submit(FINALLY.format(method=method, grace=600, folder=str(tmp_path)))
    cell.until_ranks("ready", range(3))
    pressed = time.monotonic()
    kernel.interrupt()
    reply = interrupted(cell.wait())
    assert time.monotonic() - pressed < 2
    assert finally_ran(tmp_path) == ["x"] * 3
    assert reply.table["text/plain"].count("interrupted") == 3
    assert kernel.execute(f"%%spawn 2 -m {method}\nrank").result == "[0] 0\n[1] 1"


def test_sigint_to_every_process_counts_once(kernel: Kernel, method: str, tmp_path: Path) -> None:
    cell = kernel.submit(FINALLY.format(method=method, grace=3, folder=str(tmp_path)))
    cell.until_ranks("ready", range(3))
    kernel.interrupt_every_process()
    reply = interrupted(cell.wait())
    assert finally_ran(tmp_path) == ["x"] * 3
    assert reply.table["text/plain"].count("interrupted") == 3
    assert kernel.execute(f"%%spawn 2 -m {method}\nrank").result == "[0] 0\n[1] 1"


STUBBORN = """%%spawn 2 -m {method} -g {grace}
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('ready')
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print('ignored')
"""


@once
def test_second_stop_kills_at_once(kernel: Kernel, method: str) -> None:
    cell = kernel.submit(STUBBORN.format(method=method, grace=600))
    cell.until_ranks("ready", range(2))
    kernel.interrupt()
    cell.until_ranks("ignored", range(2))
    kernel.interrupt()
    reply = interrupted(cell.wait())
    assert reply.table["text/plain"].count("killed") == 2


@once
def test_one_stop_goes_up_the_ladder(kernel: Kernel, method: str) -> None:
    cell = kernel.submit(STUBBORN.format(method=method, grace=0.3))
    cell.until_ranks("ready", range(2))
    kernel.interrupt()
    reply = interrupted(cell.wait())
    assert reply.table["text/plain"].count("killed") == 2


def test_stop_while_ranks_start(kernel: Kernel, method: str) -> None:
    for _ in range(5):
        cell = kernel.submit(f"print('now')\nget_ipython().run_cell_magic('spawn', '8 -m {method}', '''{SLEEP}''')")
        cell.until("now")
        kernel.interrupt()
        interrupted(cell.wait())
        kernel.assert_no_rank()


SLEEP = "import time\ntime.sleep(60)"


def test_stop_at_a_collective(kernel: Kernel, method: str) -> None:
    cell = kernel.submit(
        f"%%spawn 2 -m {method} -g 1 --backend gloo\nimport torch, torch.distributed as dist\nprint('ready')\n"
        "if rank: dist.all_reduce(torch.ones(1))\nelse:\n    import time; time.sleep(600)"
    )
    cell.until_ranks("ready", range(2))
    kernel.interrupt()
    interrupted(cell.wait())


def test_stop_of_ranks_that_wait_for_each_other_in_native_code(kernel: Kernel, method: str, tmp_path: Path) -> None:
    """They raise, and tidy up, without the grace period."""
    cell = kernel.submit(f"""%%spawn 2 -m {method} -g 600 --backend gloo
import torch, torch.distributed as dist
pair = dist.new_group([0, 1])
print('ready')
try:
    dist.all_reduce(torch.ones(1), group=pair if rank else None)
finally:
    open({str(tmp_path)!r} + f'/finally-{{rank}}', 'a').write('x')""")
    cell.until_ranks("ready", range(2))
    kernel.interrupt()
    reply = cell.wait()
    interrupted(reply)
    assert finally_ran(tmp_path, 2) == ["x"] * 2 and reply.table["text/plain"].count("interrupted") == 2, reply


def test_stop_of_a_shell_command(kernel: Kernel, method: str, tmp_path: Path) -> None:
    cell = kernel.submit(f"%%spawn 2 -m {method} -g 1\n!echo $$$$ > {tmp_path}/shell-$rank; exec sleep 1000")
    pids = []
    for rank in range(2):
        path = tmp_path / f"shell-{rank}"
        wait_until(lambda path=path: path.exists() and path.read_text().strip(), "the shell runs")
        pids.append(int(path.read_text()))
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", str(reply)
    wait_gone(pids)


@once
def test_a_failure_ends_the_peers_after_the_grace_period(kernel: Kernel, method: str, tmp_path: Path) -> None:
    cell = f"""%%spawn 3 -m {method} -g 600
import time
try:
    if rank == 0: 1 / 0
    time.sleep(600)
finally:
    open({str(tmp_path)!r} + f'/finally-{{rank}}', 'a').write('x')"""
    reply = kernel.execute(cell)
    assert "ZeroDivisionError" in reply.evalue
    assert finally_ran(tmp_path) == ["x"] * 3


@once
def test_children_of_a_rank_end_with_it(kernel: Kernel, method: str, tmp_path: Path) -> None:
    cell = f"""%%spawn 2 -m {method}
import subprocess
child = subprocess.Popen(['sleep', '1000'])
escaped = subprocess.Popen(['sleep', '1000'], start_new_session=True)
!sleep 1000 & echo $! > {tmp_path}/shell-{{rank}}
[child.pid, escaped.pid]"""
    assert kernel.execute(f"{cell.replace('%%spawn 2', '%%spawn 2 -o pids')}").status == "ok"
    pids = kernel.value("sum(pids, [])") + [int((tmp_path / f"shell-{rank}").read_text()) for rank in range(2)]
    wait_gone(pids)


# ---------------------------------------------------------------- the end of the kernel

GRANDCHILDREN = """%%spawn 3 {options}
import ctypes, json, os, subprocess, time
child = subprocess.Popen(['sleep', '1000'])
escaped = subprocess.Popen(['sleep', '1000'], start_new_session=True)  # as torch.compile's workers are
forked = os.fork()
if forked == 0:
    os.setsid()
    time.sleep(1000)
!sleep 1000 & echo $! > {folder}/shell-{{rank}}
shell = int(open(f'{folder}/shell-{{rank}}').read())
with open(f'{folder}/writing-{{rank}}', 'w') as file:
    json.dump([os.getpid(), child.pid, escaped.pid, forked, shell], file)
os.rename(f'{folder}/writing-{{rank}}', f'{folder}/pids-{{rank}}')
if rank == 2:
    ctypes.PyDLL(None).sleep(1000)  # a long C call that holds the GIL
if rank == 1:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        pass
"""


def start_grandchildren(kernel: Kernel, options: str, folder: Path) -> list[int]:
    """Ranks that will not go by themselves, each with four children; the pids of all fifteen processes."""
    folder.mkdir()
    kernel.submit(GRANDCHILDREN.format(options=options, folder=folder))
    files = [folder / f"pids-{rank}" for rank in range(3)]
    wait_until(lambda: all(file.exists() for file in files), "the ranks run")
    pids = [pid for file in files for pid in json.loads(file.read_text())]
    assert all(map(lives, pids))
    return pids


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param("kill", {}, marks=pytest.mark.timing),
        ("restart", {"now": True}),
        pytest.param("restart", {"now": False}, marks=pytest.mark.extended),
        ("shutdown", {"now": False}),
    ],
)
def test_kernel_ends(own_kernel: Kernel, how: str, options: dict[str, bool], tmp_path: Path) -> None:
    """With kept ranks, also behind a panel, with those that a button has started, and with those that will not go by
    themselves, in the background and not."""
    screen = Screen(own_kernel)
    ok(own_kernel.execute("%%spawn 2 --keep --name mine -m fork\nrank"))
    panel = screen.show("import nbspawn\nnbspawn.Session(2, start_method='forkserver').start()")
    panel.until_text("2 ranks · for", "idle")
    button = screen.show("def train(rank):\n    while True: pass\nnbspawn.interact(train, nprocs=1)")
    button.click("Run")
    button.until_text("running")
    pids = [process.pid for process in own_kernel.ranks()]
    assert len(pids) == 2 + 2 + 1
    pids += start_grandchildren(own_kernel, "-m forkserver --background", tmp_path / "background")
    pids += start_grandchildren(own_kernel, "-m fork", tmp_path / "foreground")
    old = own_kernel.pid
    getattr(own_kernel, how)(**options)
    wait_gone(pids, 2 if how == "kill" else PATIENCE)
    assert "Traceback" not in own_kernel.terminal
    if how == "restart":
        assert own_kernel.pid != old
        assert own_kernel.execute("%load_ext nbspawn").status == "ok"
        for method in ("fork", "forkserver"):
            assert ok(own_kernel.execute(f"%%spawn 2 -m {method}\nrank")).result == "[0] 0\n[1] 1"
        own_kernel.assert_no_rank()


@pytest.mark.extended
def test_kernel_shut_down_at_rest(own_kernel: Kernel, tmp_path: Path) -> None:
    import psutil

    assert own_kernel.execute("%%spawn 2\nrank").status == "ok"
    rest = [process.pid for process in psutil.Process(own_kernel.pid).children(recursive=True)]
    assert rest, "the fork server"
    own_kernel.shutdown(now=False)
    wait_gone(rest)  # they have nothing to hurry for
