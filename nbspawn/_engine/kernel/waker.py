"""Has a selector that somebody waits in report something; from any thread, and from a signal handler."""

from __future__ import annotations

import contextlib
import selectors
import socket

from nbspawn._engine.kernel import descriptors


class Waker:
    """A pair of sockets, one end of which ``selector`` watches; its key's data is called, as those of all others."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
            descriptors.close_after_fork(end.fileno())
        selector.register(self._woken, selectors.EVENT_READ, self._wake_up)

    def wake(self) -> None:
        """Nobody goes on waiting; also when all is closed."""
        with contextlib.suppress(OSError):  # closed, or it has been woken often enough
            self._waker.send(b"!")

    def _wake_up(self) -> None:
        self._woken.recv(64)

    def close(self) -> None:
        """Close both ends."""
        for end in (self._woken, self._waker):
            descriptors.unmark(end.fileno())
            end.close()
