"""The user in front of a cell that runs: answers prompts, presses buttons, reads what is shown."""

from __future__ import annotations

from typing import Any

from kernels import Cell, Kernel, plain
from methods import PATIENCE
from widgets import WIDGET, Models

UNTIL_TOLD = """%%spawn 2
import os, time
print(f'<b>only {{rank}}</b>')
while not os.path.exists({go!r}):
    time.sleep(0.01)
"""
"""A cell that runs until there is a file."""


class User(Models):
    """Submits a cell, and watches its messages for prompts and for widgets."""

    def __init__(self, kernel: Kernel, code: str) -> None:
        super().__init__(kernel)
        self._answered = 0
        self.cell: Cell = kernel.submit(code)
        take = self.cell.take

        def watched(channel: str, message: dict[str, Any]) -> None:
            self.fold(message["header"]["msg_type"], message["content"])
            take(channel, message)

        self.cell.take = watched  # type: ignore[method-assign]

    def prompt(self) -> str:
        """Wait for the next question."""
        self.cell.asked(self._answered + 1)
        return self.cell.reply.prompts[self._answered][0]

    def say(self, *lines: str) -> str:
        """Answer that many questions; what was printed until the next one, or until the cell ended."""
        before = len(self.cell.reply.text())
        for line in lines:
            self.prompt()
            self._answered += 1
            self.kernel.answer(line)
        asked = self._answered
        self.until(lambda: len(self.cell.reply.prompts) > asked or self.cell.over, "the next prompt or the end")
        self.cell.catch_up()
        return plain(self.cell.reply.text()[before:])

    def say_last(self, line: str) -> None:
        """Answer, and expect no further question soon."""
        self.prompt()
        self._answered += 1
        self.kernel.answer(line)
        self.until(lambda: not any(model.get("disabled") for model in self.models.values()), "the buttons work again")

    def view(self) -> str:
        """Wait for the controls to be displayed; the id of their box."""

        def displayed() -> list[str]:
            return [
                output["data"][WIDGET]["model_id"]
                for output in self.cell.reply.saved
                if WIDGET in output.get("data", {})
            ]

        self.cell.read_until(lambda: bool(displayed()), "the controls are shown", PATIENCE)
        return displayed()[0]

    def see_controls(self) -> None:
        """Have a front end that shows them."""
        self.update(self.view(), _view_count=1)

    def choose(self, index: int) -> None:
        self.update(self.find("DropdownModel"), index=index)

    def debug(self, rank: int) -> None:
        """Choose a rank and press Debug."""
        self.choose(rank + 1)
        self.until(lambda: f"Debug rank {rank}" in str(self.models), "the button says which rank")
        self.click(f"Debug rank {rank}")

    def until(self, happened: Any, what: str) -> None:
        self.cell.read_until(happened, what, PATIENCE)

    def leave(self) -> None:
        """Interrupt the cell if it still runs: the next test uses the same kernel."""
        if not self.cell.over:
            self.kernel.interrupt()
            self.cell.wait()
