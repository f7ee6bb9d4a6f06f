"""A session or a background run that is displayed: a panel, live between the cells; then its last picture."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kernels import Cell, Kernel, ok
from widgets import PANEL_THREADS, WIDGET, Part, Screen

START = "import nbspawn\ns = nbspawn.Session(2, start_method='{}').start()\ns"
LOOP = "import time, os\nprint('<b>begun</b>', rank, flush=True)\nwhile not os.path.exists({!r}): time.sleep(0.01)"


def begin(screen: Screen, method: str = "forkserver") -> Part:
    part = screen.show(START.format(method))
    part.until_text("2 ranks · for", "idle")
    return part


def ended(part: Part) -> str:
    """Wait until the widgets are closed and the picture says why; returns it."""
    part.until(lambda: part.root not in part.screen.models and "ended" in part.picture, "the panel is closed")
    return part.picture


# ---------------------------------------------------------------- kept ranks


def test_a_session_is_live(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    part = begin(screen)
    pids = kernel.value("s.pids")
    assert all(str(pid) in part.text for pid in pids)
    assert [part.enabled(name) for name in ("Interrupt", "Stacks", "Restart", "End")] == [False, False, True, True]
    assert part.reply.outputs[0]["data"]["text/plain"] == "<Session of 2 ranks: idle>"
    cell = kernel.submit(f"s.execute({LOOP.format(str(tmp_path / 'go'))!r})")
    part.until(lambda: part.text.count("● </span>running") == 2, "it shows the cell's ranks")
    part.until(lambda: part.picture.count("● </span>running") == 2, "the picture follows the states")
    (tmp_path / "go").touch()
    assert cell.wait().status == "ok"
    part.until_text("idle")
    part.until(lambda: "running" not in part.picture, "so does the picture")


def test_interrupt_leaves_the_ranks(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    pids = kernel.value("s.pids")
    ok(kernel.execute(f"h = s.execute({LOOP.format('never')!r}, background=True)"))
    part.click("Stacks")
    part.until_text("Where the ranks stand after", "time.sleep(0.01)")
    part.click("Interrupt")
    assert kernel.value("type(h.exception(20)).__name__") == "KeyboardInterrupt"
    part.until_text("idle")
    assert kernel.value("s.pids") == pids and kernel.value("list(s.execute('rank'))") == [0, 1]


def test_the_variables_of_idle_ranks(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    ok(kernel.execute("s.execute('answer = 42 + rank')"))
    part.click("Variables")
    part.until_text("Variables of 2 ranks", "answer", "42", "43")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_restart(kernel: Kernel, screen: Screen, method: str) -> None:
    part = begin(screen, method)
    pids = kernel.value("s.pids")
    for _ in range(3):
        part.click("Restart")
        part.until(lambda pids=pids: kernel.value("s.pids") != pids, "there are other ranks")
        pids = kernel.value("s.pids")
        part.until(lambda pids=pids: all(str(pid) in part.text for pid in pids), "it shows them")
    threads = "import threading, sys\n(threading.active_count(), len(sys.modules['nbspawn._notebook.panel']._panels))"
    if method == "fork":
        assert kernel.value(f"list(s.execute({threads!r}))")[0][1] == 0, "the panel is the kernel's"


def test_ranks_that_end_slowly_at_a_restart(kernel: Kernel, screen: Screen) -> None:
    """The panel looks every second, and must not take it for the end."""
    part = begin(screen)
    ok(kernel.execute("_ = s.execute('import atexit, time; atexit.register(time.sleep, 1.5)')\ns.restart()"))
    pids = kernel.value("s.pids")
    part.until(lambda: all(str(pid) in part.text for pid in pids), "it shows the new ranks")


def test_a_click_while_a_cell_runs(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    part = begin(screen)
    loop = LOOP.format(str(tmp_path / "go"))
    cell = kernel.submit(f"s.execute({loop!r})")
    part.until(lambda: part.text.count("● </span>running") == 2, "they run")
    part.click("End")
    part.click("Restart")
    part.until_text("the ranks work on a cell: Interrupt stops it")
    part.click("Interrupt")
    assert cell.wait().ename == "KeyboardInterrupt"
    assert kernel.value("s.alive") is True


def test_the_end(kernel: Kernel, screen: Screen) -> None:
    opened = set(screen.models)
    part = begin(screen)
    part.choose(1)
    part.click("End")
    assert "2 ranks · ended: they were stopped" in ended(part)
    assert kernel.value("(s.alive, s.ended)") == (False, "they were stopped")
    part.until(lambda: set(screen.models) <= opened, "all widgets are closed")


def test_one_ranks_log(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    part.choose(1)
    ok(kernel.execute("_ = s.execute(\"print(f'<b>only</b> {rank}', flush=True)\")"))
    part.until_text("&lt;b&gt;only&lt;/b&gt; 1")
    assert "<b>only" not in part.text and "only&lt;/b&gt; 0" not in part.text
    assert kernel.value("s.log_path(1)") in part.text


def test_a_session_before_its_start(kernel: Kernel, screen: Screen) -> None:
    part = screen.show("import nbspawn\ns = nbspawn.Session(2)\ns")
    part.until_text("2 ranks · not started yet")
    part.choose(1)
    part.until_text("nothing yet")
    ok(kernel.execute("_ = s.start()"))
    part.until_text("idle")


def test_a_rank_that_dies_while_it_is_idle(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    ok(kernel.execute("import os, signal\nos.kill(s.pids[1], signal.SIGKILL)"))
    assert "rank 1: " in ended(part)
    kernel.assert_no_rank()


def test_an_end_with_html(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    assert kernel.execute("s.execute('import sys; rank and sys.exit(\"<img src=x>\")')").status == "error"
    kernel.execute("s.execute('import os; os._exit(3)')")
    assert "<img" not in ended(part)


def test_two_displays_share_the_widget(kernel: Kernel, screen: Screen) -> None:
    first = begin(screen)
    models = screen.opened
    second = screen.show("s")
    assert second.root == first.root and screen.opened == models
    second.click("End")
    assert "they were stopped" in ended(second)
    pictures = list(map(id, kernel.displays.values()))  # of each id the newest: front ends update all
    assert id(second.reply.saved[1]) in pictures and id(first.reply.saved[1]) not in pictures
    third = ok(kernel.execute("s"))
    assert not any(WIDGET in output["data"] for output in third.outputs) and "ended" in str(third.outputs)


def test_nothing_is_sent_while_nobody_looks(kernel: Kernel, screen: Screen) -> None:
    ok(kernel.execute(START.format("forkserver")))
    screen.until(lambda: kernel.value("6 * 7") == 42, "what was sent has come")
    sent, end = screen.sent, time.monotonic() + 2.5
    while time.monotonic() < end:
        screen.read()
    assert screen.sent == sent


def test_the_end_within_a_cell_that_captures(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    wait = "while any('panel' in thread.name for thread in threading.enumerate()): time.sleep(0.01)"
    ok(kernel.execute(f"%%capture captured\nimport threading, time\ns.close()\n{wait}"))
    assert "they were stopped" in ended(part)
    assert kernel.value("captured.outputs") == []


# ---------------------------------------------------------------- runs in the background


def background(kernel: Kernel, path: str, then: str = "") -> Cell:
    cell = kernel.submit(f"%%spawn 2 --background -o h\n{LOOP.format(path)}\n{then}")
    ok(cell.wait())
    return cell


def test_a_run_in_the_background(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    background(kernel, str(tmp_path / "go"), "rank")
    part = screen.show("h")
    part.until(lambda: part.text.count("● </span>running") == 2, "it shows the ranks")
    part.click("Stacks")
    part.until_text("Where the ranks stand after")
    part.choose(0)
    part.until_text("&lt;b&gt;begun&lt;/b&gt; 0")
    (tmp_path / "go").touch()
    part.until(lambda: part.root not in screen.models and part.picture.count("done") == 2, "its last picture stays")
    again = ok(kernel.execute("h"))
    assert (
        not any(WIDGET in output["data"] for output in again.outputs) and str(again.outputs).count("</span>done") == 2
    )


def test_in_the_cell_that_started_it_a_run_is_text(kernel: Kernel, screen: Screen) -> None:
    code = (
        f"import nbspawn\ns = nbspawn.Session(2).start()\nh = s.execute({LOOP.format('never')!r}, background=True)\nh"
    )
    reply = ok(kernel.execute(code))
    assert "<2 ranks in the background: " in reply.text()
    assert not any(WIDGET in output.get("data", {}) for output in reply.outputs)
    part = screen.show("h")
    part.click("Stop")
    part.until(lambda: part.root not in screen.models and "interrupted" in part.picture, "it ends")
    assert kernel.value("(h.cancelled(), s.alive)") == (True, True)


# ---------------------------------------------------------------- the kernel's end


def test_unloading_ends_it(unloaded: Kernel, screen: Screen) -> None:
    part = begin(screen)
    ok(unloaded.execute("%unload_ext nbspawn"))
    assert "ended" in ended(part)
    unloaded.assert_no_rank()
    assert "<Session of 2 ranks: they were stopped>" in ok(unloaded.execute("s")).text()
    screen.until(lambda: unloaded.value(PANEL_THREADS) == [], "the thread ends")


def test_without_the_extension(tmp_path: Path) -> None:
    with Kernel(tmp_path) as kernel:
        reply = ok(kernel.execute("import nbspawn\nnbspawn.Session(2)"))
        assert [output["type"] for output in reply.saved] == ["stdout"]
        assert reply.text() == "<Session of 2 ranks: idle>\n"
