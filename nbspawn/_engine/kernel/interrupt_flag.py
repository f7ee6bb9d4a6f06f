"""Ctrl-C as a flag that is polled, not as an exception that is raised anywhere.

A KeyboardInterrupt in the middle of torch's ``join`` can lose a rank's failure, and in nbspawn's own loop it could lose
an event. So while ranks are supervised, SIGINT is only counted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nbspawn._engine.kernel import descriptors

_entered: list[InterruptFlag] = []
descriptors.after_fork_in_child(_entered.clear)


def pressed() -> bool:
    """Has the user interrupted, since any of the flags that are entered now was entered?"""
    return any(flag.count for flag in _entered)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer interrupts to the end of the block, which imports torch. After an interrupted import torch can be neither
    used nor imported again in this process ("duplicate registrations")."""
    with InterruptFlag() as flag:
        yield
    if flag.count:
        from nbspawn.errors import interrupt_error

        raise interrupt_error((), "nothing was started: torch was being imported")


class InterruptFlag:
    """Counts interrupts while it is entered, and then restores the previous handler."""

    def __init__(self) -> None:
        self.count = 0
        self._wake: Callable[[], object] = lambda: None
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> InterruptFlag:
        # Only the main thread can set a signal handler, and only it gets KeyboardInterrupt.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
            _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            _entered.remove(self)
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def wakes(self, wake: Callable[[], object]) -> None:
        """Call this at each interrupt, and now if there was one already: between two instructions of the main thread.
        It has to wake a ``select``, which Python would resume after a signal."""
        self._wake = wake
        if self.count:
            wake()

    def press(self, times: int = 1) -> None:
        """Count as interrupts; from any thread."""
        self.count += times
        self._wake()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.press()

    @contextmanager
    def as_exception(self) -> Iterator[None]:
        """Raise KeyboardInterrupt again within the block, in which the kernel waits for the user's answer."""
        if not self._installed:
            yield
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._handle)
