"""The controls, as a front end with widgets sees them: clicks arrive while the cell runs, and no message is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels import Cell, Kernel, Reply, ok, wait_gone
from users import UNTIL_TOLD, WIDGET, User

from nbspawn._notebook.controls import DELAY
from nbspawn._session.views import AT_ONCE

SLEEP = """%%spawn 2 -g {grace}
import os, time
print('pid', os.getpid())
while True:
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print('asked')
        {then}
"""


def pids(reply: Reply) -> list[int]:
    return [int(line.split()[-1]) for line in reply.lines if "pid" in line]


def gone_again(cell: Cell) -> None:
    """No widget is left in what is saved."""
    assert not any(WIDGET in output.get("data", {}) for output in cell.reply.saved)


def test_stop_and_the_cells_after_it(kernel: Kernel) -> None:
    user = User(kernel, SLEEP.format(grace=60, then="raise"))
    user.see_controls()
    user.click("Stop")
    reply = user.cell.wait()
    assert reply.ename == "KeyboardInterrupt"
    assert reply.table["text/plain"].count("interrupted") == 2
    assert not user.models, "every widget is closed"
    gone_again(user.cell)
    wait_gone(pids(reply))
    assert kernel.value("6 * 7") == 42


def test_a_run_that_was_slow_to_start_has_controls(kernel: Kernel) -> None:
    """The first of a kernel, often: it has lasted for a second before there is anything to show."""
    ok(kernel.execute(f"from nbspawn._notebook import view as nbspawn_view\nnbspawn_view.AT_ONCE = {2 * DELAY}"))
    try:
        user = User(kernel, "%%spawn 2 -g 60\nimport time\ntime.sleep(600)")
        user.see_controls()
        user.click("Stop")
        assert user.cell.wait().ename == "KeyboardInterrupt"
    finally:
        ok(kernel.execute(f"nbspawn_view.AT_ONCE = {AT_ONCE}"))


def test_the_second_stop_kills(kernel: Kernel) -> None:
    user = User(kernel, SLEEP.format(grace=600, then="pass"))
    user.see_controls()
    user.click("Stop")
    user.until(lambda: sum("asked" in line for line in user.cell.reply.lines) >= 1, "a rank was asked")
    user.until(lambda: "Kill" in str(user.models), "the button says what it does")
    user.click("Kill")
    reply = user.cell.wait()
    assert reply.table["text/plain"].count("killed") == 2


def test_one_ranks_output(kernel: Kernel, tmp_path: Path) -> None:
    user = User(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    user.see_controls()
    user.until(lambda: "HTMLModel" in str(user.models), "the pane is there")
    user.choose(2)
    pane = user.find("HTMLModel")
    user.until(lambda: "only 1" in user.models[pane]["value"], "the pane shows rank 1")
    assert "&lt;b&gt;only 1" in user.models[pane]["value"] and "only 0" not in user.models[pane]["value"]
    (tmp_path / "go").touch()
    assert user.cell.wait().status == "ok"


def test_the_stacks_and_the_collectives(kernel: Kernel, tmp_path: Path) -> None:
    user = User(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    user.see_controls()
    user.click("Stacks")
    user.until(lambda: "Where the ranks stand" in str(user.cell.reply.shown), "they are shown below the cell")
    user.click("Collectives")
    user.until(lambda: "The ranks are in no process group." in str(user.cell.reply.shown), "they are, too")
    (tmp_path / "go").touch()
    assert user.cell.wait().status == "ok"


def test_queued_cells_run_in_their_order(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.execute("order = []").status == "ok"
    user = User(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    queued = [kernel.submit(f"order.append({number})") for number in range(3)]
    user.see_controls()
    user.choose(1)
    pane = user.find("HTMLModel")
    user.until(lambda: "only 0" in user.models[pane]["value"], "a choice that came after them was heard")
    (tmp_path / "go").touch()
    assert user.cell.wait().status == "ok"
    assert [cell.wait().status for cell in queued] == ["ok"] * 3
    assert kernel.value("order") == [0, 1, 2]


def test_a_front_end_that_shows_no_widgets(kernel: Kernel, tmp_path: Path) -> None:
    user = User(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    user.view()
    assert [data["text/plain"] for data in user.cell.reply.shown if WIDGET in data] == [""], "its place looks empty"
    (tmp_path / "go").touch()
    assert user.cell.wait().status == "ok"
    assert not user.models
    gone_again(user.cell)


@pytest.mark.parametrize(
    "options, stdin", [("--view html", True), ("--view text", True), ("--view quiet", True), ("", False)]
)
def test_no_controls_where_nobody_wants_them(kernel: Kernel, options: str, stdin: bool) -> None:
    reply = kernel.execute(f"%%spawn 2 {options}\nimport time\ntime.sleep(1.5)", stdin=stdin)
    assert reply.status == "ok"
    assert reply.outputs == reply.saved


def test_a_short_cell_makes_no_widgets(kernel: Kernel) -> None:
    user = User(kernel, "%%spawn 2\nrank")
    assert user.cell.wait().status == "ok"
    assert not user.models
