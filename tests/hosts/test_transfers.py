"""Large data between the kernel and nodes: over a line that is slow, to a node that dies, in a run that is stopped."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from nodes import Processes, call

import nbspawn
from nbspawn._engine.cluster import agents, hosts
from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol import shared_memory
from nbspawn._protocol.transfers import Incoming, Outgoing
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import StreamView
from nbspawn._state.run import Run

LARGE = 3_000_000  # bytes: no socket holds so many

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection that do not block."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture(scope="module")
def starter(workplace: str) -> Iterator[Processes]:
    """Two nodes, whose agents have run something."""
    starter = Processes(2)
    call(starter, abs)
    yield starter
    agents.release()


class Receiver:
    """Files that transfers have filled, by their numbers."""

    def __init__(self, end: socket.socket, stripes: int) -> None:
        self._end, self._stripes = end, stripes
        self._incoming = Incoming(self._new)
        self._fds: dict[int, Sequence[int]] = {}
        self.ended: dict[int, bool] = {}

    def _new(self, number: int, total: int) -> Sequence[int]:
        self._fds[number] = [shared_memory.anonymous_file() for _ in range(self._stripes)]
        return self._fds[number]

    def receive(self) -> None:
        """All that is there."""
        with suppress(BlockingIOError):
            while True:
                if (ended := self._incoming.receive(self._end)) is not None:
                    self.ended[ended[0]] = ended[1]

    def content(self, number: int) -> bytes:
        return b"".join(os.pread(fd, LARGE, 0) for fd in self._fds.pop(number))

    def close(self) -> None:
        for fds in self._fds.values():
            shared_memory.close(fds)


def carry(outgoing: Outgoing, end: socket.socket, receiver: Receiver) -> None:
    """All of it."""
    while True:
        with suppress(BlockingIOError):
            outgoing.send(end)
            receiver.receive()
            return
        receiver.receive()


def large_file(data: bytes) -> int:
    fd = shared_memory.anonymous_file()
    os.write(fd, data)
    return fd


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_transfer_that_is_cut_off_leaves_the_line_to_the_next(
    pair: tuple[socket.socket, socket.socket], stripes: int
) -> None:
    data = os.urandom(LARGE)
    receiver = Receiver(pair[1], stripes)
    fd = large_file(data)
    first, second = Outgoing(1, [fd], LARGE), Outgoing(2, [fd], LARGE + 5)
    os.close(fd)
    with pytest.raises(BlockingIOError):
        first.send(pair[0])
    first.cut_off()
    carry(first, pair[0], receiver)
    assert receiver.ended == {1: False} and 0 < first.bytes_left < LARGE
    carry(second, pair[0], receiver)
    assert receiver.ended == {1: False, 2: True} and second.bytes_left == 0
    fds = receiver._fds.pop(2)
    sizes = [os.fstat(fd).st_size for fd in fds]
    assert sum(sizes) == LARGE + 5, "what empty buffers do not write is zero"
    assert b"".join(os.pread(fd, size, 0) for fd, size in zip(fds, sizes, strict=True)) == data + bytes(5)
    shared_memory.close(fds)
    receiver.close()


def values(rank: int) -> bytes:
    return bytes(LARGE)


class Watching(StreamView):
    """Calls ``act`` once, when values are on their way, and remembers the states that were shown."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.states: set[str] = set()
        self._act = act

    def show(self, run: Run, events: Any) -> None:
        super().show(run, events)
        self.states |= {rank.state for rank in run.ranks}
        if any(link.awaited for found in agents._all for link in found.links):
            act, self._act = self._act, bool
            act()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Values do not arrive before this is set."""
    arrive = threading.Event()
    receive = Incoming.receive

    def late(incoming: Incoming, bulk: socket.socket) -> tuple[int, bool] | None:
        if threading.current_thread() is threading.main_thread() and not arrive.is_set():
            raise BlockingIOError
        return receive(incoming, bulk)

    monkeypatch.setattr(Incoming, "receive", late)
    return arrive


@pytest.mark.parametrize("keep", [False, True])
def test_a_node_that_dies_with_values_on_their_way_is_named(workplace: str, slow: threading.Event, keep: bool) -> None:
    starter = Processes(2)
    pool = Pool(LaunchOptions(nprocs=4, on=starter, keep=keep))
    view = Watching(lambda: os.kill(starter.agents[1].pid, signal.SIGKILL))
    with pytest.raises(nbspawn.RankExitedError, match=r"rank 2 of 4 .*its node \S+ was lost") as caught:
        pool.run(FunctionJob(values), CommandOptions(view=view))
    assert {caught.value.rank, *(other.rank for other in caught.value.others)} == {2, 3}
    pool.close()
    slow.set()
    assert call(starter, values) == [bytes(LARGE)] * 4, "with new agents"
    agents.release()


def test_a_rank_that_has_ended_has_not_failed_while_its_value_is_on_its_way(
    starter: Processes, slow: threading.Event
) -> None:
    pool = Pool(LaunchOptions(nprocs=2, on=starter))
    view = Watching(lambda: threading.Timer(1.0, slow.set).start())
    assert list(pool.run(FunctionJob(values), CommandOptions(view=view))) == [bytes(LARGE)] * 2
    assert view.states <= {"starting", "running", "done"}


@pytest.mark.parametrize("keep", [False, True])
def test_stop_does_not_wait_for_values(starter: Processes, slow: threading.Event, keep: bool) -> None:
    """And the next run gets its own."""
    there = {agent.pid for agent in starter.agents.values()}
    pool = Pool(LaunchOptions(nprocs=4, on=starter, keep=keep))
    with pytest.raises(KeyboardInterrupt):
        view = Watching(lambda: os.kill(os.getpid(), signal.SIGINT))
        pool.run(FunctionJob(values), CommandOptions(view=view))
    slow.set()
    again = pool if keep else Pool(LaunchOptions(nprocs=4, on=starter))
    own = list(again.run(FunctionJob(lambda rank: values(rank) + bytes([rank]))))
    assert own == [values(rank) + bytes([rank]) for rank in range(4)]
    again.close()
    assert {agent.pid for agent in starter.agents.values()} == there


@pytest.mark.parametrize("keep", [False, True])
def test_stop_does_not_wait_for_arguments(starter: Processes, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    there = {agent.pid for agent in starter.agents.values()}
    send, presses = Outgoing.send, [signal.SIGINT]

    def stuck(outgoing: Outgoing, bulk: socket.socket) -> None:
        if not outgoing._cut:
            if presses:
                os.kill(os.getpid(), presses.pop())
            raise BlockingIOError
        send(outgoing, bulk)

    pool = Pool(LaunchOptions(nprocs=4, on=starter, keep=keep))
    if keep:
        pool.start()
    with monkeypatch.context() as slow, pytest.raises(KeyboardInterrupt):
        slow.setattr(Outgoing, "send", stuck)
        pool.run(FunctionJob(lambda rank, array: array.sum(), (np.ones(LARGE),)))
    again = pool if keep else Pool(LaunchOptions(nprocs=4, on=starter))
    assert list(again.run(FunctionJob(lambda rank, array: array.sum(), (np.ones(LARGE),)))) == [LARGE] * 4
    again.close()
    assert {agent.pid for agent in starter.agents.values()} == there


@pytest.mark.extended
def test_a_start_takes_as_long_as_its_arguments(starter: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow line that is longer than a node has to answer."""
    monkeypatch.setattr(hosts, "_START_SECONDS", 3.0)
    sendfile, sent_at = os.sendfile, [0.0]

    def slow(*arguments: Any) -> int:
        if time.monotonic() < sent_at[0] + 0.08:
            raise BlockingIOError
        sent_at[0] = time.monotonic()
        return sendfile(*arguments)

    began = time.monotonic()
    with monkeypatch.context() as during:
        during.setattr(os, "sendfile", slow)
        assert call(starter, lambda rank, array: array.sum(), np.ones(LARGE), nprocs=2) == [LARGE] * 2
    assert time.monotonic() - began > 3.0


class Waiting(Processes):
    """There are no nodes as long as ``others`` has agents."""

    def __init__(self, others: Processes) -> None:
        super().__init__(1)
        self._others = others

    def prepare(self, waiting: Callable[[str], object]) -> None:
        while self._others.agents:
            waiting("Waiting for a node")


@pytest.mark.parametrize("released", [False, True])
def test_a_run_that_waits_for_nodes_gets_those_that_become_idle(workplace: str, released: bool) -> None:
    """By itself, or when the user gives them back: neither waits for the one that waits."""
    busy = Processes(1)
    first = agents.connected(busy)
    waiter = Waiting(busy)
    got: list[agents.Agents] = []
    thread = threading.Thread(target=lambda: got.append(agents.connected(waiter)))
    thread.start()
    assert agents.release() == 0, "all are in use"
    first.in_use = False
    if released:
        assert agents.release() in (0, 1)
    thread.join()
    assert not busy.agents and got[0].starter is waiter
    got[0].done()
    agents.release()
