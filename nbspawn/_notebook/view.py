"""A run under a notebook's cell: the table as the cell's first output, the ranks' output below it."""

from __future__ import annotations

import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from nbspawn._notebook.controls import Controls
from nbspawn._notebook.displays import RankDisplays
from nbspawn._protocol.frames import Stack
from nbspawn._protocol.messages import ClearOutput, DisplayData, Event, InputReply, Printed
from nbspawn._render import html, profile, stacks, text
from nbspawn._session.views import AT_ONCE, Action, Foreground, Pace, Prompter, RankLines, source, write_to_stdout
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run


class NotebookView:
    """One display that is updated in place, so that a saved notebook holds the last state, readable with no kernel.

    ``kind`` is 'html' (with text beside it, for consoles and converters), 'text', or 'quiet' for no table at all;
    ``profile`` unfolds where the time went; ``controls`` adds buttons and a look at one rank's output, where a front
    end shows them; ``only`` are the ranks whose output is shown. A run in the background has its ``text`` and its
    ``error`` in displays, and those of ranks in so many ``places``, all of which are made at once.
    """

    run: Run

    budget = 170_000
    """Bytes of text; a Jupyter server drops everything, errors too, of a cell that prints too fast. With the table and
    an error a cell stays below 200 kB."""

    def __init__(
        self,
        shell: Any,
        kind: str,
        profile: bool,
        controls: bool,
        only: Collection[int] | None = None,
        prompter: Prompter | None = None,
        text: TextPlace | None = None,
        error: TextPlace | None = None,
        places: int = 0,
    ) -> None:
        # Kept, because `%%capture` of a later cell puts another publisher into the shell for a while.
        self._publish = shell.display_pub.publish
        self._table = _Table(self._publish, kind, profile)
        self._prompter = prompter or Foreground()
        self._text, self._error = text, error
        self._only = only
        self._lines = RankLines(self._write, sys.maxsize if text is not None else self.budget, only)
        self._displays = RankDisplays(self._publish, self._lines.write_now, places)
        self._controls = Controls(shell.kernel, self._publish, between_cells=places > 0) if controls else None
        self._opened_at = 0.0

    @property
    def present(self) -> bool:
        """Is somebody there to be asked?"""
        return self._prompter.present

    def actions(self) -> Sequence[Action]:
        """The buttons that the user has pressed, and what was asked elsewhere."""
        pressed = self._controls.actions if self._controls is not None else deque[Action]()
        return [*(pressed.popleft() for _ in range(len(pressed))), *self._prompter.actions()]

    def open(self, run: Run) -> None:
        """A run that is over at once needs no more than its last table."""
        self.run = run
        self._lines.open(run)
        self._table.open(run)
        self._opened_at = time.monotonic()
        if self._text is not None and self._error is not None:
            self._text.log_dir = run.log_dir
            self._place()
            self._text.open()
            self._displays.reserve()
            self._error.open()

    def _place(self) -> None:
        """The table comes first, above all that the ranks print or display."""
        if not self._table.placed:
            self._table.draw(self.run)
            if self._controls is not None:
                self._controls.open()

    def _write(self, text: str) -> None:
        """Below the table."""
        if self._text is not None:
            self._text.write(text)
            return
        if self.run.newly_started:
            self._place()
        write_to_stdout(text)

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Print and display in the order of the events; redraw if it is time."""
        self.run = run
        self._lines.debugging = "debugging" in run.counts
        self._table.profile.add(events)
        for event in events:
            if isinstance(event, Printed):
                self._lines.add([event])
            elif isinstance(event, (DisplayData, ClearOutput)) and (self._only is None or event.rank in self._only):
                self._show_display(event)
        self._lines.flush(if_due=True)
        if not self._table.placed and time.monotonic() - self._opened_at >= AT_ONCE:
            self._place()
        if not self._table.placed:
            return
        self._displays.flush(if_due=True)
        self._table.redraw(run, if_due=True)
        if self._controls is not None:
            self._controls.show(run)
        if self._text is not None:
            self._text.refresh(if_due=True)

    def _show_display(self, event: DisplayData | ClearOutput) -> None:
        if isinstance(event, DisplayData) and event.update:
            self._displays.show(event)  # in its place, wherever the lines are by then
            return
        if self.run.newly_started:  # others may be over at once
            self._place()
        self._lines.flush_rank(event.rank)
        if isinstance(event, DisplayData):
            self._displays.show(event)
        else:
            self._displays.clear(event)

    def say(self, text: str) -> None:
        """Below what the ranks have printed."""
        self._lines.say(text)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """The table stands still until the answer comes, so it has to be true."""
        self._place()
        self._table.redraw(self.run)
        self._lines.flush()
        if self._controls is None:
            return self._prompter.ask(prompt, password)
        self._controls.rest(True)
        try:
            return self._prompter.ask(prompt, password)
        finally:
            self._controls.rest(False)

    def show_stacks(self, title: str, found: Mapping[int, Stack], fold: bool) -> None:
        """As an output of its own."""
        self._place()
        self._lines.flush()
        now = time.monotonic()
        data = {"text/plain": "\n".join([title, *stacks.text(found, self.run, now, source)])}
        if self._table.kind != "text":
            data["text/html"] = stacks.html(title, found, self.run, now, source, open_=not fold)
        self._publish(data=data, metadata={})

    def close(self, run: Run) -> bool:
        """The final state stays. A cell of kept ranks that was over at once, and well, shows no more than any cell:
        what they have printed, and their values."""
        self.run = run
        placed = self._table.placed
        if not placed:
            self._table.draw_only(run)
        cut = self._lines.finish(run)
        if placed and self._controls is not None:
            self._controls.close()
        self._displays.finish()
        if placed:
            self._table.redraw(run)
        if self._text is not None:
            self._text.refresh()
            cut = cut or self._text.cut
        return cut


class TextPlace(Protocol):
    """A display of its own for text."""

    cut: bool
    log_dir: str

    def open(self) -> None:
        """Make it."""

    def write(self, text: str) -> None:
        """Add this."""

    def refresh(self, if_due: bool = False) -> None:
        """Show what is new: now, or if it is time."""


class _Table:
    """The display of the table, with where the time went below it when the run is over."""

    def __init__(self, publish: Callable[..., None], kind: str, unfolds: bool) -> None:
        self.kind = kind
        self.placed = False
        """Is it there?"""
        self.profile = Profile(None)
        self._publish = publish
        self._unfolds = unfolds
        self._id = f"nbspawn-{uuid.uuid4().hex}"
        self._pace = Pace()

    def open(self, run: Run) -> None:
        """The ranks have been asked for."""
        self.profile = Profile(run.cell)

    def draw(self, run: Run) -> None:
        """For the first time."""
        self.placed = True
        self._draw(run, update=False)

    def redraw(self, run: Run, if_due: bool = False) -> None:
        """If it shows something else: now, or if it is time."""
        if self._pace.due(run) if if_due else run != self._pace.drawn or run.over:
            self._draw(run, update=True)

    def draw_only(self, run: Run) -> None:
        """For the first and the last time."""
        if not run.quiet_success or self._unfolds:
            self.draw(run)
        elif run.banner:  # in auto mode nothing else says that it ran in the ranks
            now = time.monotonic()
            data = {"text/plain": text.brief(run, now)}
            if self.kind == "html":
                data["text/html"] = html.brief(run, now)
            self._publish(data=data, metadata={})

    def _draw(self, run: Run, update: bool) -> None:
        now = self._pace.draw(run)
        if self.kind == "quiet":
            return
        data = {"text/plain": text.table(run, now, source=source)}
        if self.kind == "html":
            data["text/html"] = html.table(run, now, source)
        if run.over and profile.worth_showing(self.profile):
            if self._unfolds:
                data["text/plain"] += "\n\n" + profile.text(self.profile, run, source)
            if self.kind == "html":
                data["text/html"] += profile.html(self.profile, run, source, open_=self._unfolds)
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=update)
