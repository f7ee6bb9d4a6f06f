"""How a cell attaches to a run in the background: it shows what ranks print, and asks the user what they ask."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nbspawn._protocol.messages import InputReply
from nbspawn._session import views
from nbspawn._session.views import Action, Foreground, StreamView, View

_TICK = 0.05  # seconds
_SHOWN = 20  # lines that were printed last, shown when a cell attaches


class Attachment:
    """Connects a run in the background, whose view is drawn from another thread, with a cell that attaches to it, in
    which the user can be asked.

    ``elsewhere``: what ranks print is shown in another place. A cell that attaches then shows it only from the first
    prompt on, and what was printed just before that.
    """

    def __init__(self, elsewhere: bool) -> None:
        self.present = False
        """Is a cell attached?"""
        self.asked: deque[Action] = deque()
        """Requests that were made by the handle."""
        self._messages: queue.SimpleQueue[str | tuple[str, bool]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[InputReply | None] = queue.SimpleQueue()
        self._elsewhere = elsewhere
        self._last: deque[str] = deque(maxlen=_SHOWN if elsewhere else 0)
        self._shows = False
        """Does the attached cell show what ranks print?"""
        self._lock = threading.Lock()
        """Text is shown with what was printed last, or passed on to the cell: it is never lost."""

    def actions(self) -> Sequence[Action]:
        """Requests that were made by the handle since the last call."""
        return [self.asked.popleft() for _ in range(len(self.asked))]

    def write(self, text: str) -> bool:
        """Pass on what was printed; False if no cell is attached."""
        with self._lock:
            self._last.extend(text.splitlines(keepends=True))
            if self._shows:
                self._messages.put(text)
            return self.present

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Ask in the attached cell; None if it detaches before the answer."""
        self._messages.put((prompt, password))
        while self.present:
            try:
                return self._replies.get(timeout=_TICK)
            except queue.Empty:
                continue
        return None

    def attach(self, over: Callable[[], bool]) -> None:
        """Called in the cell's thread: show the ranks' prompts, and what they print, until ``over()``. An interrupt
        detaches, and does not stop the run; at a prompt it is the answer instead."""
        with self._lock:
            while not self._messages.empty():
                self._messages.get()  # for a cell that has detached
            self.present, self._shows = True, not self._elsewhere
        try:
            while not over() or not self._messages.empty():
                try:
                    message = self._messages.get(timeout=_TICK)
                except queue.Empty:
                    continue
                if isinstance(message, str):
                    print(message, end="", flush=True)
                else:
                    self._show_last()
                    self._replies.put(Foreground().ask(*message))
        finally:
            self.present = self._shows = False

    def _show_last(self) -> None:
        with self._lock:
            last, self._shows = "" if self._shows else "".join(self._last), True
        print(last, end="", flush=True)


class BackgroundView(NamedTuple):
    """A view that is drawn from another thread, the attachment that is its prompter, and what shows the error."""

    view: View
    attachment: Attachment
    show_error: Callable[[str], None]
    cell: int = 0
    """The execution count of the cell that it is shown under; 0: none."""


def stream_view() -> BackgroundView:
    """The view in scripts: lines marked with their ranks, on ``sys.stdout`` as it is at the time."""
    attachment = Attachment(elsewhere=False)

    def write(text: str) -> None:
        if not attachment.write(text):
            views.write_to_stdout(text)

    return BackgroundView(StreamView(write, attachment), attachment, lambda error: write(f"{error}\n"))
