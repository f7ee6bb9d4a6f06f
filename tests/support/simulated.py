"""Many nodes without ranks: one process plays all of their agents, which say what real ones have said.

A run on two real agents is recorded (``record``): what the agent of node 0 reported, and that of node 1. ``Simulation``
then replays the first as its node 0 and the second as every other, with the time between the messages as it was. Where
they printed ``MARK``, each prints its number. To the kernel they are agents like any other.

    python simulated.py HOST PORT NODES RECORDING      with the token on the standard input: the agents' process
"""

from __future__ import annotations

import heapq
import itertools
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbspawn._engine.cluster.agents import versions
from nbspawn._protocol import connection
from nbspawn._protocol.agents import CALLS, Answer, Begin, Begun, Call, FromAgent, Hello, Reported
from nbspawn._protocol.wire import pickled

MARK = "node-0000"

_MOMENTS = ("time", "since", "ready")  # fields of events


class Recording:
    """``begun`` and ``reports`` of the two agents; the latter with the seconds since the first ranks were there, at
    which each came, the moments of the events since then too, and ranks numbered from 0 on each node."""

    def __init__(self) -> None:
        self.begun: dict[int, Begun] = {}
        self.reports: dict[int, list[tuple[float, Reported]]] = {0: [], 1: []}
        self._since = 0.0

    def note(self, node: int, message: object) -> None:
        """A message of an agent has come."""
        if isinstance(message, Begun):
            self._since = self._since or time.monotonic()
            self.begun[node] = message
        elif isinstance(message, Reported):
            moved = _moved(message, -self._since, -node * self.ranks)
            self.reports[node].append((time.monotonic() - self._since, moved))

    @property
    def ranks(self) -> int:
        """How many a node has."""
        return len(next(iter(self.begun.values())).pids)


def _moved(report: Reported, seconds: float, ranks: int) -> Reported:
    """With all of its moments that much later, and other numbers of ranks."""
    events = []
    for event in report.events:
        moments = {name: getattr(event, name) + seconds for name in _MOMENTS if getattr(event, name, 0.0)}
        events.append(replace(event, rank=event.rank + ranks, **moments))
    return replace(report, events=tuple(events))


class Simulation:
    """Starts the agents of ``nodes`` nodes: one process, whose ``pid`` it is."""

    address = "127.0.0.1"
    needs_modules = False
    news_seconds = 0.0

    def __init__(self, nodes: int, recording: str | Path) -> None:
        self.nodes = nodes
        self.pid = 0
        self._recording = recording
        self._process: subprocess.Popen[str] | None = None

    def name(self, node: int) -> str:
        return f"node {node}"

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """They are here."""

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> None:
        """The process, with the last of them."""
        if node < self.nodes - 1:
            return
        host, port, _ = arguments
        command = [sys.executable, __file__, host, port, str(self.nodes), os.fspath(self._recording)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        print(token, file=self._process.stdin, flush=True)

    def failures(self) -> dict[int, str]:
        code = self._process.poll() if self._process is not None else None
        return {} if code is None else dict.fromkeys(range(self.nodes), f"the simulation has ended with code {code}")

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None


class _Player:
    """All agents: reads what the kernel asks of each, and sends the recorded reports when they are due."""

    def __init__(self, address: tuple[str, int], token: bytes, nodes: int, recording: Recording) -> None:
        self._recording = recording
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int, int, int]] = []  # when, node, number of the run, index of the report
        self._runs = itertools.count(1)
        self._run = [0] * nodes
        self._began = 0.0
        self._controls = []
        self._bulks = []
        self._lives = []
        for node in range(nodes):
            control = connection.connect(address, token, connection.CONTROL, node)
            self._bulks.append(connection.connect(address, token, connection.BULK, node))
            self._lives.append(connection.connect(address, token, connection.LIFE, node))
            self._controls.append(control)
            hello = Hello(f"host{node}", f"10.0.{node // 250}.{node % 250 + 1}", versions())
            control.sendall(connection.frame(pickled(FromAgent, hello)))
        for node, control in enumerate(self._controls):
            self._selector.register(control, selectors.EVENT_READ, node)
            self._selector.register(self._bulks[node], selectors.EVENT_READ, None)

    def play(self) -> None:
        """Until the kernel closes the connections."""
        while True:
            wait = self._due[0][0] - time.monotonic() if self._due else None
            for key, _ in self._selector.select(max(0.0, wait) if wait is not None else None):
                if key.data is None:
                    if not key.fileobj.recv(1 << 20):  # type: ignore[union-attr]
                        return
                else:
                    self._answer(key.data, pickle.loads(connection.receive(self._controls[key.data])))
            while self._due and self._due[0][0] <= time.monotonic():
                _, node, run, index = heapq.heappop(self._due)
                if run == self._run[node]:
                    report = self._recording.reports[min(node, 1)][index][1]
                    frame = connection.frame(
                        pickled(FromAgent, _moved(report, self._began, node * self._recording.ranks))
                    )
                    self._controls[node].sendall(frame.replace(MARK.encode(), f"{MARK[:-4]}{node:04}".encode()))

    def _answer(self, node: int, message: Any) -> None:
        kind = min(node, 1)
        if isinstance(message, Begin):
            if node == 0:
                self._began = time.monotonic()
            self._run[node] = next(self._runs)
            self._controls[node].sendall(connection.frame(pickled(FromAgent, self._recording.begun[kind])))
            for index, (at, _) in enumerate(self._recording.reports[kind]):
                # Nodes do not report in step: here they are spread over a tenth of a second.
                when = self._began + at + node % 100 / 1000
                heapq.heappush(self._due, (when, node, self._run[node], index))
        elif isinstance(message, Call):
            if message.method == "dispose":
                self._run[node] = 0
            place = "127.0.0.1", 1
            values: dict[str, Any] = {"serve_store": place, "listen": place, "reach": [], "dispose": True}
            value = values.get(message.method)
            if message.number:
                answer = Answer(message.number, pickled(CALLS[message.method], value))
                self._controls[node].sendall(connection.frame(pickled(FromAgent, answer)))


if __name__ == "__main__":
    host, port, nodes, path = sys.argv[1:]
    sys.modules["simulated"] = sys.modules["__main__"]  # where the recording's class is
    recording = pickle.loads(Path(path).read_bytes())
    try:
        _Player((host, int(port)), bytes.fromhex(sys.stdin.readline().strip()), int(nodes), recording).play()
    except (OSError, EOFError):
        pass  # the kernel has gone
