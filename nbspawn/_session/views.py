"""How a run is shown: the protocol of views, and the plain view for scripts. Those of notebooks are in _notebook/."""

from __future__ import annotations

import getpass
import linecache
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from nbspawn._protocol.frames import Frame
from nbspawn._protocol.messages import Event, InputReply, Printed
from nbspawn._render import bars
from nbspawn._render.report import Report
from nbspawn._render.stream import MergedStream
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run
from nbspawn._state.snapshot import Snapshot

AT_ONCE = 0.05  # seconds: a shorter run needs no live view
BUFFER_TIME = 0.1  # seconds for which a view may buffer output, to merge it with that of other ranks
POLL_TIME = BUFFER_TIME / 2  # seconds between two looks at a run whose output is buffered
BAR_BUFFER_TIME = 2 * BUFFER_TIME  # seconds, of progress bars that have ended
STEP_BUFFER_TIME = 1.0  # seconds, while ranks step together in the debugger: they print the same; a prompt flushes


class Action(NamedTuple):
    """A request of the user: ``what`` is 'stop', 'stacks' (show where the ranks are), 'collectives' (which they have
    called) or 'debug' (stop ``ranks`` in the debugger). Panels have more (panel.py)."""

    what: str
    ranks: tuple[int, ...] = ()


class View(Protocol):
    """Draws from the state, never from an event alone; receives all events and decides when to draw."""

    @property
    def present(self) -> bool:
        """Can the user be asked?"""

    @property
    def run(self) -> Run:
        """The state that was shown last."""

    def actions(self) -> Sequence[Action]:
        """What the user has requested in the view since the last call."""

    def open(self, run: Run, profile: Profile) -> None:
        """The run begins. ``profile`` tells where its time has gone, at any time until the run is over."""

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """``events`` have been folded into ``run``. Called at least twice a second, with or without events, and every
        ``POLL_TIME`` seconds after something was printed or displayed, for three times ``BUFFER_TIME``."""

    def notify(self, text: str) -> None:
        """Show a message below what the ranks have printed; '' is none."""

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Show a rank's prompt and wait for the user's answer; None if the user has left without one."""

    def show_report(self, report: Report) -> None:
        """Show it, permanently, below what the ranks have printed."""

    def close(self, run: Run) -> bool:
        """The last call: show the final state. True if the notebook shows less than the ranks' whole output."""


def log_path(run: Run, rank: int) -> str:
    """The log with the rank's whole output."""
    return run.logs[rank] if run.logs else os.path.join(run.log_dir, f"rank-{rank}.log")


def source(frame: Frame) -> str:
    """The source line of a frame of the user's code; '' if it is not known."""
    return linecache.getline(frame.file, frame.line).strip()


def snapshot(run: Run, now: float | None = None) -> Snapshot:
    """The run at ``now`` seconds (None: at this moment), with the text of the kernel's lines."""
    return Snapshot(run, time.monotonic() if now is None else now, source)


class Pace:
    """When a table is redrawn. A change of a rank's state is shown soon, everything else once a second: a redraw takes
    a millisecond, which slows down ranks that compute on the same processors. With ``seldom``, once each time that the
    run has doubled its length."""

    _SOON = 0.1  # seconds between two drawings, at least
    _CLOCK = 1.0  # seconds between two drawings, at most

    def __init__(self, seldom: bool = False) -> None:
        self.drawn: Run | None = None
        """The state that the table shows."""
        self._at = 0.0
        self._seldom = seldom

    def due(self, run: Run) -> bool:
        """Is a redraw due?"""
        passed = time.monotonic() - self._at
        if self._seldom and self.drawn is not None:
            return passed >= max(self._CLOCK, self._at - run.started)
        if self.drawn is None or passed >= self._CLOCK:
            return True
        return passed >= self._SOON and _states(run) != _states(self.drawn)

    def draw(self, run: Run) -> float:
        """Record that the table is drawn now; returns the time."""
        self.drawn, self._at = run, time.monotonic()
        return self._at

    def forget(self) -> None:
        """Record that the table was erased: a redraw is due."""
        self._at = 0.0


def _states(run: Run) -> list[str]:
    """The ranks' states; 'waiting' counts as 'running', because it changes with every sample."""
    return ["running" if rank.state == "waiting" else rank.state for rank in run.ranks]


class Prompter(Protocol):
    """Asks the user."""

    @property
    def present(self) -> bool:
        """Can the user be asked?"""

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Wait for the answer; None if the user has left without one."""

    def actions(self) -> Sequence[Action]:
        """What the user has requested outside the view since the last call."""


class Foreground:
    """Asks on this process's stdin: the user waits for the cell or the script."""

    present = True

    def ask(self, prompt: str, password: bool) -> InputReply:
        """Ask by this process's own ``input`` or ``getpass`` (in a kernel: the front end's)."""
        try:
            return InputReply("text", getpass.getpass(prompt) if password else input(prompt))
        except EOFError:
            return InputReply("eof")
        except KeyboardInterrupt:
            return InputReply("interrupt")
        except NotImplementedError as refusal:  # ipykernel's StdinNotImplementedError: nbclient, papermill
            return InputReply("refused", f"nobody can answer here: {refusal}")

    def actions(self) -> Sequence[Action]:
        """No actions: there is nothing outside the view."""
        return ()


