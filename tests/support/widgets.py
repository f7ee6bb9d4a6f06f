"""Widgets as a front end knows them, and a user in front of those that live on between the cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from kernels import Kernel, Reply, plain
from methods import PATIENCE

WIDGET = "application/vnd.jupyter.widget-view+json"
PANEL_THREADS = "import threading\n[thread.name for thread in threading.enumerate() if 'panel' in thread.name]"
_CHILD = "IPY_MODEL_"


class Models:
    """The models that the kernel has opened and not closed, by their comms, and what a user does with them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.models: dict[str, dict[str, Any]] = {}

    def fold(self, kind: str, content: dict[str, Any]) -> None:
        """One message of the kernel."""
        if kind == "comm_open":
            self.models[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["comm_id"] in self.models:
            self.models[content["comm_id"]].update(content["data"].get("state", {}))
        elif kind == "comm_close":
            self.models.pop(content["comm_id"], None)

    def send(self, comm: str, data: dict[str, Any], subshell: str | None = None) -> None:
        """A message of the front end; JupyterLab sends it to a subshell, where the kernel has one."""
        client = self.kernel._client
        message = client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)

    def update(self, comm: str, **state: Any) -> None:
        """The user changes a widget."""
        self.send(comm, {"method": "update", "state": state, "buffer_paths": []})

    def find(self, kind: str) -> str:
        return next(name for name, state in self.models.items() if state.get("_model_name") == kind)

    def button(self, description: str) -> str:
        return next(name for name, state in self.models.items() if state.get("description") == description)

    def click(self, description: str) -> None:
        self.press(self.button(description))

    def press(self, comm: str, subshell: str | None = None) -> None:
        """Click on a button."""
        self.send(comm, {"method": "custom", "content": {"event": "click"}}, subshell)


