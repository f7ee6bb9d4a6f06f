"""A run in a terminal: the ranks' output scrolls, the table stays below it and is drawn again in place."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence

from nbspawn._protocol.messages import DisplayData, Event, InputReply, Printed
from nbspawn._render import profile, text
from nbspawn._render.lines import strip_ansi
from nbspawn._session.views import AT_ONCE, Pace, StreamView, source
from nbspawn._state.run import Run

_UP_AND_CLEAR = "\x1b[{}F\x1b[J"  # to the start of the line that many lines up, then clear to the end of the screen


class ConsoleView(StreamView):
    """Where the terminal cannot move its cursor (a pipe, ``--simple-prompt``), the table is drawn once, at the end.
    ``lines`` adds where the time went."""

    def __init__(self, live: bool, table: bool = True, lines: bool = False) -> None:
        self._live = live
        self._table = table
        self._lines = lines
        self._height = 0
        self._pace = Pace()

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Output above, table below; a display is shown as its text."""
        self.run = run
        self.profile.add(events)
        printed = [_as_text(event) for event in events if isinstance(event, (Printed, DisplayData))]
        self.hold(printed)
        self.release(if_due=True)
        at_once = not run.fresh and time.monotonic() - run.started < AT_ONCE
        if self._live and not at_once and self._pace.due(run):
            self._draw(run)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """The prompt takes the table's place."""
        self.release()
        self._erase()
        return super().ask(prompt, password)

    def close(self, run: Run) -> bool:
        """The last table stays; kept ranks that were through at once have said what there is to say."""
        cut = super().close(run)
        if self._pace.drawn is None and run.uneventful and time.monotonic() - run.started < AT_ONCE:
            if run.mark:
                print(text.brief(run, time.monotonic()), flush=True)
        else:
            self._draw(run)
        if self._lines and profile.worth_showing(self.profile):
            print(profile.text(self.profile, run, source), flush=True)
        return cut

    def write(self, output: str) -> None:
        """Above the table."""
        if output:
            self._erase()
            super().write(output)

    def _erase(self) -> None:
        if self._height:
            sys.stdout.write(_UP_AND_CLEAR.format(self._height))
            self._height = 0
            self._pace.forget()

    def _draw(self, run: Run) -> None:
        self._erase()
        now = self._pace.draw(run)
        if not self._table:
            return
        columns, rows = shutil.get_terminal_size()
        drawn = text.table(run, now, width=columns - 1, color=self._live, source=source).split("\n")
        # Sentences are wrapped here: a line that the terminal wraps would be counted, and erased, as one.
        lines = [part for line in drawn for part in _wrapped(line, columns - 1)]
        # A table higher than the screen would scroll, and what has scrolled cannot be erased.
        shown = lines if run.over else lines[: max(1, rows - 2)]
        print("\n".join(shown), flush=True)
        self._height = 0 if run.over or not self._live else len(shown)


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width) if len(strip_ansi(line)) > width else [line]


def _as_text(event: Printed | DisplayData) -> Printed:
    if isinstance(event, Printed):
        return event
    if event.update:
        return Printed(event.rank, (), "")
    return Printed(event.rank, tuple(str(event.data.get("text/plain", "<display>")).splitlines()), "")
