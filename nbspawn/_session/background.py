"""A command that runs in the background, by its handle.

A thread supervises the ranks, and the kernel is free for other cells. The thread cannot ask the user: prompts of ranks
wait until a cell attaches to the run (``handle.result()``, ``%ranks debug 1``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._process import traced
from nbspawn._render import text
from nbspawn._results import Results
from nbspawn._session import hooks, views
from nbspawn._session.attachment import BackgroundView
from nbspawn._session.supervisor import Supervisor
from nbspawn._session.views import Action
from nbspawn._state.run import Run
from nbspawn.errors import interrupt_error

_log = logging.getLogger(__name__)


class _Shown(str):
    """A text that a cell shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def error_text(error: BaseException) -> str:
    """The error as a cell shows it."""
    rendered = getattr(error, "_render_traceback_", None)  # SpawnError's, and a Stop's
    return "\n".join(rendered()) if rendered is not None else f"{type(error).__name__}: {error}"


class BackgroundRun:
    """The handle of a run in the background, modelled on ``concurrent.futures.Future``.

    ``done``, ``running``, ``cancelled``, ``result``, ``exception``, ``cancel`` and ``add_done_callback`` are those of a
    future. ``wait`` is another name for ``result``, ``interrupt`` for ``cancel``. ``status``, ``debug`` and ``end`` are
    for notebooks.
    """

    def __init__(
        self, supervisor: Supervisor, view: BackgroundView, flag: InterruptFlag, finish: Callable[[], Results[Any]]
    ) -> None:
        self.supervisor = supervisor
        self._shown = view
        self._flag = flag
        self._finish = finish
        self._results: Results[Any] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._callbacks: list[Callable[[BackgroundRun], object]] = []
        self._lock = threading.Lock()
        """A callback that is added while the run ends is called once."""
        self._thread = traced.thread(self._run, "nbspawn-background")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results = self._finish()
        except BaseException as error:
            self._error = error
            try:
                self._shown.show_error(error_text(error))
            except Exception:  # whoever waits for the result gets it all the same
                _log.exception("the error of a background run cannot be shown")
        with self._lock:
            self._ended = True
        for callback in self._callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[BackgroundRun], object]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of a background run has failed")

    def add_done_callback(self, callback: Callable[[BackgroundRun], object]) -> None:
        """Have a function called when the run has ended, in the thread that watched it; at once, if it has ended.

        Args:
            callback: called with this handle. What it raises is logged.
        """
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def done(self) -> bool:
        """Has the run ended, by success, an error or an interrupt?

        Returns:
            True if it has.
        """
        return self._ended

    def running(self) -> bool:
        """Is the run still in progress?

        Returns:
            True if it is.
        """
        return not self.done()

    def cancelled(self) -> bool:
        """Has the user stopped the run?

        Returns:
            True if ``cancel`` or an interrupt has ended it.
        """
        return self.done() and isinstance(self._error, KeyboardInterrupt)

    def result(self, timeout: float | None = None) -> Results[Any]:
        """Wait until the run has ended. Meanwhile the calling cell shows the ranks' prompts. What they print is shown
        where the run was started, and below a prompt here, too.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Returns:
            The results, a sequence by rank.

        Raises:
            TimeoutError: the run has not ended within ``timeout`` seconds; it goes on.
            SpawnError: the error of the run, as ``nbspawn.spawn`` raises it.
            KeyboardInterrupt: the user has stopped the run, or has interrupted this wait (the run then goes on).
        """
        self._attach(timeout)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    wait = result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``result`` does, and return the error that it would raise.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Returns:
            The error; None if the run has succeeded.

        Raises:
            TimeoutError: the run has not ended within ``timeout`` seconds; it goes on.
            KeyboardInterrupt: the user has interrupted this wait; the run goes on.
        """
        self._attach(timeout)
        return self._error

    def cancel(self) -> bool:
        """Stop the ranks by KeyboardInterrupt; called a second time, by SIGKILL. Does not wait for their end.

        Returns:
            False if the run had ended already.
        """
        if self.done():
            return False
        self._flag.press()
        return True

    interrupt = cancel

    @property
    def stopping(self) -> bool:
        """Has the end of the run been requested, by ``cancel`` or by whoever ends the ranks?"""
        return self._flag.count > 0

    def _attach(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        try:
            self._shown.attachment.attach(lambda: self.done() or (end is not None and time.monotonic() >= end))
        except KeyboardInterrupt:
            raise interrupt_error(
                ["They run on in the background: cancel() stops them."], "the wait was ended"
            ) from None
        if not self.done():
            raise TimeoutError(f"after {timeout:g} s the ranks still run; cancel() stops them")

    @property
    def cell(self) -> int:
        """The execution count of the cell under which it is shown; 0: none."""
        return self._shown.cell

    def _ipython_display_(self, **_: Any) -> None:
        hooks.display(self, repr(self))

    @property
    def run(self) -> Run:
        """The current state of the run."""
        return self._shown.view.run

    def status(self) -> str:
        """The table of the ranks.

        Returns:
            The table as text; a cell shows it without quotes.
        """
        return _Shown(text.table(views.snapshot(self.run)))

    def debug(self, ranks: Sequence[int]) -> None:
        """Stop ranks in the debugger at their next line, and attach to the run until no rank waits for input any more.
        Returns at once if they stop in the front end's own debugger.

        Args:
            ranks: the ranks to stop.
        """
        running = [rank for rank in ranks if self.run.ranks[rank].state not in ("debugging", "paused")]
        self._shown.attachment.asked.append(Action("debug", tuple(running)))
        asked = False

        def over() -> bool:
            nonlocal asked
            asked = asked or self.supervisor.asking
            paused = "paused" in self.run.counts
            return self.done() or paused or (asked and not self.supervisor.asking)

        self._shown.attachment.attach(over)

    def end(self, seconds: float) -> bool:
        """Kill the ranks.

        Args:
            seconds: how long to wait for their end, at most.

        Returns:
            True if the run has ended.
        """
        self._flag.press(2)
        self._thread.join(seconds)
        return self.done()

    def __repr__(self) -> str:
        if self.done():
            return f"<ended: {', '.join(f'{count} {state}' for state, count in self.run.counts.items())}>"
        return f"<{len(self.run.ranks)} ranks in the background: result(), status(), cancel(), done()>"
