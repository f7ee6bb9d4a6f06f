"""Where the ranks of one machine meet: a TCPStore at MASTER_PORT, which the kernel itself serves on the loopback
interface, for code that makes a client of it; and the file at which they make their groups anew.

torchrun's agent serves one, too (TORCHELASTIC_USE_AGENT_STORE): no two runs race for a port, and no rank waits for
rank 0 to listen. ``init_process_group()`` itself meets at a file (_rank/group/stores.py).
"""

from __future__ import annotations

import os
import selectors
import socket
from contextlib import suppress
from typing import Any

from nbspawn._engine.kernel import descriptors
from nbspawn._process.tcp_store import tcp_store
from nbspawn._protocol import shared_memory
from nbspawn._protocol.messages import Regroup

_HOST = "127.0.0.1"  # an address: the host's own name need not resolve


class Rendezvous:
    """Binds the port at once, and starts the store at the first connection: most cells make none, and the start takes
    2 ms, just when the ranks start. Early connections wait in the socket's backlog."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._listener = socket.socket()
        self._listener.bind((_HOST, 0))
        self._listener.listen(1024)
        self.port: int = self._listener.getsockname()[1]
        self._store: Any = None
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, self.serve)

    def serve(self) -> None:
        """Start the store, unless it runs."""
        if self._store is None:
            # By default a TCPStore listens on every interface; if it is given a socket, it serves on that one.
            held = os.dup(self._listener.fileno())
            self._store = tcp_store(_HOST, self.port, slow_dns=False, is_master=True, master_listen_fd=held)
        self._close_listener()

    def close(self) -> None:
        """Stop the store, and release the port."""
        self._close_listener()
        self._store = None

    def _close_listener(self) -> None:
        """Close the listener, unless that is done. An interrupt may come between any two steps; the next call goes on
        from there."""
        if self._listener.fileno() != -1:
            with suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()


class Regrouping:
    """Has the kept ranks of one run make their process groups anew, after a command in which they may have made
    different calls. ``grouped``: have they one of ``--backend``, too?"""

    def __init__(self, grouped: bool) -> None:
        self.grouped = grouped
        self._count = 0
        self._store = -1

    def next(self) -> Regroup:
        """The command for all ranks. Raises OSError if there is no place for the store at which they meet."""
        self._count += 1
        if self.grouped and self._store < 0:
            self._store = descriptors.close_after_fork(shared_memory.anonymous_file())
        return Regroup(self._count, self.grouped, f"/proc/{os.getpid()}/fd/{self._store}" if self.grouped else "")

    def close(self) -> None:
        """Give the store back."""
        if self._store >= 0:
            descriptors.close(self._store)
            self._store = -1
