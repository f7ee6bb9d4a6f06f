"""Shows a run in the background under the cell that started it, while the kernel runs other cells.

Front ends put what is printed or displayed under the cell that runs at that time, or drop it. Only updates of existing
displays are shown in the right place by all of them. So every display is made while the cell still runs: the table, the
controls, the text, the ranks' displays, the error, in this order.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Collection

from nbspawn._notebook.console import ConsoleView
from nbspawn._notebook.view import NotebookView, ViewControls
from nbspawn._session import views
from nbspawn._session.attachment import Attachment, BackgroundView
from nbspawn._session.views import Prompter

PLACES = 12
"""Displays of ranks that are shown at the same time; a newer one replaces the oldest."""

_LINES = 200  # that were printed last
_BYTES = 16_000
_REDRAW = 0.2  # seconds between two updates of the text: each sends all of it again


class TextDisplay:
    """A display of the last lines of a text; ``publish`` is the shell's display publisher, ``tee`` also gets everything
    that is written."""

    def __init__(self, publish: Callable[..., None], tee: Callable[[str], object] = bool) -> None:
        self.cut = False
        """Have lines been dropped?"""
        self.log_dir = ""
        """Where the whole text is."""
        self._publish = publish
        self._tee = tee
        self._id = f"nbspawn-{uuid.uuid4().hex}"
        self._lines: deque[str] = deque()
        self._bytes = 0
        self._changed = False
        self._drawn_at = 0.0

    def open(self) -> None:
        """Make an empty display."""
        self._draw("", update=False)

    def write(self, text: str) -> None:
        """Add text; only the last lines are kept."""
        self._tee(text)
        for line in text.splitlines(keepends=True):
            self._lines.append(line)
            self._bytes += len(line)
            self._changed = True
            while len(self._lines) > _LINES or (self._bytes > _BYTES and len(self._lines) > 1):
                self._bytes -= len(self._lines.popleft())
                self.cut = True

    def refresh(self, if_due: bool = False) -> None:
        """Show new text, if there is any: now, or only if an update is due."""
        if self._changed and not (if_due and time.monotonic() - self._drawn_at < _REDRAW):
            self._changed, self._drawn_at = False, time.monotonic()
            head = f"… earlier lines are in {self.log_dir}\n" if self.cut else ""
            self._draw(head + "".join(self._lines), update=True)

    def replace(self, text: str) -> None:
        """Show this text only."""
        self._draw(text, update=True)

    def _draw(self, text: str, update: bool) -> None:
        data = {"text/plain": text} if text else {}
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=update)


def notebook_view(
    publish: Callable[..., None],
    kind: str,
    profile: bool,
    controls: ViewControls | None,
    only: Collection[int] | None = None,
    prompter: Prompter | None = None,
    seldom: bool = False,
) -> BackgroundView:
    """The view under a notebook's cell, or in a widget. ``prompter`` asks the user in the view itself; None: a cell
    that attaches shows the questions, and what is printed. ``seldom`` as in NotebookView."""
    attachment = Attachment(elsewhere=prompter is None)
    text, error = TextDisplay(publish, attachment.write if prompter is None else bool), TextDisplay(publish)
    view = NotebookView(publish, kind, profile, controls, only, prompter or attachment, text, error, PLACES, seldom)
    return BackgroundView(view, attachment, error.replace)


def console_view(table: bool, profile: bool, only: Collection[int] | None = None) -> BackgroundView:
    """The view in a terminal: lines appear while the user types, the table at the end."""
    attachment = Attachment(elsewhere=False)

    def write(text: str) -> None:
        if not attachment.write(text):
            views.write_to_stdout(text)

    view = ConsoleView(live=False, table=table, profile=profile, only=only, prompter=attachment, write=write)
    return BackgroundView(view, attachment, lambda error: write(f"{error}\n"))
