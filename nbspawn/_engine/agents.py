"""Starts the agents of a run over several machines, one on each node, and connects them."""

from __future__ import annotations

import math
import platform
import secrets
import socket
import sys
import time
from contextlib import ExitStack
from typing import Any, Protocol

from nbspawn._engine import inherited
from nbspawn._engine.link import Link
from nbspawn._protocol import connection
from nbspawn._protocol.agents import Hello
from nbspawn._protocol.wire import load_of_rank
from nbspawn.errors import StartError

_CONNECT_SECONDS = 60.0  # an agent imports torch first
_COMPARISONS = 8  # of clocks: the one with the shortest way counts


class Starter(Protocol):
    """Places agents on nodes: what knows a cluster."""

    @property
    def nodes(self) -> int:
        """How many nodes there are."""

    @property
    def address(self) -> str:
        """The address of this machine at which the nodes can reach it."""

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> None:
        """Run ``python -m nbspawn._agent`` with these arguments on the node, with the token on its standard input."""

    def failed(self, node: int) -> str:
        """Why no agent will come from this node; '' if nothing is known of that."""

    def close(self) -> None:
        """Give the nodes back; their agents have ended, or end by themselves."""


class Agents:
    """The agents of all nodes of ``starter``; they stay for further runs. Raises StartError if one does not come, or
    does not fit to the kernel."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        with ExitStack() as undo:
            undo.callback(self.close)
            self.links: list[Link] = []
            self.links += self._connected()
            for link in self.links:
                _check(link.hello)
            undo.pop_all()
        self.master: tuple[str, int] | None = None
        """Node 0's TCPStore, once it serves one."""

    @property
    def alive(self) -> bool:
        """Are all of them connected?"""
        return not any(link.lost for link in self.links)

    def close(self) -> None:
        """End the agents."""
        for link in self.links:
            link.close()
        self._starter.close()

    def _connected(self) -> list[Link]:
        token = secrets.token_bytes(connection.TOKEN_BYTES)
        with ExitStack() as held:
            listener = held.enter_context(socket.create_server((self._starter.address, 0)))
            inherited.close_after_fork(listener.fileno())
            host, port = listener.getsockname()
            for node in range(self._starter.nodes):
                self._starter.start(node, (host, str(port), str(node)), token.hex())
            found: dict[tuple[bytes, int], socket.socket] = {}
            held.callback(_close_all, found)
            listener.settimeout(0.1)
            end = time.monotonic() + _CONNECT_SECONDS
            while len(found) < 2 * self._starter.nodes:
                self._accept(listener, token, found, end)
            links = []
            for node in range(self._starter.nodes):
                control, bulk = found[connection.CONTROL, node], found[connection.BULK, node]
                hello: Hello = connection.receive(control, load_of_rank)
                links.append(Link(node, hello, _offset(control), control, bulk))
            found.clear()
            inherited.unmark(listener.fileno())
        return links

    def _accept(
        self, listener: socket.socket, token: bytes, found: dict[tuple[bytes, int], socket.socket], end: float
    ) -> None:
        missing = [node for node in range(self._starter.nodes) if (connection.BULK, node) not in found]
        for node in missing:
            if why := self._starter.failed(node):
                raise StartError(f"no agent could be started on node {node}: {why}")
        if time.monotonic() > end:
            raise StartError(
                f"no agent has connected from node {missing[0]} within {_CONNECT_SECONDS:g} s: the nodes must be able "
                f"to reach this machine at {self._starter.address}"
            )
        try:
            accepted = connection.accept(listener, token)
        except TimeoutError:
            return
        if accepted is not None:
            one, purpose, node = accepted
            found[purpose, node] = one


_connected: dict[int, Agents] = {}
"""By the identity of their starters: agents that wait for the next run."""


def connected(starter: Starter) -> Agents:
    """The agents of this starter's nodes, which stay for the kernel's life; new ones if one has ended."""
    found = _connected.get(id(starter))
    if found is not None and found.alive:
        return found
    if found is not None:
        found.close()
    _connected[id(starter)] = Agents(starter)
    return _connected[id(starter)]


def release(starter: Starter) -> None:
    """End the agents of this starter."""
    if (found := _connected.pop(id(starter), None)) is not None:
        found.close()


def _close_all(connections: dict[Any, socket.socket]) -> None:
    for one in connections.values():
        one.close()


def _offset(control: socket.socket) -> float:
    """What to add to the agent's clock to have this one's, right to half of the shortest round trip."""
    shortest, offset = math.inf, 0.0
    for _ in range(_COMPARISONS):
        sent = time.monotonic()
        control.sendall(connection.frame(True))
        theirs: float = connection.receive(control, load_of_rank)
        now = time.monotonic()
        if now - sent < shortest:
            shortest, offset = now - sent, (sent + now) / 2 - theirs
    control.sendall(connection.frame(None))
    return offset


def versions() -> dict[str, str]:
    """What has to be the same in the kernel and on all nodes."""
    import torch

    ours: str = sys.modules["nbspawn"].__version__
    return {"Python": platform.python_version(), "torch": str(torch.__version__), "nbspawn": ours}


def _check(hello: Hello) -> None:
    """Raises StartError, with the node's name, if it has another Python, torch or nbspawn than the kernel."""
    ours, theirs = versions(), hello.versions
    other = [f"{name} {theirs.get(name)} (here {ours[name]})" for name in ours if theirs.get(name) != ours[name]]
    if other:
        raise StartError(
            f"the node {hello.host} has {', '.join(other)}: what ranks run is sent as pickles, so all nodes need "
            "the same versions. Install them there, or start the kernel in the nodes' environment."
        )
