"""The buttons of a run: stop it, show the stacks, debug a rank, show one rank's output.

Only this module imports ipywidgets, and only when a run has lasted for ``DELAY`` seconds. The controls are in a display
of their own, which is emptied at the end: a saved notebook contains no dead widget. Callbacks only record the request.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from nbspawn._notebook.pump import CommPump
from nbspawn._protocol.messages import Event, Printed
from nbspawn._render.lines import LineBuffer, strip_ansi
from nbspawn._session.views import Action, log_path
from nbspawn._state.run import Run

DELAY = 1.0  # seconds: a shorter run needs no controls
_ANSWER = 3.0  # seconds within which a front end that shows widgets reports a view
_REFRESH = 0.5  # seconds between two reads of the chosen rank's log
_TAIL = 16_000  # bytes of the log that are shown
_LINES = 20_000  # of all ranks of other machines together that are kept for the pane
_LONGEST = 500  # characters of each
_ALL = -1
_DEBUG = "Stop at the next line of Python, at a debugger's prompt"
_WIDGET = "application/vnd.jupyter.widget-view+json"

_PANE = (
    "max-height:240px;overflow:auto;margin:2px 0;padding:4px 8px;font-size:var(--jp-code-font-size,13px);"
    "font-family:var(--jp-code-font-family,monospace);line-height:1.3;border:1px solid var(--jp-border-color2,#8886);"
    "color:var(--jp-ui-font-color1,inherit);background:var(--jp-layout-color1,transparent);white-space:pre-wrap"
)


class Controls:
    """``publish`` is the shell's display publisher. ``actions`` is the queue of the user's requests.
    ``between_cells``: for a run in the background, where the kernel's own event loop handles clicks."""

    def __init__(self, kernel: Any, publish: Callable[..., None], between_cells: bool = False) -> None:
        self.actions: deque[Action] = deque()
        self._pump = None if between_cells else CommPump(kernel)
        self._publish = publish
        self._id = f"nbspawn-{uuid.uuid4().hex}"
        self._panel: _Panel | None = None
        self._printed: dict[int, deque[str]] = {}
        """Of ranks on other machines, whose logs cannot be read here: their last lines."""
        self._shown_at = 0.0
        self._given_up = self._pump is not None and not self._pump.works

    def open(self) -> None:
        """Make the display, before the ranks can print: a later one would be in the middle of their output."""
        if not self._given_up:
            # Not empty: classic Notebook cannot replace an empty display by a widget. No height: classic Notebook goes
            # on showing what was there when the display is emptied, and a short run should take no space.
            self._draw({"text/html": "<div></div>"}, update=False)

    def show(self, run: Run) -> None:
        """Show the controls once ``DELAY`` has passed, and handle clicks; called some times a second."""
        now = time.monotonic()
        if self._given_up or now - run.started < DELAY:
            return
        if self._panel is None:
            self._panel = _Panel(len(run.ranks), self.actions.append)
            self._draw({_WIDGET: self._panel.view, "text/plain": ""}, update=True)
            self._shown_at = now
        if self._pump is not None:
            self._pump()
        if self._panel.answered:
            self._panel.refresh(run, now, self._output)
        elif now - self._shown_at > _ANSWER:
            self.close()

    def add(self, run: Run, events: Sequence[Event]) -> None:
        """These have happened."""
        if not run.logs or self._given_up:
            return
        for event in events:
            if isinstance(event, Printed):
                lines = self._printed.setdefault(event.rank, deque(maxlen=max(10, _LINES // len(run.ranks))))
                lines.extend(line[:_LONGEST] for line in event.lines)

    def _output(self, run: Run, rank: int) -> str:
        return "\n".join(self._printed.get(rank, ())) if run.logs else _tail(log_path(run, rank))

    def set_disabled(self, disabled: bool) -> None:
        """Grey out the buttons while the user is asked something: the kernel then handles no clicks."""
        if self._panel is not None:
            self._panel.set_disabled(disabled)

    def close(self) -> None:
        """Remove the widgets, and hand over to the kernel the messages that were not for them."""
        if self._given_up:
            return
        self._given_up = True
        if self._panel is not None:
            self._panel.stop_counting_views()
        self._draw({}, update=True)
        if self._panel is not None:
            self._panel.close()
        if self._pump is not None:
            self._pump.close()

    def _draw(self, data: dict[str, Any], update: bool) -> None:
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=update)


class _Panel:
    """The widgets."""

    def __init__(self, nprocs: int, act: Callable[[Action], None]) -> None:
        import ipywidgets  # type: ignore[import-untyped]

        self._nprocs = nprocs
        self._act = act

        def button(name: str, icon: str, tooltip: str, pressed: Callable[[Any], None]) -> Any:
            made = ipywidgets.Button(description=name, icon=icon, tooltip=tooltip, layout={"width": "auto"})
            made.on_click(pressed)
            return made

        self._stop = button("Stop", "stop", "KeyboardInterrupt in every rank", self._stop_pressed)
        self._stacks = button("Stacks", "align-left", "Show the stack of every rank", lambda _: act(Action("stacks")))
        self._debug = button("Debug all", "bug", _DEBUG, lambda _: act(Action("debug", self._chosen)))
        self._choice = ipywidgets.Dropdown(
            options=[("output of all ranks", _ALL), *((f"output of rank {rank}", rank) for rank in range(nprocs))],
            layout={"width": "auto"},
        )
        self._pane = ipywidgets.HTML(layout={"display": "none", "width": "100%"})
        self._choice.observe(self._chose, "value")
        row = ipywidgets.HBox([self._stop, self._stacks, self._choice, self._debug])
        self._box = ipywidgets.VBox([row, self._pane])
        self._box._view_count = 0  # the front end then reports how many views it shows
        self._buttons = [self._stop, self._stacks, self._debug]
        self._widgets = [*self._buttons, self._choice, self._pane, row, self._box]
        self._refreshed_at = 0.0

    @property
    def view(self) -> dict[str, Any]:
        """The part of the mime bundle that shows the widgets."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    @property
    def answered(self) -> bool:
        """Does a front end show the widgets?"""
        return bool(self._box._view_count)

    def stop_counting_views(self) -> None:
        """Otherwise the front end reports that the view is removed. JupyterLab sends that message to a subshell that it
        deletes together with the widgets, and asyncio prints in the cell: "Task was destroyed but it is pending"."""
        self._box._view_count = None

    @property
    def _chosen(self) -> tuple[int, ...]:
        """The ranks that are chosen in the list."""
        return tuple(range(self._nprocs)) if self._choice.value == _ALL else (self._choice.value,)

    def _chose(self, _: object) -> None:
        rank = self._choice.value
        self._debug.description = "Debug all" if rank == _ALL else f"Debug rank {rank}"

    def _stop_pressed(self, _: object) -> None:
        self._stop.description, self._stop.button_style, self._stop.tooltip = "Kill", "danger", "SIGKILL at once"
        self._act(Action("stop"))

    def set_disabled(self, disabled: bool) -> None:
        """Disable the buttons, or enable them again."""
        for button in self._buttons:
            button.disabled = disabled

    def refresh(self, run: Run, now: float, output: Callable[[Run, int], str]) -> None:
        """Show the chosen rank's newest output."""
        if now - self._refreshed_at < _REFRESH:
            return
        self._refreshed_at = now
        rank = self._choice.value
        self._pane.layout.display = "none" if rank == _ALL else ""
        if rank != _ALL:
            path = log_path(run, rank)
            shown = f'<pre style="{_PANE}">{escape(output(run, rank)) or "nothing yet"}</pre>{escape(path)}'
            if shown != self._pane.value:
                self._pane.value = shown

    def close(self) -> None:
        for widget in self._widgets:
            for part in (widget.layout, getattr(widget, "style", None)):
                if part is not None and hasattr(part, "close"):
                    part.close()
            widget.close()


def _tail(path: str) -> str:
    """The end of a log, as a terminal would show it."""
    try:
        with open(path, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL))
            data = log.read()
    except FileNotFoundError:
        return ""
    lines = LineBuffer()
    complete, current = lines.feed(data)
    return strip_ansi("\n".join([*complete, current]))
