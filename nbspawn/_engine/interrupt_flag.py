"""Ctrl-C as a flag that is looked at, not as an exception that lands anywhere.

A KeyboardInterrupt in the middle of torch's ``join`` can lose a rank's failure, and in the middle of ours could lose
an event; so while ranks are watched, SIGINT only counts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nbspawn._engine import inherited

_entered: list[InterruptFlag] = []
inherited.when_forked(_entered.clear)


def pressed() -> bool:
    """Has somebody pressed Stop, of those whose interrupts are counted now?"""
    return any(flag.count for flag in _entered)


@contextmanager
def held() -> Iterator[None]:
    """Stop waits until this, which imports torch, is through: a torch whose import was given up half-way can neither be
    used nor imported again in this process ("duplicate registrations")."""
    with InterruptFlag() as flag:
        yield
    if flag.count:
        from nbspawn.errors import interrupted

        raise interrupted((), "nothing was started: torch was being imported")


class InterruptFlag:
    """Counts interrupts while it is entered; the handler that was there comes back afterwards. ``on_press`` is called
    at each, between two instructions of the main thread: Python goes on with a ``select`` that a signal interrupts."""

    def __init__(self) -> None:
        self.count = 0
        self.on_press: Callable[[], object] = lambda: None
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> InterruptFlag:
        # Only the main thread can take a signal over, and only it gets KeyboardInterrupt.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._noted)
            self._installed = True
            _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            _entered.remove(self)
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def press(self, times: int = 1) -> None:
        """As if it was interrupted; from any thread."""
        self.count += times
        self.on_press()

    def _noted(self, signum: int, frame: FrameType | None) -> None:
        self.press()

    @contextmanager
    def as_exception(self) -> Iterator[None]:
        """For a while, interrupts are KeyboardInterrupt again: the kernel waits for the person's answer."""
        if not self._installed:
            yield
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._noted)