def write_to_stdout(text: str) -> None:
    """Write to ``sys.stdout``, as it is at the time of the call."""
    print(text, end="", flush=True)


class RankLines:
    """Merges what the ranks print into one text, marked with the ranks, and passes it to ``write``.

    Lines are buffered for a moment: a line that all ranks print arrives from each at another time, but is written once.
    ``budget`` is in bytes (a terminal or a pipe has no limit), ``only`` the ranks whose lines are written (None: all).
    """

    def __init__(
        self, write: Callable[[str], None], budget: int = sys.maxsize, only: Collection[int] | None = None
    ) -> None:
        self._write = write
        self._budget = budget
        self._only = only
        self._buffered: list[tuple[float, Printed]] = []
        self._checked_at = 0.0
        self.debugging = False
        """Ranks step together in the debugger: what they all print arrives over a longer time than when they run."""

    def open(self, run: Run) -> None:
        """The run begins."""
        self._stream = MergedStream(len(run.ranks), lambda rank: log_path(run, rank), self._budget)

    def add(self, printed: Iterable[Printed]) -> None:
        """Buffer these lines."""
        now = time.monotonic()
        self._buffered += [(now, one) for one in printed if self._only is None or one.rank in self._only]

    def flush(self, if_due: bool = False) -> None:
        """Write the buffer: now, or, if its first line is old enough, all but the newest lines: what their peers have
        printed may not have been read, also where the machine is busy and the last call was long ago."""
        now = time.monotonic()
        checked_at, self._checked_at = self._checked_at, now
        if not if_due or self._stream.over_budget:
            self._write_first(len(self._buffered))
            return
        if not self._buffered:
            return
        time_to_merge = STEP_BUFFER_TIME if self.debugging else BUFFER_TIME
        at, first = self._buffered[0]
        may_wait = now - at < BAR_BUFFER_TIME and any(map(bars.is_one, first.lines))
        if now - at >= time_to_merge and not may_wait:
            self._write_first(sum(checked_at - at >= time_to_merge / 2 for at, _ in self._buffered))

    def flush_rank(self, rank: int) -> None:
        """Write what is buffered of this rank, and of others before it: the rank's next output is not text."""
        self._write_part([printed for _, printed in self._buffered if printed.rank == rank], self._buffered[:1])

    def _write_first(self, count: int) -> None:
        """Write the first ``count`` of what is buffered, and what others have of the same lines."""
        self._write_part([printed for _, printed in self._buffered[:count]], self._buffered[count : count + 1])

    def _write_part(self, part: Sequence[Printed], oldest: Sequence[tuple[float, Printed]]) -> None:
        """Write this part of the buffer; all that is left is as old as ``oldest``."""
        if part:
            batch = [printed for _, printed in self._buffered]
            text, rest = self._stream.feed_part(part, batch, blocks=self.debugging)
            self._buffered = [(at, printed) for at, _ in oldest for printed in rest]
            self._write_text(text)

    def write_now(self, rank: int, lines: Sequence[str]) -> None:
        """Write lines of a rank without merging them with those of others."""
        if self._only is None or rank in self._only:
            self._write_text(self._stream.feed([Printed(rank, tuple(lines), "")]))

    def notify(self, text: str) -> None:
        """Write a message to the user, as separate lines; '' is none."""
        self.flush()
        self._write_text(text and f"{text}\n")

    def finish(self, run: Run) -> bool:
        """The run is over: write the rest. True if less was written than the ranks have printed."""
        self.flush()
        failed = [rank.rank for rank in run.ranks if rank.state == "failed"]  # their last output must be shown
        self._write_text(self._stream.finish(failed))
        return self._stream.over_budget or self._only is not None

    def _write_text(self, text: str) -> None:
        if text:
            self._write(text)


class StreamView:
    """Shows what the ranks print, marked with their ranks; nothing else."""

    run: Run

    def __init__(
        self,
        write: Callable[[str], None] = write_to_stdout,
        prompter: Prompter | None = None,
        only: Collection[int] | None = None,
        budget: int = sys.maxsize,
    ) -> None:
        self._lines = RankLines(write, budget, only)
        self._prompter = prompter or Foreground()

    @property
    def present(self) -> bool:
        """Can the user be asked?"""
        return self._prompter.present

    def actions(self) -> Sequence[Action]:
        """What the user has requested; the view itself has no buttons."""
        return self._prompter.actions()

    def open(self, run: Run, profile: Profile) -> None:
        """The run begins. Nothing is shown until a rank prints."""
        self.run = run
        self._lines.open(run)

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Write what was printed."""
        self.run = run
        self._lines.debugging = "debugging" in run.counts
        self._lines.add(event for event in events if isinstance(event, Printed))
        self._lines.flush(if_due=True)

    def notify(self, text: str) -> None:
        """Write a message, as separate lines."""
        self._lines.notify(text)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Ask below what was printed."""
        self._lines.flush()
        return self._prompter.ask(prompt, password)

    def show_report(self, report: Report) -> None:
        """Write its text."""
        self.notify(report.text)

    def close(self, run: Run) -> bool:
        """Flush unfinished lines."""
        self.run = run
        return self._lines.finish(run)
