"""Shows a run under a notebook's cell: the table as the cell's first output, the ranks' output below it."""

from __future__ import annotations

import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from nbspawn._notebook.displays import RankDisplays
from nbspawn._protocol.messages import ClearOutput, DisplayData, Event, InputReply, Printed
from nbspawn._render import curves, html, profile, text
from nbspawn._render.report import Report
from nbspawn._session.views import AT_ONCE, Action, Pace, Prompter, StreamView, snapshot, write_to_stdout
from nbspawn._state.curves import Curves
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run


class NotebookView(StreamView):
    """Shows a run in one display that is updated in place: a saved notebook contains the last state, readable without a
    kernel.

    ``publish`` is the display publisher of the shell, or of a widget. ``kind`` is 'html' (together with text, for
    consoles and converters), 'text', or 'quiet' for no table; ``profile`` unfolds the profile; ``controls`` are buttons
    and one rank's output; ``only`` are the ranks whose output is shown. A run in the background has displays for its
    ``text`` and its ``error``, and ``places`` displays for those of ranks; all of them are made when the run begins.
    With ``seldom`` displays are updated only a few times.
    """

    run: Run

    budget = 140_000
    """Bytes of text. If a cell prints too fast, a Jupyter server drops all its output, errors too. With the table, the
    timeline and an error a cell stays below 200 kB."""

    def __init__(
        self,
        publish: Callable[..., None],
        kind: str,
        profile: bool,
        controls: ViewControls | None,
        only: Collection[int] | None = None,
        prompter: Prompter | None = None,
        text: TextPlace | None = None,
        error: TextPlace | None = None,
        places: int = 0,
        seldom: bool = False,
    ) -> None:
        self._publish = publish
        self._table = _Table(self._publish, kind, profile, seldom)
        self._seldom = seldom
        self._text, self._error = text, error
        self._only = only
        super().__init__(self._write, prompter, only, sys.maxsize if text is not None else self.budget)
        self._displays = RankDisplays(self._publish, self._lines.write_now, places)
        self._controls = controls
        self._opened_at = 0.0

    def actions(self) -> Sequence[Action]:
        """What the user has requested, by the buttons or elsewhere, since the last call."""
        pressed = self._controls.actions if self._controls is not None else deque[Action]()
        return [*(pressed.popleft() for _ in range(len(pressed))), *super().actions()]

    def open(self, run: Run, profile: Profile) -> None:
        """The run begins. The table is shown with the first output, or after ``AT_ONCE`` seconds."""
        super().open(run, profile)
        self._table.profile = profile
        self._opened_at = time.monotonic()
        if self._text is not None and self._error is not None:
            self._text.log_dir = run.log_dir
            self._place()
            self._text.open()
            self._displays.reserve()
            self._error.open()

    def _place(self) -> None:
        """Show the table, above everything that the ranks print or display."""
        if not self._table.placed:
            self._table.draw(self.run)
            if self._controls is not None:
                self._controls.open(self.run)

    def _write(self, text: str) -> None:
        """Print below the table."""
        if self._text is not None:
            self._text.write(text)
            return
        if self.run.newly_started:
            self._place()
        write_to_stdout(text)

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Print and display in the order of the events; redraw if that is due."""
        self.run = run
        self._lines.debugging = "debugging" in run.counts
        self._table.curves.add(events, time.monotonic())
        for event in events:
            if isinstance(event, Printed):
                self._lines.add([event])
            elif isinstance(event, (DisplayData, ClearOutput)) and (self._only is None or event.rank in self._only):
                self._show_display(event)
        self._lines.flush(if_due=True)
        if not self._table.placed and time.monotonic() - self._opened_at >= AT_ONCE:
            self._place()
        if self._controls is not None:
            self._controls.show(run, events)
        if not self._table.placed:
            return
        drawn = self._table.redraw(run, if_due=True)
        if self._seldom and not drawn:
            return
        self._displays.flush(if_due=True)
        if self._text is not None:
            self._text.refresh(if_due=True)

    def _show_display(self, event: DisplayData | ClearOutput) -> None:
        if isinstance(event, DisplayData) and event.update:
            self._displays.show(event)  # in place, however much was printed since
            return
        if self.run.newly_started:  # a command of kept ranks may be over at once
            self._place()
        self._lines.flush_rank(event.rank)
        if isinstance(event, DisplayData):
            self._displays.show(event)
        else:
            self._displays.clear(event)

    def notify(self, text: str) -> None:
        """Show a message below what the ranks have printed."""
        super().notify(text)
        if self._text is not None:
            self._text.refresh()

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Ask below the ranks' output. The table is redrawn first: it cannot be until the answer arrives."""
        self._place()
        self._table.redraw(self.run)
        self.notify("")
        if self._controls is None:
            return self._prompter.ask(prompt, password)
        self._controls.set_disabled(True)
        try:
            return self._prompter.ask(prompt, password)
        finally:
            self._controls.set_disabled(False)

    def show_report(self, report: Report) -> None:
        """Show it as an output of its own."""
        self._place()
        self._lines.flush()
        data = {"text/plain": report.text} if self._table.kind == "text" else report.data
        self._publish(data=data, metadata={})

    def close(self, run: Run) -> bool:
        """Show the final state. A cell of kept ranks that has succeeded at once has no table: only output and values,
        as any cell."""
        placed = self._table.placed
        if not placed:
            self._table.draw_only(run)
        cut = super().close(run)
        if placed and self._controls is not None:
            self._controls.close()
        self._displays.finish()
        if placed:
            self._table.redraw(run)
        if self._text is not None:
            self._text.refresh()
            cut = cut or self._text.cut
        return cut


