"""Asks the user within a widget: a rank's ``input`` and its debugger's prompt, while the kernel runs other cells."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets  # type: ignore[import-untyped]

from nbspawn._notebook.slots import close
from nbspawn._protocol.messages import InputReply
from nbspawn._session.attachment import Attachment
from nbspawn._session.views import Action

_SETTLED = 0.1  # seconds: front ends send that Enter was pressed just before what was typed
_TICK = 0.2  # seconds between two looks whether the user has pressed Stop instead


class WidgetPrompts:
    """A prompter (_session/views.py) whose ``box`` is to be displayed. ``write`` gets each question with its answer;
    ``stopping`` tells whether the user has requested the end of the run."""

    present = True

    def __init__(self, write: Callable[[str], object], stopping: Callable[[], bool]) -> None:
        self.box = ipywidgets.VBox()
        self.attachment: Attachment | None = None
        """A cell that waits for the run shows the questions: until it ends, the kernel gets no answer from the box."""
        self._write = write
        self._stopping = stopping

    @property
    def _attached(self) -> Attachment | None:
        return self.attachment if self.attachment is not None and self.attachment.present else None

    def actions(self) -> Sequence[Action]:
        """No actions: the buttons are elsewhere."""
        return ()

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Show the prompt and a field, in the thread that watches the run; the kernel's own thread gets the answer.
        None if the user has requested the end of the run instead, or if a cell begins or ends to wait for the run."""
        if (attached := self._attached) is not None:
            return attached.ask(prompt, password)
        entered: queue.SimpleQueue[None] = queue.SimpleQueue()

        def received(_: object, content: Any, __: object) -> None:
            if content.get("event") == "submit":
                entered.put(None)

        kind = ipywidgets.Password if password else ipywidgets.Text
        field = kind(placeholder="answer, then Enter", layout={"width": "auto", "flex": "1 1 auto"})
        field.on_msg(received)
        *above, last = prompt.split("\n")
        label = ipywidgets.Label(last)
        row = ipywidgets.HBox([label, field])
        if above:
            self._write("\n".join(above) + "\n")
        self.box.children = [row]
        try:
            while True:
                try:
                    entered.get(timeout=_TICK)
                except queue.Empty:
                    if self._stopping() or self._attached:
                        return None
                    continue
                time.sleep(_SETTLED)
                self._write(f"{last}{'' if password else field.value}\n")
                return InputReply("text", field.value)
        finally:
            self.box.children = ()
            for widget in (field, label, row):
                close(widget)
