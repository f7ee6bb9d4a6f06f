"""Shows a run in a terminal: the ranks' output scrolls, the table stays below it and is redrawn in place."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Sequence

from nbspawn._protocol.messages import DisplayData, Event, InputReply, Printed
from nbspawn._render import profile, text
from nbspawn._render.lines import strip_ansi
from nbspawn._session.views import AT_ONCE, Pace, Prompter, StreamView, snapshot, write_to_stdout
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run

_UP_AND_CLEAR = "\x1b[{}F\x1b[J"  # to the start of the line that many lines up, then clear to the end of the screen


class ConsoleView(StreamView):
    """The ranks' output and the table. Where the terminal cannot move its cursor (a pipe, ``--simple-prompt``), the
    table is drawn once, at the end. ``profile`` adds the profile; ``only`` are the ranks whose output is shown."""

    def __init__(
        self,
        live: bool,
        table: bool = True,
        profile: bool = False,
        only: Collection[int] | None = None,
        prompter: Prompter | None = None,
        write: Callable[[str], None] = write_to_stdout,
    ) -> None:
        self._live = live
        self._table = table
        self._unfolds = profile
        super().__init__(self._write_above, prompter, only)
        self._write = write
        self._drawn: Sequence[int] = ()
        """The columns of each line that is on the screen."""
        self._pace = Pace()

    def open(self, run: Run, profile: Profile) -> None:
        """Nothing is shown until a rank prints, or ``AT_ONCE`` seconds have passed."""
        super().open(run, profile)
        self._profile = profile

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Output above, table below; displays are shown as text."""
        super().show(run, [_as_text(event) if isinstance(event, DisplayData) else event for event in events])
        at_once = not run.newly_started and time.monotonic() - run.started < AT_ONCE
        if self._live and not at_once and self._pace.due(run):
            self._draw(run)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """The prompt replaces the table."""
        self._lines.flush()
        self._erase()
        return super().ask(prompt, password)

    def close(self, run: Run) -> bool:
        """The last table stays. Kept ranks that have finished at once get none: their output is enough."""
        cut = super().close(run)
        if self._pace.drawn is None and run.quiet_success and time.monotonic() - run.started < AT_ONCE:
            if run.banner:
                print(text.brief(snapshot(run)), flush=True)
        else:
            self._draw(run)
        if self._unfolds and profile.worth_showing(self._profile):
            print(profile.text(self._profile, snapshot(run), shutil.get_terminal_size().columns - 1), flush=True)
        return cut

    def _write_above(self, text: str) -> None:
        self._erase()
        self._write(text)

    def _erase(self) -> None:
        if self._drawn:
            # Where the user has made the terminal narrower since, it has wrapped them.
            columns = shutil.get_terminal_size().columns
            height = sum(max(1, -(-width // columns)) for width in self._drawn)
            sys.stdout.write(_UP_AND_CLEAR.format(height))
            self._drawn = ()
            self._pace.forget()

    def _draw(self, run: Run) -> None:
        self._erase()
        now = self._pace.draw(run)
        if not self._table:
            return
        columns, rows = shutil.get_terminal_size()
        drawn = text.table(snapshot(run, now), width=columns - 1, color=self._live).split("\n")
        # Sentences are wrapped here: a line that the terminal wraps would be counted, and erased, as one line.
        lines = [part for line in drawn for part in _wrapped(line, columns - 1)]
        # A table higher than the screen would scroll, and what has scrolled cannot be erased.
        shown = lines if run.over else lines[: max(1, rows - 2)]
        print("\n".join(shown), flush=True)
        self._drawn = () if run.over or not self._live else [len(strip_ansi(line)) for line in shown]


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width) if len(strip_ansi(line)) > width else [line]


def _as_text(event: DisplayData) -> Printed:
    if event.update:
        return Printed(event.rank, (), "")
    return Printed(event.rank, tuple(str(event.data.get("text/plain", "<display>")).splitlines()), "")