class Screen(Models):
    """A front end that reads all that the kernel sends, during the cells and between them."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.opened = 0
        """How many models there have been."""
        self.sent = 0
        """Bytes that went to widgets."""
        self.stray = Reply(displays=kernel.displays)
        """What belongs to no cell, such as errors of callbacks."""
        self._read = kernel.messages
        kernel.messages = self._messages  # type: ignore[method-assign]

    def leave(self) -> None:
        """Look away."""
        del self.kernel.messages  # the class has it, too

    def _messages(self) -> list[tuple[str, dict[str, Any]]]:
        found = self._read()
        for channel, message in found:
            if channel == "iopub":
                kind = message["header"]["msg_type"]
                self.fold(kind, message["content"])
                self.opened += kind == "comm_open"
                self.sent += len(str(message["content"])) if kind.startswith("comm_") else 0
        return found

    def read(self) -> None:
        """What has come within 50 ms."""
        for channel, message in self.kernel.messages():
            cell = self.kernel.cells.get(message["parent_header"].get("msg_id"))
            if cell is not None:
                cell.take(channel, message)
            elif channel == "iopub":
                self.stray.fold(message["header"]["msg_type"], message["content"])

    def until(self, happened: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
        """Read until this has happened; returns what ``happened`` gave."""
        end = time.monotonic() + timeout
        while not (result := happened()):
            assert time.monotonic() < end, f"waited {timeout} s in vain: {what}\n{self.text()}\n{self.stray}"
            assert self.kernel.alive, self.kernel.terminal
            self.read()
        return result

    def show(self, code: str) -> Part:
        """Run a cell that displays a widget; the front end reports that it shows it."""
        reply = self.kernel.execute(code)
        assert reply.status == "ok", reply
        part = Part(self, reply)
        if "_view_count" in self.models.get(part.root, {}):
            self.update(part.root, _view_count=1)
        return part

    def text(self, root: str = "") -> str:
        """All that is shown, as HTML and text; of one widget, or of all."""
        return "\n".join(filter(None, map(self._shown, self._below(root) if root else self.models)))

    def _below(self, root: str) -> Iterator[str]:
        state = self.models.get(root, {})
        if state.get("_model_name") == "LayoutModel":
            return
        yield root
        for child in state.get("children", ()):
            yield from self._below(child.removeprefix(_CHILD))

    def _shown(self, comm: str) -> str:
        state = self.models.get(comm, {})
        layout = self.models.get(str(state.get("layout", "")).removeprefix(_CHILD), {})
        if layout.get("display") == "none" or state.get("_model_name") == "DropdownModel":
            return ""
        if "outputs" in state:
            return plain("\n".join(str(one["data"].get("text/plain", "")) for one in state["outputs"]))
        if state.get("_model_name") in ("HTMLModel", "LabelModel"):
            return str(state["value"])
        return ""


class Part:
    """One widget on the screen, with all within it, and the picture that is displayed below it."""

    def __init__(self, screen: Screen, reply: Reply) -> None:
        self.screen = screen
        self.reply = reply
        shown = [output["data"][WIDGET]["model_id"] for output in reply.outputs if WIDGET in output.get("data", {})]
        self.root: str = shown[0]

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """What there is within it, by comm."""
        return {name: self.screen.models[name] for name in self.screen._below(self.root) if name in self.screen.models}

    @property
    def text(self) -> str:
        """What it shows, as HTML and text."""
        return self.screen.text(self.root)

    @property
    def picture(self) -> str:
        """The HTML that is left where there is no kernel."""
        pictures = [one["data"]["text/html"] for one in self.reply.saved if "text/html" in one.get("data", {})]
        return str(pictures[-1]) if pictures else ""

    def named(self, description: str) -> str:
        """The comm of a widget."""
        return next(name for name, state in self.models.items() if state.get("description") == description)

    def state(self, description: str) -> dict[str, Any]:
        return self.screen.models[self.named(description)]

    def has(self, description: str) -> bool:
        """Is there such a widget?"""
        return any(state.get("description") == description for state in self.models.values())

    def enabled(self, description: str) -> bool:
        """Is there such a button, and can it be pressed?"""
        return self.has(description) and not self.state(description)["disabled"]

    def click(self, description: str, subshell: str | None = None) -> None:
        self.until(lambda: self.enabled(description), f"{description} can be pressed")
        self.screen.press(self.named(description), subshell)

    def set(self, description: str, **state: Any) -> None:
        """The user moves a slider, or types."""
        self.screen.update(self.named(description), **state)

    def choose(self, rank: int | None) -> None:
        """The rank whose output is shown; None: all."""
        lists = [n for n, one in self.models.items() if "all ranks" in one.get("_options_labels", ())]
        self.screen.update(lists[0], index=0 if rank is None else rank + 1)

    def prompt(self, text: str) -> dict[str, Any]:
        """Wait for a question; returns its field."""
        self.until(lambda: any(text in state.get("value", "") for state in self._labels()), f"it asks {text!r}")
        return self.screen.models[self._field()]

    @property
    def has_question(self) -> bool:
        """Is the user asked something?"""
        return bool(self._labels())

    def _labels(self) -> list[dict[str, Any]]:
        return [state for state in self.models.values() if state.get("_model_name") == "LabelModel"]

    def _field(self) -> str:
        return next(name for name, one in self.models.items() if one.get("placeholder") == "answer, then Enter")

    def answer(self, prompt: str, text: str) -> None:
        """Type and press Enter: front ends say that it was pressed, then what was typed."""
        self.prompt(prompt)
        field = self._field()
        self.screen.send(field, {"method": "custom", "content": {"event": "submit"}})
        self.screen.update(field, value=text)
        self.until(lambda: field not in self.screen.models, "the question goes")

    def until(self, happened: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
        return self.screen.until(happened, what, timeout)

    def until_text(self, *texts: str) -> str:
        """Wait until it shows all of these."""
        self.until(lambda: all(text in self.text for text in texts), f"it shows {texts}")
        return self.text

    def ended(self) -> str:
        """Wait until Run can be pressed again, and the picture has been drawn; returns what it shows."""
        self.until(lambda: self.enabled("Run"), "the run ends")
        return self.text
