"""The buttons under a cell that runs: shown once the run has lasted for ``DELAY`` seconds, gone when it is over.

ipywidgets is imported only then. The controls are in a display of their own, which is emptied at the end: a saved
notebook contains no dead widget. Callbacks only record the request.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nbspawn._notebook.pump import CommPump
from nbspawn._notebook.tails import Tails
from nbspawn._protocol.messages import Event
from nbspawn._session.views import Action, log_path
from nbspawn._state.run import Run

if TYPE_CHECKING:
    from nbspawn._notebook.buttons import Buttons

DELAY = 1.0  # seconds: a shorter run needs no controls


def view_of(widget: Any) -> dict[str, Any]:
    """The part of a mime bundle that shows a widget."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}


class Controls:
    """``publish`` is the shell's display publisher. ``actions`` is the queue of the user's requests.
    ``between_cells``: for a run in the background, where the kernel's own event loop handles clicks."""

    def __init__(self, kernel: Any, publish: Callable[..., None], between_cells: bool = False) -> None:
        self.actions: deque[Action] = deque()
        self._pump = None if between_cells else CommPump(kernel)
        self._publish = publish
        self._id = f"nbspawn-{uuid.uuid4().hex}"
        self._buttons: Buttons | None = None
        self._box: Any = None
        self._tails = Tails()
        self._placed = False
        self._closed = self._pump is not None and not self._pump.works

    def open(self, run: Run) -> None:
        """Make the display, before the ranks can print: a later one would be in the middle of their output."""
        if not self._closed:
            # Not empty: classic Notebook cannot replace an empty display by a widget. No height: classic Notebook goes
            # on showing what was there when the display is emptied, and a short run should take no space.
            self._draw({"text/html": "<div></div>"}, update=False)
            self._placed = True

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Show the controls once ``DELAY`` has passed, and handle clicks; called some times a second."""
        if self._closed:
            return
        self._tails.add(run, events)
        # A run whose ranks took long to start comes here before its display is made: the update would be lost.
        if not self._placed or time.monotonic() - run.started < DELAY:
            return
        if self._buttons is None:
            import ipywidgets  # type: ignore[import-untyped]

            from nbspawn._notebook.buttons import Buttons

            self._buttons = Buttons(len(run.ranks), self.actions.append)
            self._box = ipywidgets.VBox([self._buttons.row, self._buttons.pane])
            self._box._view_count = 0  # the front end then reports how many views it shows
            self._draw({**view_of(self._box), "text/plain": ""}, update=True)
        self._buttons.ready()
        if self._pump is not None:
            self._pump()
        # For its first widget a busy JupyterLab needs half a minute; a front end without widgets never answers.
        if self._box._view_count:
            self._buttons.refresh(partial(self._tails.text, run), partial(log_path, run))

    def set_disabled(self, disabled: bool) -> None:
        """Grey out the buttons while the user is asked something: the kernel then handles no clicks."""
        if self._buttons is not None:
            self._buttons.set_disabled(disabled)

    def close(self) -> None:
        """Remove the widgets, and hand over to the kernel the messages that were not for them."""
        if self._closed:
            return
        self._closed = True
        if self._box is not None:
            # Or the front end reports that the view is removed. JupyterLab sends that message to a subshell that it
            # deletes together with the widgets, and asyncio prints in the cell: "Task was destroyed but it is pending".
            self._box._view_count = None
        self._draw({}, update=True)
        if self._buttons is not None:
            from nbspawn._notebook.slots import close

            self._buttons.close()
            close(self._box)
        if self._pump is not None:
            self._pump.close()

    def _draw(self, data: dict[str, Any], update: bool) -> None:
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=update)
