"""The widgets that act on ranks: buttons, the choice of a rank, a pane with its output.

Nothing is done here: ``act`` is called with what the user has requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

import ipywidgets  # type: ignore[import-untyped]

from nbspawn._notebook.slots import close
from nbspawn._session.views import Action

_REFRESH = 0.5  # seconds between two reads of the chosen rank's log
_ALL = -1

# Scrolled to its end, as long as nobody scrolls.
_END_FIRST = "display:flex;flex-direction:column-reverse;max-height:240px;overflow:auto"
_PANE = (
    "margin:2px 0;padding:4px 8px;font-size:var(--jp-code-font-size,13px);"
    "font-family:var(--jp-code-font-family,monospace);line-height:1.3;border:1px solid var(--jp-border-color2,#8886);"
    "color:var(--jp-ui-font-color1,inherit);background:var(--jp-layout-color1,transparent);white-space:pre-wrap"
)


class Kind(NamedTuple):
    """A button: ``what`` is that of its ``Action``."""

    what: str
    name: str
    icon: str
    tooltip: str


STOP = Kind("stop", "Stop", "stop", "KeyboardInterrupt in every rank")
STACKS = Kind("stacks", "Stacks", "align-left", "Show the stack of every rank")
COLLECTIVES = Kind("collectives", "Collectives", "exchange", "Show the last collectives of every rank")
VARIABLES = Kind("variables", "Variables", "table", "Show the variables of every rank, and where they differ")
DEBUG = Kind("debug", "Debug all", "bug", "Stop at the next line of Python, in the debugger")


class Buttons:
    """``row`` and ``pane`` are to be displayed, one below the other."""

    def __init__(
        self, nprocs: int, act: Callable[[Action], None], kinds: Sequence[Kind] = (STOP, STACKS, COLLECTIVES, DEBUG)
    ) -> None:
        self._act = act
        self.by_kind = {kind: self._made(kind) for kind in kinds}
        self._choice = ipywidgets.Dropdown(layout={"width": "auto"})
        self._choice.observe(self._chose, "value")
        self.pane = ipywidgets.HTML(layout={"display": "none", "width": "100%"})
        # The choice is beside Debug, to which it belongs, too.
        before = [self.by_kind[kind] for kind in kinds if kind is not DEBUG]
        after = [self.by_kind[kind] for kind in kinds if kind is DEBUG]
        self.row = ipywidgets.HBox([*before, self._choice, *after], layout={"flex_flow": "row wrap"})
        self._refreshed_at = 0.0
        self._working: list[Kind] = []
        """The buttons that work."""
        self.reset(nprocs)

    def _made(self, kind: Kind) -> Any:
        made = ipywidgets.Button(description=kind.name, icon=kind.icon, tooltip=kind.tooltip, layout={"width": "auto"})
        made.on_click(lambda _: self._pressed(kind))
        return made

    def _pressed(self, kind: Kind) -> None:
        if kind is STOP:
            self.set_stopping(True)
        elif kind in (STACKS, COLLECTIVES, VARIABLES):
            self._working.append(kind)
            self.by_kind[kind].disabled, self.by_kind[kind].icon = True, "spinner"
        self._act(Action(kind.what, self.chosen if kind is DEBUG else ()))

    def ready(self) -> None:
        """What was asked for is on the screen."""
        while self._working:
            kind = self._working.pop()
            self.by_kind[kind].disabled, self.by_kind[kind].icon = False, kind.icon

    def reset(self, nprocs: int) -> None:
        """Other ranks: the choice is all of them."""
        self._nprocs = nprocs
        ranks = [(f"log of rank {rank}", rank) for rank in range(nprocs)]
        self._choice.options = [("all ranks", _ALL), *ranks]
        self._choice.value = _ALL

    def set_stopping(self, stopping: bool) -> None:
        """Is Stop pressed? Then it is Kill."""
        if (button := self.by_kind.get(STOP)) is not None:
            button.description = "Kill" if stopping else STOP.name
            button.button_style = "danger" if stopping else ""
            button.tooltip = "SIGKILL at once" if stopping else STOP.tooltip

    @property
    def chosen(self) -> tuple[int, ...]:
        """The ranks that are chosen in the list."""
        return tuple(range(self._nprocs)) if self._choice.value == _ALL else (self._choice.value,)

    def _chose(self, _: object) -> None:
        rank = self._choice.value
        self._refreshed_at = 0.0
        if (button := self.by_kind.get(DEBUG)) is not None:
            button.description = DEBUG.name if rank == _ALL else f"Debug rank {rank}"

    def set_disabled(self, disabled: bool) -> None:
        """Disable the buttons and the choice, or enable them again."""
        for widget in (*self.by_kind.values(), self._choice):
            widget.disabled = disabled

    def refresh(self, text: Callable[[int], str], path: Callable[[int], str]) -> None:
        """Show the chosen rank's newest output, and the path of its log."""
        now = time.monotonic()
        if now - self._refreshed_at < _REFRESH:
            return
        self._refreshed_at = now
        rank = self._choice.value
        self.pane.layout.display = "none" if rank == _ALL else ""
        if rank != _ALL:
            output = f'<pre style="{_PANE}">{escape(text(rank)) or "nothing yet"}</pre>'
            shown = f'<div style="{_END_FIRST}">{output}</div>{escape(path(rank))}'
            if shown != self.pane.value:
                self.pane.value = shown

    def close(self) -> None:
        """Close the widgets."""
        for widget in (*self.by_kind.values(), self._choice, self.pane, self.row):
            close(widget)
