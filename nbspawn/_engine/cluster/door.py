"""Accepts the agents' connections, all beside each other: whoever does not know the token costs nothing."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from nbspawn._engine.kernel import descriptors
from nbspawn._protocol import connection
from nbspawn._protocol.connection import Guest

_STAY = 10.0  # seconds for a connection to prove where it comes from
_GUESTS = 256  # at a time; the one that came first goes for the next


class Door:
    """Listens at ``address`` for the agents of so many ``nodes``, while a selector is watched whose keys' data are
    called. ``arrived`` is called with the number of a node and its connections by their purpose, once all are there."""

    def __init__(
        self,
        host: str,
        token: bytes,
        nodes: int,
        selector: selectors.BaseSelector,
        arrived: Callable[[int, Mapping[bytes, socket.socket]], object],
    ) -> None:
        self._token, self._nodes, self._selector, self._arrived = token, nodes, selector, arrived
        self._guests: dict[Guest, float] = {}
        self._parts: dict[int, dict[bytes, socket.socket]] = {}
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        descriptors.close_after_fork(self._listener.fileno())
        self.address: tuple[str, int] = self._listener.getsockname()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with suppress(OSError):  # nobody any more; or this process has no descriptor left
            while True:
                accepted, _ = self._listener.accept()
                guest = Guest(accepted, self._token)
                self._guests[guest] = time.monotonic() + _STAY
                self._selector.register(accepted, selectors.EVENT_READ, partial(self._hear, guest))
                if len(self._guests) > _GUESTS:
                    self._dismiss(next(iter(self._guests))).close()

    def _hear(self, guest: Guest) -> None:
        if guest not in self._guests:  # dismissed since the selector said that it is ready
            return
        try:
            who = guest.who()
        except (OSError, EOFError):
            self._dismiss(guest).close()
            return
        if who is None:
            return
        known = self._dismiss(guest)
        purpose, node = who
        if node >= self._nodes or purpose not in connection.PURPOSES or purpose in self._parts.get(node, {}):
            known.close()
            return
        parts = self._parts.setdefault(node, {})
        parts[purpose] = known
        if len(parts) == len(connection.PURPOSES):
            self._arrived(node, self._parts.pop(node))

    def _dismiss(self, guest: Guest) -> socket.socket:
        """Forget this visitor; returns its connection."""
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        return guest.socket

    def dismiss_late(self) -> None:
        """Close the connections that have said too little for too long; to be called some times a second."""
        now = time.monotonic()
        for guest in [guest for guest, until in self._guests.items() if until < now]:
            self._dismiss(guest).close()

    def close(self) -> None:
        """Accept no more; agents that have arrived stay."""
        for guest in list(self._guests):
            self._dismiss(guest).close()
        for parts in self._parts.values():
            for one in parts.values():
                one.close()
        self._parts.clear()
        self._selector.unregister(self._listener)
        descriptors.close(self._listener.detach())
