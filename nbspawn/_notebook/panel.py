"""A session or a background run that shows itself: what its ranks do, and buttons, in a widget that is kept current.

A thread refreshes it while it is shown. When the ranks have ended the widget is closed, and its last picture stays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from typing import Protocol

import ipywidgets  # type: ignore[import-untyped]

from nbspawn._engine.kernel import descriptors
from nbspawn._notebook.buttons import COLLECTIVES, STACKS, STOP, VARIABLES, Buttons, Kind
from nbspawn._notebook.pictures import Picture
from nbspawn._notebook.ranks import idle_table, variables_of
from nbspawn._notebook.slots import close
from nbspawn._notebook.tails import tail
from nbspawn._process import traced
from nbspawn._render import html, kept
from nbspawn._render.report import Report
from nbspawn._session import views
from nbspawn._session.background import BackgroundRun
from nbspawn._session.pool import Pool
from nbspawn._session.supervisor import REPORTS, Supervisor
from nbspawn._session.views import Action, log_path
from nbspawn._state.run import Run
from nbspawn.errors import SpawnError, StartError, UsageError

_PERIOD = 1.0  # seconds between two refreshes

_INTERRUPT = Kind("interrupt", "Interrupt", "stop", "KeyboardInterrupt in every rank: the ranks stay")
_RESTART = Kind("restart", "Restart", "refresh", "End the ranks and start them again, without their variables")
_END = Kind("end", "End", "power-off", "End the ranks")


class Subject(Protocol):
    """What a panel shows."""

    kinds: Sequence[Kind]
    """Its buttons."""

    nprocs: int

    @property
    def current(self) -> Run | None:
        """What the ranks run; None if they are idle."""

    @property
    def over(self) -> bool:
        """Have the ranks ended?"""

    def idle(self) -> str:
        """The table of ranks that are idle, or have ended, as HTML."""

    def log(self, rank: int) -> str:
        """The path of its log; '' if there is none."""

    def report(self, what: str) -> Report | None:
        """What one of the buttons shows; None of ranks that are idle, if it is about what they run."""

    def do(self, what: str) -> None:
        """Do what a button says that shows no report."""


class _OfPool:
    """Kept ranks."""

    kinds: Sequence[Kind] = (_INTERRUPT, _RESTART, _END, STACKS, COLLECTIVES, VARIABLES)

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.nprocs = pool.nprocs

    @property
    def current(self) -> Run | None:
        return self._pool.current

    @property
    def over(self) -> bool:
        self._pool.tidy()  # a rank may have died while it was idle
        return self._pool.over

    def idle(self) -> str:
        return kept.html(*idle_table(self._pool))

    def log(self, rank: int) -> str:
        try:
            return self._pool.log_path(rank)
        except StartError:
            return ""

    def report(self, what: str) -> Report | None:
        if what == VARIABLES.what:
            return variables_of(self._pool)
        return _of(self._pool.supervisor, what)

    def do(self, what: str) -> None:
        background = self._pool.background
        if what == "interrupt":
            self._pool.interrupt()
        elif self._pool.current is not None and (background is None or background.done()):
            raise UsageError("the ranks work on a cell: Interrupt stops it")
        elif what == "restart":
            self._pool.restart()
        else:
            self._pool.close()


class _OfRun:
    """A run in the background."""

    kinds: Sequence[Kind] = (STOP, STACKS, COLLECTIVES)

    def __init__(self, run: BackgroundRun) -> None:
        self._run = run
        self.nprocs = len(run.run.ranks)

    @property
    def current(self) -> Run | None:
        return None if self._run.done() else self._run.run

    @property
    def over(self) -> bool:
        return self._run.done()

    def idle(self) -> str:
        return html.table(views.snapshot(self._run.run))

    def log(self, rank: int) -> str:
        return log_path(self._run.run, rank)

    def report(self, what: str) -> Report | None:
        return _of(self._run.supervisor, what)

    def do(self, what: str) -> None:
        self._run.cancel()


def _of(supervisor: Supervisor | None, what: str) -> Report | None:
    return supervisor.report(what) if supervisor is not None else None


class Panel:
    """A panel on one subject, which may be displayed several times."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._picture = Picture()
        self._buttons = Buttons(subject.nprocs, self._act, subject.kinds)
        self._table = ipywidgets.HTML(layout={"width": "100%"})
        self._report = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self._box = ipywidgets.VBox(
            [self._table, self._buttons.row, self._buttons.pane, self._report, self._picture.hider]
        )
        self._box._view_count = 0  # the front end then reports how many views it shows
        self._drawn: object = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Held while it is drawn, by the kernel's thread or the one that refreshes."""
        self._refresh()
        traced.thread(self._keep_current, "nbspawn-panel").start()

    @property
    def closed(self) -> bool:
        """Have the ranks ended?"""
        return self._closed.is_set()

    def show(self, text: str) -> None:
        """Display it below the running cell."""
        self._picture.show(self._box, text)

    def _keep_current(self) -> None:
        while not self._closed.wait(_PERIOD):
            if self._box._view_count or self._subject.over:
                with suppress(StartError):  # the ranks have ended in the middle of it, which the next look shows
                    self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            if self.closed:
                return
            subject, over = self._subject, self._subject.over
            current = subject.current
            table = subject.idle() if current is None else html.table(views.snapshot(current))
            self._table.value = table
            for kind, button in self._buttons.by_kind.items():
                button.disabled = current is None and kind in (_INTERRUPT, STACKS, COLLECTIVES, STOP)
            self._buttons.refresh(lambda rank: tail(subject.log(rank)), subject.log)
            # Each picture is a change of the notebook: not for each second that passes.
            seen = over, None if current is None else [rank.state for rank in current.ranks]
            if seen != self._drawn:
                self._drawn = seen
                self._picture.draw(table)
            if over:
                self._close()

    def _act(self, action: Action) -> None:
        """Carry out a button's action; called in the kernel's own thread."""
        try:
            if action.what in (*REPORTS, VARIABLES.what):
                report = self._subject.report(action.what)
                self._report.value = report.html if report is not None else ""
                self._report.layout.display = "" if self._report.value else "none"
            else:
                self._subject.do(action.what)
        except SpawnError as error:
            self._report.value = f"<pre>{escape(str(error))}</pre>"
            self._report.layout.display = ""
        self._buttons.ready()
        self._refresh()

    def _close(self) -> None:
        self._closed.set()
        self._box._view_count = None  # see controls.py: the front end would report that the view is removed
        self._box.children = [self._table, self._picture.hider]
        self._buttons.close()
        close(self._report)
        if not _picture_is_old():
            for widget in (self._table, self._picture.hider, self._box):
                close(widget)


def _picture_is_old() -> bool:
    """Voila updates no output once the page is shown: there the table of the widget has to stay."""
    return os.environ.get("SERVER_SOFTWARE", "").startswith("voila")


_panels: dict[Pool | BackgroundRun, Panel] = {}
"""Those that are not closed, by what they show. A forked rank does not have their threads."""
descriptors.after_fork_in_child(_panels.clear)


def show(subject: Pool | BackgroundRun, text: str) -> None:
    """Display a session or a run; ``text`` is for consoles."""
    for other, panel in list(_panels.items()):
        if panel.closed:
            del _panels[other]
    if subject not in _panels:
        _panels[subject] = Panel(_OfPool(subject) if isinstance(subject, Pool) else _OfRun(subject))
    _panels[subject].show(text)
