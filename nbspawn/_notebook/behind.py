"""A run in the background under the cell that started it, wherever the kernel is meanwhile.

Front ends put what is printed or displayed under the cell that runs at that time, or drop it. Only updates of displays
that are there already find their place in all of them, so every place is made while the cell still runs.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

from nbspawn._notebook.console import ConsoleView
from nbspawn._notebook.view import NotebookView
from nbspawn._protocol.messages import Event
from nbspawn._session.background import BehindView, told
from nbspawn._state.run import Run

PLACES = 12
"""Displays of ranks that are shown at the same time; a newer one takes the place of the oldest."""

_LINES = 200  # of what was printed last
_BYTES = 16_000
_REDRAW = 0.2  # seconds between two updates of the text: each sends all of it again


class _InPlaces(NotebookView):
    """The table, the controls, the text, the displays, the error: each a display of its own."""

    budget = sys.maxsize  # only the last lines are sent at all

    def __init__(self, shell: Any, kind: str, lines: bool, controls: bool) -> None:
        super().__init__(shell, kind, lines, controls, places=PLACES)
        self._text_id, self._error_id = (f"nbspawn-{uuid.uuid4().hex}" for _ in range(2))
        self._text: deque[str] = deque(maxlen=_LINES)
        self._bytes = 0
        self._dropped = False
        self._changed = False
        self._written_at = 0.0

    def open(self, run: Run) -> None:
        """Make the places."""
        super().open(run)
        self.place()
        self._put(self._text_id, "", update=False)
        self._displays.reserve()
        self._put(self._error_id, "", update=False)

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Bring the text up to date, too."""
        super().show(run, events)
        if self._changed and time.monotonic() - self._written_at >= _REDRAW:
            self._write_text()

    def write(self, output: str) -> None:
        """Keep the last lines."""
        for line in output.splitlines(keepends=True):
            self._dropped = self._dropped or len(self._text) == _LINES
            if len(self._text) == _LINES:
                self._bytes -= len(self._text[0])
            self._text.append(line)
            self._bytes += len(line)
            self._changed = True
        while self._bytes > _BYTES and len(self._text) > 1:
            self._bytes -= len(self._text.popleft())
            self._dropped = True

    def close(self, run: Run) -> bool:
        """The last text stays."""
        cut = super().close(run)
        self._write_text()
        return cut or self._dropped

    def show_error(self, shown: str) -> None:
        """Below all else."""
        self._put(self._error_id, shown, update=True)

    def _write_text(self) -> None:
        self._changed, self._written_at = False, time.monotonic()
        head = f"… earlier lines are in {self.run.log_dir}\n" if self._dropped else ""
        self._put(self._text_id, head + "".join(self._text), update=True)

    def _put(self, name: str, shown: str, update: bool) -> None:
        data = {"text/plain": shown} if shown else {}
        self._publish(data=data, metadata={}, transient={"display_id": name}, update=update)


class NotebookBehind(BehindView, _InPlaces):
    """In a notebook."""

    def __init__(self, shell: Any, kind: str, lines: bool, controls: bool) -> None:
        BehindView.__init__(self)
        _InPlaces.__init__(self, shell, kind, lines, controls)

    def failed(self, error: BaseException) -> None:
        """In its own place."""
        self.show_error(told(error))


class ConsoleBehind(BehindView, ConsoleView):
    """In a terminal: lines that come while the person types, and the table at the end."""

    tees = False

    def __init__(self, table: bool, lines: bool) -> None:
        BehindView.__init__(self)
        ConsoleView.__init__(self, live=False, table=table, lines=lines)
