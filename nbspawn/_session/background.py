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

from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._protocol.messages import InputReply
from nbspawn._render import text
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.supervisor import Watch
from nbspawn._session.views import StreamView, Wish
from nbspawn._state.run import Run
from nbspawn.errors import SpawnError, UsageError, interrupted

_TICK = 0.05  # seconds
_SHOWN = 20  # lines of what was printed last, for somebody who begins to attend


class BehindView(StreamView):
    """To be mixed into a view that is drawn from another thread than the one in which a person can be asked."""

    tees = True
    """Is what it prints seen elsewhere than by those who attend, and shown to them too?"""

    def __init__(self) -> None:
        self.attended = False
        self.asked: deque[Wish] = deque()
        """What the handle was told to do."""
        self._said: queue.SimpleQueue[str | tuple[str, bool]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[InputReply | None] = queue.SimpleQueue()
        self._last: deque[str] = deque(maxlen=_SHOWN)
        self._turn = threading.Lock()
        """What is printed while somebody begins to attend is among the last lines, or is said to them: not neither."""

    @property
    def present(self) -> bool:  # type: ignore[override]
        """Somebody attends."""
        return self.attended

    def wishes(self) -> Sequence[Wish]:
        """Those of the view, and of the handle."""
        asked = [self.asked.popleft() for _ in range(len(self.asked))]
        return [*super().wishes(), *asked]

    def write(self, output: str) -> None:
        """To the view's own place, and to whoever attends."""
        with self._turn:
            if output and self.tees:
                self._last.extend(output.splitlines(keepends=True))
            attended = self.attended
            if output and attended:
                self._said.put(output)
        if self.tees or not attended:
            super().write(output)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        """Whoever attends is asked; None if they leave."""
        self.release()
        self._said.put((prompt, password))
        while self.attended:
            try:
                return self._replies.get(timeout=_TICK)
            except queue.Empty:
                continue
        return None

    def failed(self, error: BaseException) -> None:
        """The run has ended so: shown at once, below all else."""
        self.write(f"{told(error)}\n")

    def attend(self, over: Callable[[], bool]) -> None:
        """In a cell's own thread: print what the ranks print, and put their questions, until it is ``over``. An
        interrupt ends it, and only it, but for one at a prompt, which is the answer."""
        with self._turn:
            while not self._said.empty():
                self._said.get()  # for somebody who has left
            last = "".join(self._last)
            self.attended = True
        try:
            print(last, end="", flush=True)
            while not over() or not self._said.empty():
                try:
                    said = self._said.get(timeout=_TICK)
                except queue.Empty:
                    continue
                if isinstance(said, str):
                    print(said, end="", flush=True)
                else:
                    self._replies.put(views.answer(*said))
        finally:
            self.attended = False


class _Shown(str):
    """A text that a cell shows as it is."""

    def __repr__(self) -> str:
        return str(self)


def told(error: BaseException) -> str:
    """As a cell shows it."""
    return "\n".join(error.lines) if isinstance(error, SpawnError) else f"{type(error).__name__}: {error}"


class Handle:
    """What runs in the background."""

    def __init__(self, watch: Watch, view: BehindView, flag: InterruptFlag, finish: Callable[[], Results]) -> None:
        self._watch = watch
        self._view = view
        self._flag = flag
        self._finish = finish
        self._results: Results | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="nbspawn-background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results = self._finish()
        except BaseException as error:
            self._error = error
            self._view.failed(error)

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Results:
        """Attend until it has ended, for at most ``timeout`` seconds: what ranks print is printed here too, and their
        questions are put here. Returns the results or raises the one error; TimeoutError if time is out; an interrupt
        ends the wait and not the run."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            self._view.attend(lambda: self.done or (end is not None and time.monotonic() >= end))
        except KeyboardInterrupt:
            raise interrupted(["They run on in the background: interrupt() ends them."], "the wait was ended") from None
        if not self.done:
            raise TimeoutError(f"after {timeout:g} s the ranks still run; interrupt() ends them")
        return self.results()

    def results(self) -> Results:
        """The results or the one error; UsageError while it runs."""
        if self._error is not None:
            raise self._error
        if self._results is None:
            raise UsageError("the ranks still run: wait() waits for them, status() says what they do")
        return self._results

    @property
    def run(self) -> Run:
        """Its state now."""
        return self._view.run

    def status(self) -> str:
        """The table as it is now."""
        return _Shown(text.table(self.run, time.monotonic(), source=views.source))

    def interrupt(self) -> None:
        """KeyboardInterrupt in every rank; a second time, SIGKILL. Returns at once."""
        self._flag.press()

    def debug(self, ranks: Sequence[int]) -> None:
        """Stop these ranks in the debugger at their next line, and attend until no rank asks for anything any more."""
        running = [rank for rank in ranks if self.run.ranks[rank].state != "debugging"]
        self._view.asked.append(Wish("debug", tuple(running)))
        asked = False

        def over() -> bool:
            nonlocal asked
            asked = asked or self._watch.asking
            return self.done or (asked and not self._watch.asking)

        self._view.attend(over)

    def end(self, seconds: float) -> bool:
        """Kill its ranks, and wait for at most so long; has it ended?"""
        self._flag.press(2)
        self._thread.join(seconds)
        return self.done

    def __repr__(self) -> str:
        if self.done:
            return f"<ended: {', '.join(f'{count} {state}' for state, count in self.run.counts.items())}>"
        return f"<{len(self.run.ranks)} ranks in the background: wait(), status(), interrupt(), results()>"
