"""A command that runs behind the cell that started it: its handle, and the desk at which somebody may answer its ranks.

A thread watches the ranks, so that the kernel is free for other cells. It has no person at its side: questions of ranks
wait until somebody attends, in a cell of their own (``handle.wait()``, ``%ranks debug 1``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._protocol.messages import InputReply
from nbspawn._render import text
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.supervisor import Supervisor
from nbspawn._session.views import Action, StreamView, View
from nbspawn._state.run import Run
from nbspawn.errors import SpawnError, interrupted

_TICK = 0.05  # seconds
_SHOWN = 20  # lines of what was printed last, for somebody who begins to attend


class Attachment:
    """Between a run in the background, whose view is drawn from another thread, and a cell that attaches to it, in
    which the user can be asked.

    ``replay``: who attaches is shown what was printed last.
    """

    def __init__(self, replay: bool) -> None:
        self.present = False
        """Does a cell attend?"""
        self.asked: deque[Action] = deque()
        """What the handle was told to do."""
        self._messages: queue.SimpleQueue[str | tuple[str, bool]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[InputReply | None] = queue.SimpleQueue()
        self._last: deque[str] = deque(maxlen=_SHOWN if replay else 0)
        self._lock = threading.Lock()
        """What is printed while somebody attaches is among the last lines, or is passed on to them: not neither."""

    def actions(self) -> Sequence[Action]:
        """Those of the handle since the last call."""
        return [self.asked.popleft() for _ in range(len(self.asked))]

    def write(self, text: str) -> bool:
        """Pass on what was printed; False if no cell attends."""
        with self._lock:
            self._last.extend(text.splitlines(keepends=True))
            if self.present:
                self._messages.put(text)
            return self.present

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Whoever attends is asked; None if they leave."""
        self._messages.put((prompt, password))
        while self.present:
            try:
                return self._replies.get(timeout=_TICK)
            except queue.Empty:
                continue
        return None

    def attend(self, over: Callable[[], bool]) -> None:
        """In a cell's own thread: print what the ranks print, and put their questions, until it is ``over``. An
        interrupt ends it, and only it, but for one at a prompt, which is the answer."""
        with self._lock:
            while not self._messages.empty():
                self._messages.get()  # for somebody who has left
            last = "".join(self._last)
            self.present = True
        try:
            print(last, end="", flush=True)
            while not over() or not self._messages.empty():
                try:
                    message = self._messages.get(timeout=_TICK)
                except queue.Empty:
                    continue
                if isinstance(message, str):
                    print(message, end="", flush=True)
                else:
                    self._replies.put(views.answer(*message))
        finally:
            self.present = False


class BackgroundView(NamedTuple):
    """A view that is drawn from another thread, the attachment that is its prompter, and where the error is shown."""

    view: View
    attachment: Attachment
    show_error: Callable[[str], None]


def stream_view() -> BackgroundView:
    """For scripts: marked lines, wherever ``sys.stdout`` is at the time."""
    attachment = Attachment(replay=False)

    def write(text: str) -> None:
        if not attachment.write(text):
            views.write_to_stdout(text)

    return BackgroundView(StreamView(write, attachment), attachment, lambda error: write(f"{error}\n"))


class _Shown(str):
    """A text that a cell shows as it is."""

    def __repr__(self) -> str:
        return str(self)


def told(error: BaseException) -> str:
    """As a cell shows it."""
    return "\n".join(error.lines) if isinstance(error, SpawnError) else f"{type(error).__name__}: {error}"


class BackgroundRun:
    """What runs in the background: a handle after ``concurrent.futures.Future``.

    ``done``, ``running``, ``cancelled``, ``result``, ``exception`` and ``cancel`` are a future's. ``wait``, ``status``
    and ``interrupt`` are what a notebook needs beside them.
    """

    def __init__(
        self, supervisor: Supervisor, view: BackgroundView, flag: InterruptFlag, finish: Callable[[], Results[Any]]
    ) -> None:
        self._supervisor = supervisor
        self._shown = view
        self._flag = flag
        self._finish = finish
        self._results: Results[Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nbspawn-background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results = self._finish()
        except BaseException as error:
            self._error = error
            self._shown.show_error(told(error))

    def done(self) -> bool:
        """Has it ended, in whichever way?"""
        return not self._thread.is_alive()

    def running(self) -> bool:
        """Does it still run?"""
        return not self.done()

    def cancelled(self) -> bool:
        """Has the user stopped it?"""
        return self.done() and isinstance(self._error, KeyboardInterrupt)

    def result(self, timeout: float | None = None) -> Results[Any]:
        """Wait until it has ended: what ranks print meanwhile is printed here too, and their questions are put here.

        Args:
            timeout: seconds to wait at most; None: no limit.

        Returns:
            The results.

        Raises:
            TimeoutError: the ranks still run.
            SpawnError: the one error of the run, as ``nbspawn.spawn`` raises it.
            KeyboardInterrupt: the user has stopped the run, or has ended this wait, and not the run.
        """
        self._attend(timeout)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    wait = result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``result`` does; returns the error that it would raise, None if the run has ended well."""
        self._attend(timeout)
        return self._error

    def cancel(self) -> bool:
        """Stop the ranks: KeyboardInterrupt in each of them; a second time, SIGKILL. Returns at once; False if the run
        had ended."""
        if self.done():
            return False
        self._flag.press()
        return True

    interrupt = cancel

    def _attend(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        try:
            self._shown.attachment.attend(lambda: self.done() or (end is not None and time.monotonic() >= end))
        except KeyboardInterrupt:
            raise interrupted(["They run on in the background: cancel() stops them."], "the wait was ended") from None
        if not self.done():
            raise TimeoutError(f"after {timeout:g} s the ranks still run; cancel() stops them")

    @property
    def run(self) -> Run:
        """Its state now."""
        return self._shown.view.run

    def status(self) -> str:
        """The table as it is now."""
        return _Shown(text.table(self.run, time.monotonic(), source=views.source))

    def debug(self, ranks: Sequence[int]) -> None:
        """Stop these ranks in the debugger at their next line, and attend until no rank asks for anything any more."""
        running = [rank for rank in ranks if self.run.ranks[rank].state != "debugging"]
        self._shown.attachment.asked.append(Action("debug", tuple(running)))
        asked = False

        def over() -> bool:
            nonlocal asked
            asked = asked or self._supervisor.asking
            return self.done() or (asked and not self._supervisor.asking)

        self._shown.attachment.attend(over)

    def end(self, seconds: float) -> bool:
        """Kill its ranks, and wait for at most so long; has it ended?"""
        self._flag.press(2)
        self._thread.join(seconds)
        return self.done()

    def __repr__(self) -> str:
        if self.done():
            return f"<ended: {', '.join(f'{count} {state}' for state, count in self.run.counts.items())}>"
        return f"<{len(self.run.ranks)} ranks in the background: result(), status(), cancel(), done()>"
