"""Starts the agents of a run over several machines, one on each node, and connects them."""

from __future__ import annotations

import platform
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from nbspawn._engine.base import Starter
from nbspawn._engine.cluster.door import Door
from nbspawn._engine.cluster.link import Link
from nbspawn._engine.cluster.own_modules import OwnModules
from nbspawn._engine.kernel import descriptors
from nbspawn._protocol import connection
from nbspawn.errors import StartError

_CONNECT_SECONDS = 60.0  # an agent imports torch first
_IDLE_SECONDS = 300.0  # for which agents, and their nodes, wait for another run
_TICK = 0.1
_NEWS_TICK = 0.01
_DESCRIPTORS_A_NODE = len(connection.PURPOSES)
_DESCRIPTORS = 32  # more of them


class Agents:
    """The agents of all nodes of ``starter``; they stay for further runs. Raises StartError if one does not come, or
    does not fit to the kernel. As long as not all are there, ``waiting`` is called as by ``Starter.prepare``."""

    def __init__(self, starter: Starter, waiting: Callable[[str], object] = bool) -> None:
        self.starter = starter
        self.links: list[Link] = []
        self.master: tuple[str, int] | None = None
        """Node 0's TCPStore, once it serves one."""
        self.modules = OwnModules() if starter.needs_modules else None
        self.in_use = False
        """Has a run ranks there?"""
        self.used = False
        """Had one?"""
        self._timer: threading.Timer | None = None
        descriptors.check_limit(starter.nodes, "nodes", _DESCRIPTORS_A_NODE * starter.nodes + _DESCRIPTORS)
        starter.prepare(waiting)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._connect(waiting)
            for link in self.links:
                _check(link)
            undo.pop_all()

    @property
    def alive(self) -> bool:
        """Are all of them connected?"""
        return not any(link.lost for link in self.links)

    def begin(self) -> None:
        """A run begins there."""
        self.in_use = True
        if self._timer is not None:
            self._timer.cancel()

    def done(self) -> None:
        """The run is over. After some idle minutes the nodes are given back; at once, if one of them is lost."""
        self.in_use, self.used = False, True
        if not self.alive:
            release(self)
            return
        self._timer = threading.Timer(_IDLE_SECONDS, release, [self])
        self._timer.name = "nbspawn-idle-agents"
        self._timer.daemon = True
        self._timer.start()

    def look_after(self) -> None:
        """Close the connections to nodes that are known to have died: the system may take long to notice."""
        for node, why in self.starter.failures().items():
            self.links[node].lose(why)
        for link in self.links:
            link.check()

    def why(self, link: Link) -> str:
        """Why this connection has ended."""
        until = time.monotonic() + self.starter.news_seconds
        while (why := self.starter.failures().get(link.node)) is None and time.monotonic() < until:
            time.sleep(_NEWS_TICK)
        return why or link.lost

    def close(self) -> None:
        """End the agents."""
        if self._timer is not None:
            self._timer.cancel()
        for link in self.links:
            link.close()
        self.starter.close()

    def _connect(self, waiting: Callable[[str], object]) -> None:
        token = secrets.token_bytes(connection.TOKEN_BYTES)
        with ExitStack() as held:
            selector = held.enter_context(selectors.DefaultSelector())
            held.callback(self._unwatch)
            held.callback(descriptors.unmark, descriptors.close_after_fork(selector.fileno()))

            def arrived(node: int, parts: Mapping[bytes, socket.socket]) -> None:
                self.links.append(Link(node, *map(parts.__getitem__, connection.PURPOSES)))
                self.links[-1].watch(selector)

            door, host, port = None, "", 0
            if self.starter.address:
                door = Door(self.starter.address, token, self.starter.nodes, selector, arrived)
                held.callback(door.close)
                host, port = door.address
            for node in range(self.starter.nodes):
                if (parts := self.starter.start(node, (host, str(port), str(node)), token.hex())) is not None:
                    arrived(node, parts)
            self._wait(selector, door, waiting)
            self.links.sort(key=lambda link: link.node)

    def _unwatch(self) -> None:
        for link in self.links:
            link.unwatch()

    def _wait(self, selector: selectors.BaseSelector, door: Door | None, waiting: Callable[[str], object]) -> None:
        """Wait until all agents have connected, and have said hello."""
        began = time.monotonic()
        nodes, address = self.starter.nodes, self.starter.address
        while sum(link.hello is not None for link in self.links) < nodes:
            ready = selector.select(_TICK)
            for key, _ in ready:
                key.data()
            if door is not None:
                door.dismiss_late()
            for link in self.links:
                if link.lost:
                    where = self.starter.name(link.node)
                    raise StartError(f"no agent could be started on {where}: {self.why(link)}")
            if not ready:
                self._check_that_they_come()
            if time.monotonic() - began > _CONNECT_SECONDS:
                there = {link.node for link in self.links if link.hello is not None}
                missing = next(node for node in range(nodes) if node not in there)
                raise StartError(
                    f"no agent has connected from {self.starter.name(missing)} within {_CONNECT_SECONDS:g} s"
                    + (f": the nodes must be able to reach this machine at {address}" if address else "")
                )
            waiting(f"Starting agents on {nodes} node{'s' * (nodes > 1)}")

    def _check_that_they_come(self) -> None:
        there = {link.node for link in self.links}
        for node, why in self.starter.failures().items():
            if node not in there:
                raise StartError(f"no agent could be started on {self.starter.name(node)}: {why}")


