"""How a run is shown: what a view does, and the plain one for scripts. Notebooks bring their own (_notebook/)."""

from __future__ import annotations

import getpass
import linecache
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from nbspawn._protocol.messages import Event, Frame, InputReply, Printed
from nbspawn._render import stacks
from nbspawn._render.stacks import Stack
from nbspawn._render.stream import MergedStream
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run

AT_ONCE = 0.05  # seconds: what is over sooner needs no live view
HOLD = 0.1  # seconds for which a view may keep what came, to show it together with what comes from other ranks
HOLD_STEPS = 1.0  # seconds: ranks that make one step together show the same, and a prompt releases it at once


class Wish(NamedTuple):
    """``what`` is 'stop', 'stacks' (show where the ranks stand) or 'debug' (stop ``ranks`` in the debugger)."""

    what: str
    ranks: tuple[int, ...] = ()


class View(Protocol):
    """Draws from the state, never from an event alone; is told of everything and decides itself when to draw."""

    @property
    def present(self) -> bool:
        """Is somebody there to be asked?"""

    def wishes(self) -> Sequence[Wish]:
        """What the person has asked for in the view since the last call."""

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


class StreamView:
    """What the ranks print, marked with their ranks, on ``sys.stdout``; nothing else."""

    budget = sys.maxsize
    """Bytes of output that are passed on; a terminal or a pipe takes all."""

    present = True

    def wishes(self) -> Sequence[Wish]:
        """There is nothing to press."""
        return ()

    def open(self, run: Run) -> None:
        """Nothing is shown before a rank prints."""
        self.run = run
        self.stream = MergedStream(len(run.ranks), lambda rank: log_path(run, rank), self.budget)
        self.profile = Profile(run.cell)
        self._held: list[Printed] = []
        self._held_since = 0.0

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Pass on what was printed."""
        self.run = run
        self.profile.add(events)
        self.hold([event for event in events if isinstance(event, Printed)])
        self.release(if_due=True)

    def say(self, news: str) -> None:
        """As a line of its own."""
        self.release()
        self.write(news and f"{news}\n")

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Ask on this process's own stdin."""
        self.release()
        return answer(prompt, password)

    def show_stacks(self, title: str, found: Mapping[int, Stack], fold: bool) -> None:
        """As text."""
        self.say("\n".join([title, *stacks.text(found, self.run, time.monotonic(), source)]))

    def close(self, run: Run) -> bool:
        """Flush unfinished lines."""
        self.release()
        self.write(self.stream.finish(failed_ranks(run)))
        return self.stream.over_budget

    def hold(self, printed: Sequence[Printed]) -> None:
        """Keep lines for a moment: a line that all ranks print comes from each of them at its own time, and is to be
        shown once."""
        if printed and not self._held:
            self._held_since = time.monotonic()
        self._held += printed

    def release_of(self, rank: int) -> None:
        """Write what is held of this rank, and before that in others: something that is no text comes next in it."""
        if any(printed.rank == rank for printed in self._held):
            text, self._held = self.stream.feed_up_to(rank, self._held, blocks="debugging" in self.run.counts)
            self.write(text)

    def release(self, if_due: bool = False) -> None:
        """Write what is held: all, or if it has been held for long enough."""
        if not self._held:
            return
        debugging = "debugging" in self.run.counts
        after = (HOLD_STEPS if debugging else HOLD) if if_due else 0.0
        if time.monotonic() - self._held_since >= after:
            held, self._held = self._held, []
            self.write(self.stream.feed(held, blocks=debugging))

    def write(self, output: str) -> None:
        """To ``sys.stdout``, whatever that is at the time."""
        if output:
            print(output, end="", flush=True)


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
