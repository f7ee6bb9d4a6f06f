"""How a run is shown: what a view does, and the plain one for scripts. Notebooks bring their own (_notebook/)."""

from __future__ import annotations

import getpass
import linecache
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nbspawn._protocol.frames import Frame, Stack
from nbspawn._protocol.messages import Event, InputReply, Printed
from nbspawn._render import stacks
from nbspawn._render.stream import MergedStream
from nbspawn._state.run import Run

if TYPE_CHECKING:
    from nbspawn._session.background import BackgroundView

AT_ONCE = 0.05  # seconds: what is over sooner needs no live view
HOLD = 0.1  # seconds for which a view may keep what came, to show it together with what comes from other ranks
HOLD_STEPS = 1.0  # seconds: ranks that make one step together show the same, and a prompt flushes it at once


class Action(NamedTuple):
    """What the user asks for: ``what`` is 'stop', 'stacks' (show where the ranks stand) or 'debug' (stop ``ranks`` in
    the debugger)."""

    what: str
    ranks: tuple[int, ...] = ()


class View(Protocol):
    """Draws from the state, never from an event alone; is told of everything and decides itself when to draw."""

    @property
    def present(self) -> bool:
        """Is somebody there to be asked?"""

    @property
    def run(self) -> Run:
        """The state that was shown last."""

    def actions(self) -> Sequence[Action]:
        """What the user has asked for in the view since the last call."""

    def open(self, run: Run) -> None:
        """The ranks have been asked for."""

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """``events`` have been folded into ``run``; called twice a second at least, with or without events, and again
        ``HOLD`` seconds after something was printed or displayed."""

    def say(self, news: str) -> None:
        """Tell the person something, below what the ranks have printed; '' is nothing."""

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Put a rank's question to the person and wait for the answer; None if they left without one."""

    def show_stacks(self, title: str, found: Mapping[int, Stack], fold: bool) -> None:
        """Show where ranks stand, below what they have printed; it stays. ``fold`` it where that can be done."""

    def close(self, run: Run) -> bool:
        """The last call: show the final state. True if the notebook got less than the ranks' whole output."""


def log_path(run: Run, rank: int) -> str:
    """Where the rank's whole output is."""
    return os.path.join(run.log_dir, f"rank-{rank}.log")


def source(frame: Frame) -> str:
    """The text of a line of the person's; '' if it is not known."""
    return linecache.getline(frame.file, frame.line).strip()


def failed_ranks(run: Run) -> list[int]:
    """The ranks whose last words must be shown."""
    return [rank.rank for rank in run.ranks if rank.state == "failed"]


class Pace:
    """When a table is drawn again. What becomes of a rank is shown soon; all else with the clock, once a second: a
    drawing takes a millisecond, and ranks that compute on the same processors feel it."""

    _SOON = 0.1  # seconds between two drawings, at least
    _CLOCK = 1.0  # seconds between two drawings, at most

    def __init__(self) -> None:
        self.drawn: Run | None = None
        """What the table shows."""
        self._at = 0.0

    def due(self, run: Run) -> bool:
        """Is it time?"""
        passed = time.monotonic() - self._at
        if self.drawn is None or passed >= self._CLOCK:
            return True
        return passed >= self._SOON and _fates(run) != _fates(self.drawn)

    def draw(self, run: Run) -> float:
        """It is drawn now: at this moment."""
        self.drawn, self._at = run, time.monotonic()
        return self._at

    def forget(self) -> None:
        """The table is gone from the screen."""
        self._at = 0.0


def _fates(run: Run) -> list[str]:
    """The ranks' states, but that a rank which runs may be waiting for others: that changes at every look."""
    return ["running" if rank.state == "waiting" else rank.state for rank in run.ranks]


class Prompter(Protocol):
    """Puts questions to the user."""

    @property
    def present(self) -> bool:
        """Is somebody there to be asked?"""

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Wait for the answer; None if they left without one."""

    def actions(self) -> Sequence[Action]:
        """What the user has asked for, elsewhere than in the view, since the last call."""


class Foreground:
    """The user waits for the cell, or for the script."""

    present = True

    def ask(self, prompt: str, password: bool) -> InputReply:
        """On this process's own stdin."""
        return answer(prompt, password)

    def actions(self) -> Sequence[Action]:
        """There is no other place."""
        return ()


def write_to_stdout(text: str) -> None:
    """To ``sys.stdout``, whatever that is at the time."""
    print(text, end="", flush=True)


