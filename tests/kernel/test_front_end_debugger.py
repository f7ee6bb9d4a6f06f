"""The front end's own debugger is on (JupyterLab's bug button, VS Code's Debug Cell): ranks begin and end as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from debugged import Debugged
from kernels import ExecutedKernel, ok, wait_gone


@pytest.fixture(params=[pytest.param("before", marks=pytest.mark.extended), "after"])
def debugged(request: pytest.FixtureRequest, workplace: str, tmp_path: Path) -> Iterator[Debugged]:
    """Switched on before nbspawn is loaded, or after it."""
    with ExecutedKernel(tmp_path) as kernel, Debugged(kernel) as found:
        if request.param == "before":
            found.switch_on()
        ok(kernel.execute("%load_ext nbspawn"))
        if request.param == "after":
            found.switch_on()
        yield found


def test_ranks_start_stop_and_end_as_ever(debugged: Debugged, tmp_path: Path) -> None:
    kernel = debugged.kernel
    for method in ("auto", "fork", "forkserver", "spawn"):
        assert ok(kernel.execute(f"%%spawn 2 -m {method} -b gloo\nrank")).result == "[0] 0\n[1] 1"
    pids = tmp_path / "pids"
    cell = kernel.submit(f"""%%spawn 2 -m fork
import subprocess, sys, time
from torch.utils.data import DataLoader
said = subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True, check=True).stdout
left = subprocess.Popen(['sleep', '600'], start_new_session=True)
print(left.pid, file=open({str(pids)!r}, 'a'))
print('works', [len(batch) for batch in DataLoader(range(6), 3, num_workers=1)], said.strip())
time.sleep(600)""")
    cell.until_ranks("works [3, 3] 7", range(2))
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    for pid in pids.read_text().split():
        wait_gone([int(pid)])  # by the guardian: it has left the rank's session
    ok(kernel.execute("%%spawn 2 --keep\nx = rank"))
    assert ok(kernel.execute("%%ranks\nx")).result == "[0] 0\n[1] 1"
    started = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
    kernel.shutdown()
    wait_gone(started)


def test_it_does_not_stop_at_exceptions_within_nbspawn(debugged: Debugged) -> None:
    kernel = debugged.kernel
    ok(kernel.execute("%%spawn 2\nrank"))
    debugged.request("setExceptionBreakpoints", filters=["raised"])
    assert ok(kernel.execute("%%spawn 2 -m forkserver -b gloo\nrank + 1")).result == "[0] 1\n[1] 2"
    assert not any(event["event"] == "stopped" for event in debugged.events)


@pytest.mark.extended
def test_breakpoints_from_before_nbspawn_was_loaded(workplace: str, tmp_path: Path) -> None:
    with ExecutedKernel(tmp_path) as kernel, Debugged(kernel) as debugged:
        debugged.switch_on()
        code = "%%spawn 2\nx = rank\nx + 1"
        debugged.breakpoints(code, 3)
        ok(kernel.execute("%load_ext nbspawn"))
        cell = kernel.submit(code)
        debugged.until(cell, "stopped")
        debugged.stops_of(2)
        debugged.go_on(cell)
