"""A run under a notebook's cell: the table as the cell's first output, the ranks' output below it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nbspawn._notebook.controls import Controls
from nbspawn._notebook.displays import RankDisplays
from nbspawn._protocol.messages import ClearOutput, DisplayData, Event, InputReply, Printed
from nbspawn._render import html, profile, stacks, text
from nbspawn._render.stacks import Stack
from nbspawn._session.views import AT_ONCE, Pace, StreamView, Wish, source
from nbspawn._state.run import Run


class NotebookView(StreamView):
    """One display that is updated in place, so that a saved notebook holds the last state, readable with no kernel.

    ``kind`` is 'html' (with text beside it, for consoles and converters), 'text', or 'quiet' for no table at all;
    ``lines`` unfolds where the time went; ``controls`` adds buttons and a look at one rank's output, where a front
    end shows them. With ``places`` ranks' displays go to so many places that are made beforehand.
    """

    budget = 170_000
    """Bytes of text; a Jupyter server drops everything, errors too, of a cell that prints too fast. With the table and
    an error a cell stays below 200 kB."""

    def __init__(self, shell: Any, kind: str, lines: bool, controls: bool, places: int = 0) -> None:
        # Kept, because `%%capture` of a later cell puts another publisher into the shell for a while.
        self._publish = shell.display_pub.publish
        self._kind = kind
        self._lines = lines
        self._id = f"nbspawn-{uuid.uuid4().hex}"
        self._pace = Pace()
        self._opened_at = 0.0
        self._placed = False
        self._displays = RankDisplays(self._publish, self._say, places)
        self._controls = Controls(shell.kernel, self._publish, behind=places > 0) if controls else None

    def wishes(self) -> Sequence[Wish]:
        """The buttons that the person has pressed."""
        if self._controls is None:
            return ()
        return [self._controls.wishes.popleft() for _ in range(len(self._controls.wishes))]

    def open(self, run: Run) -> None:
        """A run that is over at once needs no more than its last table."""
        super().open(run)
        self._opened_at = time.monotonic()

    def place(self) -> None:
        """The table comes first, above all that the ranks print or display."""
        if not self._placed:
            self._placed = True
            self._draw(self.run, update=False)
            if self._controls is not None:
                self._controls.open()

    def write(self, output: str) -> None:
        """Below the table."""
        if output:
            if self.run.fresh:
                self.place()
            super().write(output)

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Print and display in the order of the events; redraw if it is time."""
        self.run = run
        self.profile.add(events)
        for event in events:
            if isinstance(event, Printed):
                self.hold([event])
            elif isinstance(event, DisplayData) and event.update:
                self._displays.show(event)  # in its place, wherever the lines are by then
            elif isinstance(event, (DisplayData, ClearOutput)):
                if run.fresh:  # others may be over at once
                    self.place()
                self.release_of(event.rank)
                if isinstance(event, DisplayData):
                    self._displays.show(event)
                else:
                    self._displays.clear(event)
        self.release(if_due=True)
        if not self._placed and time.monotonic() - self._opened_at >= AT_ONCE:
            self.place()
        if not self._placed:
            return
        self._displays.flush(if_due=True)
        if self._pace.due(run):
            self._draw(run, update=True)
        if self._controls is not None:
            self._controls.show(run)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """The table stands still until the answer comes, so it has to be true."""
        self.place()
        if self.run != self._pace.drawn:
            self._draw(self.run, update=True)
        if self._controls is None:
            return super().ask(prompt, password)
        self._controls.rest(True)
        try:
            return super().ask(prompt, password)
        finally:
            self._controls.rest(False)

    def show_stacks(self, title: str, found: Mapping[int, Stack], fold: bool) -> None:
        """As an output of its own."""
        self.place()
        self.release()
        now = time.monotonic()
        data = {"text/plain": "\n".join([title, *stacks.text(found, self.run, now, source)])}
        if self._kind != "text":
            data["text/html"] = stacks.html(title, found, self.run, now, source, open_=not fold)
        self._publish(data=data, metadata={})

    def close(self, run: Run) -> bool:
        """The final state stays. A cell of kept ranks that was over at once, and well, shows no more than any cell:
        what they have printed, and their values."""
        self.run = run
        placed, self._placed = self._placed, True
        if not placed and run.uneventful and not self._lines:
            self._draw_mark(run)
        elif not placed:
            self._draw(run, update=False)
        cut = super().close(run)
        if placed and self._controls is not None:
            self._controls.close()
        self._displays.finish()
        if placed:
            self._draw(run, update=True)
        return cut

    def _say(self, rank: int, lines: list[str]) -> None:
        self.write(self.stream.feed([Printed(rank, tuple(lines), "")]))

    def _draw_mark(self, run: Run) -> None:
        """In auto mode nothing else says that it ran in the ranks."""
        if run.mark:
            now = time.monotonic()
            data = {"text/plain": text.brief(run, now)}
            if self._kind == "html":
                data["text/html"] = html.brief(run, now)
            self._publish(data=data, metadata={})

    def _draw(self, run: Run, update: bool) -> None:
        now = self._pace.draw(run)
        if self._kind == "quiet":
            return
        data = {"text/plain": text.table(run, now, source=source)}
        if self._kind == "html":
            data["text/html"] = html.table(run, now, source)
        if run.over and profile.worth_showing(self.profile):
            if self._lines:
                data["text/plain"] += "\n\n" + profile.text(self.profile, run, source)
            if self._kind == "html":
                data["text/html"] += profile.html(self.profile, run, source, open_=self._lines)
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=update)
