"""The controls, as a front end with widgets sees them: clicks arrive while the cell runs, and no message is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kernels import Cell, Kernel, Reply, wait_gone

WIDGET = "application/vnd.jupyter.widget-view+json"
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


class FrontEnd:
    """Watches a cell's messages for widgets, and plays the person in front of them."""

    def __init__(self, kernel: Kernel, code: str) -> None:
        self._kernel = kernel
        self.models: dict[str, dict[str, Any]] = {}
        self.states: list[tuple[str, str]] = []
        self.cell = kernel.submit(code)
        take = self.cell.take

        def watched(channel: str, message: dict[str, Any]) -> None:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "comm_open":
                self.models[content["comm_id"]] = dict(content["data"]["state"])
            elif kind == "comm_msg" and content["comm_id"] in self.models:
                self.models[content["comm_id"]].update(content["data"].get("state", {}))
            elif kind == "comm_close":
                self.models.pop(content["comm_id"], None)
            take(channel, message)

        self.cell.take = watched  # type: ignore[method-assign]

    def _send(self, comm: str, data: dict[str, Any]) -> None:
        client = self._kernel._client
        client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": comm, "data": data}))

    def view(self) -> str:
        """Wait for the controls to be displayed; the id of their box."""

        def displayed() -> list[str]:
            return [
                output["data"][WIDGET]["model_id"]
                for output in self.cell.reply.saved
                if WIDGET in output.get("data", {})
            ]

        self.cell._read(lambda: bool(displayed()), "the controls are shown", 20)
        return displayed()[0]

    def answer(self) -> None:
        """As a front end that shows them."""
        self._send(self.view(), {"method": "update", "state": {"_view_count": 1}, "buffer_paths": []})

    def find(self, kind: str) -> str:
        return next(name for name, state in self.models.items() if state.get("_model_name") == kind)

    def button(self, description: str) -> str:
        return next(name for name, state in self.models.items() if state.get("description") == description)

    def click(self, description: str) -> None:
        self._send(self.button(description), {"method": "custom", "content": {"event": "click"}})

    def choose(self, index: int) -> None:
        self._send(self.find("DropdownModel"), {"method": "update", "state": {"index": index}, "buffer_paths": []})

    def until(self, happened: Any, what: str) -> None:
        self.cell._read(happened, what, 20)


def pids(reply: Reply) -> list[int]:
    return [int(line.split()[-1]) for line in reply.lines if "pid" in line]


def gone_again(cell: Cell) -> None:
    """No widget is left in what is saved."""
    assert not any(WIDGET in output.get("data", {}) for output in cell.reply.saved)


def test_stop_and_the_cells_after_it(kernel: Kernel) -> None:
    front = FrontEnd(kernel, SLEEP.format(grace=3, then="raise"))
    front.answer()
    front.click("Stop")
    reply = front.cell.wait()
    assert reply.ename == "KeyboardInterrupt"
    assert reply.table["text/plain"].count("interrupted") == 2
    assert not front.models, "every widget is closed"
    gone_again(front.cell)
    wait_gone(pids(reply), 2)
    assert kernel.value("6 * 7") == 42


def test_the_second_stop_kills(kernel: Kernel) -> None:
    front = FrontEnd(kernel, SLEEP.format(grace=60, then="pass"))
    front.answer()
    front.click("Stop")
    front.until(lambda: sum("asked" in line for line in front.cell.reply.lines) >= 1, "a rank was asked")
    front.until(lambda: "Kill" in str(front.models), "the button says what it does")
    pressed = time.monotonic()
    front.click("Kill")
    reply = front.cell.wait()
    assert time.monotonic() - pressed < 5
    assert reply.table["text/plain"].count("killed") == 2


UNTIL_TOLD = """%%spawn 2
import os, time
print(f'<b>only {{rank}}</b>')
while not os.path.exists({go!r}):
    time.sleep(0.01)
"""


def test_one_ranks_output(kernel: Kernel, tmp_path: Path) -> None:
    front = FrontEnd(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    front.answer()
    front.until(lambda: "HTMLModel" in str(front.models), "the pane is there")
    front.choose(2)
    pane = front.find("HTMLModel")
    front.until(lambda: "only 1" in front.models[pane]["value"], "the pane shows rank 1")
    assert "&lt;b&gt;only 1" in front.models[pane]["value"] and "only 0" not in front.models[pane]["value"]
    (tmp_path / "go").touch()
    assert front.cell.wait().status == "ok"


def test_queued_cells_run_in_their_order(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.execute("order = []").status == "ok"
    front = FrontEnd(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    queued = [kernel.submit(f"order.append({number})") for number in range(3)]
    front.answer()
    front.choose(1)
    pane = front.find("HTMLModel")
    front.until(lambda: "only 0" in front.models[pane]["value"], "a choice that came after them was heard")
    (tmp_path / "go").touch()
    assert front.cell.wait().status == "ok"
    assert [cell.wait().status for cell in queued] == ["ok"] * 3
    assert kernel.value("order") == [0, 1, 2]


def test_a_front_end_that_shows_no_widgets(kernel: Kernel, tmp_path: Path) -> None:
    front = FrontEnd(kernel, UNTIL_TOLD.format(go=str(tmp_path / "go")))
    front.view()
    front.until(lambda: not front.models, "they go again")
    gone_again(front.cell)
    (tmp_path / "go").touch()
    assert front.cell.wait().status == "ok"


@pytest.mark.parametrize(
    "options, stdin", [("--view html", True), ("--view text", True), ("--view quiet", True), ("", False)]
)
def test_no_controls_where_nobody_wants_them(kernel: Kernel, options: str, stdin: bool) -> None:
    reply = kernel.execute(f"%%spawn 2 {options}\nimport time\ntime.sleep(1.5)", stdin=stdin)
    assert reply.status == "ok"
    assert reply.outputs == reply.saved


def test_a_short_cell_makes_no_widgets(kernel: Kernel) -> None:
    front = FrontEnd(kernel, "%%spawn 2\nrank")
    assert front.cell.wait().status == "ok"
    assert not front.models