class ViewControls(Protocol):
    """The buttons of a view; each method is called in the thread that watches the run."""

    actions: deque[Action]
    """The user's requests."""

    def open(self, run: Run) -> None:
        """The view is there; what the ranks print comes below."""

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Take note of events; called some times a second."""

    def set_disabled(self, disabled: bool) -> None:
        """The user is asked something, or not any more."""

    def close(self) -> None:
        """The run is over."""


class TextPlace(Protocol):
    """A display for text."""

    cut: bool
    log_dir: str

    def open(self) -> None:
        """Make the display."""

    def write(self, text: str) -> None:
        """Add text."""

    def refresh(self, if_due: bool = False) -> None:
        """Show new text: now, or only if that is due."""


class _Table:
    """The display of the table, with the profile below it when the run is over."""

    def __init__(self, publish: Callable[..., None], kind: str, unfolds: bool, seldom: bool) -> None:
        self.kind = kind
        self.placed = False
        """Does the display exist?"""
        self.profile: Profile
        self.curves = Curves()
        self._publish = publish
        self._unfolds = unfolds
        self._id = f"nbspawn-{uuid.uuid4().hex}"
        self._pace = Pace(seldom)

    def draw(self, run: Run) -> None:
        """Make the display."""
        self.placed = True
        self._draw(run, update=False)

    def redraw(self, run: Run, if_due: bool = False) -> bool:
        """Update the display if the run has changed: now, or only if that is due. Was it?"""
        due = self._pace.due(run) if if_due else run != self._pace.drawn or run.over
        if due:
            self._draw(run, update=True)
        return due

    def draw_only(self, run: Run) -> None:
        """Make the display of a run that is over, if there is anything to show."""
        if not run.quiet_success or self._unfolds:
            self.draw(run)
        elif run.banner:  # in auto mode nothing else shows that the cell ran in the ranks
            seen = snapshot(run)
            data = {"text/plain": text.brief(seen)}
            if self.kind == "html":
                data["text/html"] = html.brief(seen)
            self._publish(data=data, metadata={})

    def _draw(self, run: Run, update: bool) -> None:
        seen = snapshot(run, self._pace.draw(run))
        if self.kind == "quiet":
            return
        drawn = text.rows(seen)
        data = {"text/plain": text.table(seen, drawn=drawn)}
        if self.kind == "html":
            data["text/html"] = html.table(seen, drawn) + curves.html(self.curves, run)
        if run.over and profile.worth_showing(self.profile):
            if self._unfolds:
                data["text/plain"] += "\n\n" + profile.text(self.profile, seen)
            if self.kind == "html":
                data["text/html"] += profile.html(self.profile, seen, self._unfolds, self._id)
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=update)