_all: list[Agents] = []
"""Those that run something, and those that wait for the next run."""
_lock = threading.RLock()  # of the list, and of who is in use: idle agents are released by a timer
descriptors.after_fork_in_child(_all.clear)


def connected(starter: Starter, waiting: Callable[[str], object] = bool) -> Agents:
    """Agents on such nodes, which run nothing else: those of an earlier run, or new ones. Idle agents of other nodes
    are released, whose resources these may need."""
    _release_others(starter)
    with _lock:
        if idle := next((found for found in _all if not found.in_use), None):
            idle.begin()
            return idle

    def waiting_for(what: str) -> None:
        _release_others(starter)  # what has become idle meanwhile may be what is waited for
        waiting(what)

    made = Agents(starter, waiting_for)  # without the lock: whoever ends a run, or releases nodes, needs it
    with _lock:
        _all.append(made)
        made.begin()
    return made


def _release_others(starter: Starter) -> None:
    """Release agents that run nothing, and are dead or on other nodes than ``starter`` wants."""
    with _lock:
        idle = [found for found in _all if not found.in_use]
        for found in idle:
            found.look_after()
    for found in idle:
        if found.starter != starter or not found.alive:
            release(found)


def release(agents: Agents | None = None) -> int:
    """End these agents (None: all) if they run nothing, and give their nodes back; returns how many nodes that were."""
    with _lock:
        idle = [found for found in _all if not found.in_use and agents in (None, found)]
        for found in idle:
            _all.remove(found)
    for found in idle:  # without the lock: a cluster may take its time
        found.close()
    return sum(len(found.links) for found in idle)


def versions() -> dict[str, str]:
    """What has to be the same in the kernel and on all nodes. The builds of one torch (+cpu, +cu130) understand each
    other's pickles, and so do the releases of one Python."""
    import torch

    ours: str = sys.modules["nbspawn"].__version__
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": str(torch.__version__).partition("+")[0], "nbspawn": ours}


def _check(link: Link) -> None:
    """Raises StartError, with the node's name, if it has another Python, torch or nbspawn than the kernel."""
    assert link.hello is not None
    ours, theirs = versions(), link.hello.versions
    other = [f"{name} {theirs.get(name)} (here {ours[name]})" for name in ours if theirs.get(name) != ours[name]]
    if other:
        raise StartError(
            f"the node {link.host} has {', '.join(other)}: what ranks run is sent as pickles, so all nodes need "
            "the same versions. Install them there, or start the kernel in the nodes' environment."
        )