class RankLines:
    """What the ranks print, marked with their ranks, as one text that goes to ``write``.

    Lines are buffered for a moment: one that all ranks print comes from each of them at its own time, and is written
    once. ``budget`` is in bytes (a terminal or a pipe takes all), ``only`` the ranks whose lines are written (None:
    all).
    """

    def __init__(
        self, write: Callable[[str], None], budget: int = sys.maxsize, only: Collection[int] | None = None
    ) -> None:
        self._write = write
        self._budget = budget
        self._only = only
        self._buffered: list[Printed] = []
        self._since = 0.0
        self.debugging = False
        """Ranks make steps together, and show the same much later than when they run."""

    def open(self, run: Run) -> None:
        """The ranks have been asked for."""
        self._stream = MergedStream(len(run.ranks), lambda rank: log_path(run, rank), self._budget)

    def add(self, printed: Iterable[Printed]) -> None:
        """Buffer these lines."""
        shown = [one for one in printed if self._only is None or one.rank in self._only]
        if shown and not self._buffered:
            self._since = time.monotonic()
        self._buffered += shown

    def flush(self, if_due: bool = False) -> None:
        """Write what is buffered: all, or if it has been for long enough."""
        after = (HOLD_STEPS if self.debugging else HOLD) if if_due else 0.0
        if self._buffered and time.monotonic() - self._since >= after:
            buffered, self._buffered = self._buffered, []
            self._put(self._stream.feed(buffered, blocks=self.debugging))

    def flush_rank(self, rank: int) -> None:
        """Write what is buffered of this rank, and before that in others: something that is no text comes next in
        it."""
        if any(printed.rank == rank for printed in self._buffered):
            text, self._buffered = self._stream.feed_up_to(rank, self._buffered, blocks=self.debugging)
            self._put(text)

    def write_now(self, rank: int, lines: Sequence[str]) -> None:
        """Lines of a rank that need no company."""
        if self._only is None or rank in self._only:
            self._put(self._stream.feed([Printed(rank, tuple(lines), "")]))

    def say(self, text: str) -> None:
        """Something for the user, as lines of its own; '' is nothing."""
        self.flush()
        self._put(text and f"{text}\n")

    def finish(self, run: Run) -> bool:
        """All is over: write the rest. True if less was written than the ranks have printed."""
        self.flush()
        self._put(self._stream.finish(failed_ranks(run)))
        return self._stream.over_budget or self._only is not None

    def _put(self, text: str) -> None:
        if text:
            self._write(text)


class StreamView:
    """What the ranks print, marked with their ranks; nothing else."""

    run: Run

    def __init__(self, write: Callable[[str], None] = write_to_stdout, prompter: Prompter | None = None) -> None:
        self._lines = RankLines(write)
        self._prompter = prompter or Foreground()

    @property
    def present(self) -> bool:
        """Is somebody there to be asked?"""
        return self._prompter.present

    def actions(self) -> Sequence[Action]:
        """There is nothing to press."""
        return self._prompter.actions()

    def open(self, run: Run) -> None:
        """Nothing is shown before a rank prints."""
        self.run = run
        self._lines.open(run)

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Pass on what was printed."""
        self.run = run
        self._lines.debugging = "debugging" in run.counts
        self._lines.add(event for event in events if isinstance(event, Printed))
        self._lines.flush(if_due=True)

    def say(self, text: str) -> None:
        """As lines of its own."""
        self._lines.say(text)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Below what was printed."""
        self._lines.flush()
        return self._prompter.ask(prompt, password)

    def show_stacks(self, title: str, found: Mapping[int, Stack], fold: bool) -> None:
        """As text."""
        self.say("\n".join([title, *stacks.text(found, self.run, time.monotonic(), source)]))

    def close(self, run: Run) -> bool:
        """Flush unfinished lines."""
        self.run = run
        return self._lines.finish(run)


def answer(prompt: str, password: bool) -> InputReply:
    """The person's answer through this process's own ``input`` or ``getpass`` (in a kernel: the front end's)."""
    try:
        return InputReply("text", getpass.getpass(prompt) if password else input(prompt))
    except EOFError:
        return InputReply("eof")
    except KeyboardInterrupt:
        return InputReply("interrupt")
    except NotImplementedError as refusal:  # ipykernel's StdinNotImplementedError: nbclient, papermill
        return InputReply("refused", f"nobody can answer here: {refusal}")


cell_names: Callable[[], Mapping[str, str]] = dict
"""What IPython calls the notebook's cells ('Cell In[5]'), by file name; the notebook extension knows."""

colors: Callable[[], str] = str
"""IPython's colours for tracebacks ('' for none); the notebook extension knows."""

make_default: Callable[[], View] = StreamView
"""Makes the view of a run that names none; the notebook extension puts its own here."""

make_background: Callable[[], BackgroundView] | None = None
"""The same for a run in the background; None: as for scripts (background.py)."""
