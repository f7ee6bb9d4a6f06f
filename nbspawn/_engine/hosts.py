"""Ranks on several machines: the local engines of their agents as one engine.

The nodes' ranks follow each other: those of node 0 first. What agents report has the run's numbers and the kernel's
clock already; what is asked of a node's engine, and what it answers, has the numbers of that engine.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from nbspawn._engine import inherited, stacks
from nbspawn._engine.agents import Agents
from nbspawn._engine.directories import run_directories
from nbspawn._engine.link import Link
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.waker import Waker
from nbspawn._payload.packing import Packed
from nbspawn._protocol import shared_memory
from nbspawn._protocol.agents import LOG_PART, Answer, Begin, Begun, Call, Refused, Reported, RunNext, Status, Transfer
from nbspawn._protocol.frames import Frame, Stack
from nbspawn._protocol.garbage import uncollected
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import UNHURRIED, Command, Event, Exited, Returned, RunCell, RunFunction
from nbspawn._protocol.payload import NOTHING, Shared
from nbspawn._protocol.place import Place, new_run_id
from nbspawn._protocol.settings import Settings
from nbspawn._results import Results
from nbspawn.errors import Failure, StartError

_ANSWER_SECONDS = 5.0  # a node that does not answer for so long is passed over; the operating system notices its end
_START_SECONDS = 60.0
_NAMED = 4  # nodes in one sentence
_TICK = 0.05
_MOST_PARTS = 1024  # of a log
_LOOK_AFTER = 1.0  # seconds
_GATHER = 0.05  # seconds for which events that are not urgent are gathered: of hundreds of nodes each has some
_numbers = itertools.count(1)  # of questions, over all runs: a late answer is not for the next run's


@dataclass
class _Node:
    link: Link
    first: int
    count: int
    status: Status
    begun: Begun | None = None
    refused: Refused | None = None

    @property
    def has_answered(self) -> bool:
        """Is known whether its ranks have been started?"""
        return bool(self.begun or self.refused or self.link.lost)

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


class HostRanks:
    """The ranks of one run (``Engine`` in base.py says what each method does)."""

    def __init__(
        self,
        agents: Agents,
        command: RunCell | RunFunction,
        packed: Packed,
        options: LaunchOptions,
        notebook: Settings,
        give_up: Callable[[], object] = bool,
    ) -> None:
        self.nprocs = int(options.nprocs)
        self._agents = agents
        self._events: list[Event] = []
        self._returned: dict[int, Returned] = {}
        self._answers: dict[tuple[int, int], Any] = {}
        self._ended: set[int] = set()
        self._lost: list[Failure] = []
        self._stopping = False
        self._closed = False
        self._copies: RunFiles | None = None
        self._look_at = 0.0
        self._urgent = False
        self._lock = threading.RLock()  # %ranks asks nodes while a background thread polls
        self._command = command
        self._grouped = options.backend is not None
        self._selector = selectors.DefaultSelector()
        inherited.close_after_fork(self._selector.fileno())
        self._waker = Waker(self._selector)
        self._nodes = self._placed(agents.links)
        with ExitStack() as undo:
            undo.callback(self.dispose)
            for node in self._nodes:
                node.link.deliver = self._received
                node.link.watch(self._selector)
            self._begin(packed, options, notebook, give_up)
            undo.pop_all()

    def _placed(self, links: Sequence[Link]) -> list[_Node]:
        share, more = divmod(self.nprocs, len(links))
        counts = [share + (number < more) for number in range(len(links))]
        firsts = itertools.accumulate(counts, initial=0)
        number = self._command.command_number
        nothing = Status(number, over=False, settled=False, complete=True, failures=())
        return [_Node(link, first, count, nothing) for link, first, count in zip(links, firsts, counts, strict=False)]

    def _begin(self, packed: Packed, options: LaunchOptions, notebook: Settings, give_up: Callable[[], object]) -> None:
        if self._agents.master is None:
            (answer,) = self._ask(self._nodes[:1], "serve_store")
            if answer is None:
                link = self._nodes[0].link
                why = self._agents.starter.failures().get(0) or link.lost or "it does not answer"
                raise StartError(f"the node {link.host} does not serve the ranks' store: {why}")
            self._agents.master = answer
        addresses = tuple(node.link.address for node in self._nodes)
        run_id = new_run_id()
        for number, node in enumerate(self._nodes):
            place = Place(node.first, node.count, self.nprocs, number, addresses, self._agents.master, run_id=run_id)
            own = replace(options, nprocs=node.count, on=None, nnodes=1)
            transfer = node.link.transfer(packed.fds, packed.sizes)
            node.link.send(Begin(place, own, notebook, replace(self._command, payload=NOTHING), transfer))
        self._wait(lambda: give_up() or all(node.has_answered for node in self._nodes), _START_SECONDS)
        if give_up():
            raise KeyboardInterrupt
        for node in self._nodes:
            if node.begun is None:
                why = node.refused.reason if node.refused else node.link.lost or "it does not answer"
                raise StartError(f"no ranks could be started on {node.link.host}: {why}")

    # ------------------------------------------------------------ what is known

    @property
    def cell(self) -> str | None:
        return self._command.filename if isinstance(self._command, RunCell) else None

    @property
    def log_dir(self) -> str:
        places = [f"{node.link.host}:{node.begun.log_dir}" for node in self._nodes if node.begun]
        more = len(places) - _NAMED
        return ", ".join(places[:_NAMED]) + (f" and on {more} more nodes" if more > 0 else "")

    @property
    def logs_exist(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        self.poll(0.0)
        return not self._ended and all(node.status.complete for node in self._nodes)

    @property
    def over(self) -> bool:
        return all(node.status.over and not node.link.waits_for_bulk for node in self._nodes)

    @property
    def settled(self) -> bool:
        number = self._command.command_number
        return all(
            node.status.over or (node.status.settled and node.status.command_number == number) for node in self._nodes
        ) and not any(node.link.waits_for_bulk for node in self._nodes)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def failures(self) -> list[Failure]:
        return [failure for node in self._nodes for failure in node.status.failures] + self._lost

    def host(self, rank: int) -> str:
        return self._node(rank).link.host

    def log_path(self, rank: int) -> str:
        node = self._node(rank)
        return f"{node.link.host}:{node.begun.log_paths[rank - node.first]}" if node.begun else ""

    def fetch_log(self, rank: int, end_only: bool = False) -> str:
        node = self._node(rank)
        start, size = (-LOG_PART if end_only else 0), LOG_PART
        parts: list[bytes] = []
        while size == LOG_PART and len(parts) < (1 if end_only else _MOST_PARTS):
            (part,) = self._ask([node], "log_part", rank - node.first, start)
            if part is None:
                return self.log_path(rank)
            parts.append(part)
            size, start = len(part), start + len(part)
        if self._copies is None:
            self._copies = run_directories.new(None, 0)
        copy = self._copies.log(rank)
        copy.write_bytes(b"".join(parts))
        return os.fspath(copy)

    def pids(self) -> list[int]:
        return [pid for node in self._nodes if node.begun for pid in node.begun.pids]

    def usage(self) -> list[Reading]:
        none = Reading(0.0, 0.0, 0, -1)
        answers = self._ask(self._nodes, "usage")
        return [
            reading for node, one in zip(self._nodes, answers, strict=True) for reading in one or [none] * node.count
        ]

    def losses(self) -> list[str]:
        found = []
        for node, answer in zip(self._nodes, self._ask(self._nodes, "losses"), strict=True):
            found += [f"On {node.link.host}: {loss}" for loss in answer or ()]
        return found

    # ------------------------------------------------------------ commands

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        self._command = next(iter(commands.values()))
        self._returned.clear()
        self._lost.clear()
        self._stopping = False
        payload = self._command.payload
        fds = shared_memory.opened(payload.paths) if isinstance(payload, Shared) else ()
        try:
            for node in self._nodes:
                own = {
                    rank - node.first: replace(commands[rank], payload=NOTHING)
                    for rank in node.ranks
                    if rank in commands
                }
                if own:
                    transfer: Transfer | None = None
                    if isinstance(payload, Shared) and fds:
                        transfer = node.link.transfer(fds, payload.sizes)
                    node.link.send(RunNext(own, transfer))
                else:
                    number = self._command.command_number
                    node.status = replace(node.status, command_number=number, failures=())
        finally:
            shared_memory.close(fds)

    def serve(self) -> None:
        """Node 0's agent serves the store at any time."""

    def send(self, rank: int, command: Command) -> None:
        node = self._node(rank)
        with self._lock:
            node.link.send(Call("send", (rank - node.first, command)))

    def regroup(self) -> bool:
        self._tell("regroup")
        return self._grouped

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        self._stopping = True
        self._tell("stop_at", interrupt, term, kill)

    def break_into(self, rank: int) -> None:
        node = self._node(rank)
        with self._lock:
            node.link.send(Call("break_into", (rank - node.first,)))

    def look(self, deep: bool) -> dict[int, Stack]:
        return self._merged(self._ask(self._nodes, "look", deep))

    def stacks(self, ending: str = "") -> list[str]:
        stood: dict[int, tuple[Frame, ...]] = self._merged(self._ask(self._nodes, "stood"))
        return stacks.sentences(stood, self.cell, ending)

    def results(self) -> Results[Any]:
        ranks = sorted(self._returned)
        return Results([self._returned[rank].value for rank in ranks], ranks)

    # ------------------------------------------------------------ watching

    def poll(self, timeout: float) -> list[Event]:
        if not self._closed:
            if time.monotonic() > self._look_at:
                self._look_at = time.monotonic() + _LOOK_AFTER
                self._agents.look_after()
            # An answer that was waited for may have come with events.
            self._urgent = bool(self._events)
            self._take(0.0 if self._urgent else timeout)
            until = time.monotonic() + _GATHER
            while self._events and not self._urgent and (left := until - time.monotonic()) > 0:
                self._urgent = not self._take(left)
        with self._lock:
            events, self._events = self._events, []
        return events

    def _take(self, timeout: float) -> bool:
        """Receive for so long, or what is there; returns whether events have come."""
        before = len(self._events)
        ready = self._selector.select(None if timeout == math.inf else max(0.0, timeout))
        with self._lock, uncollected():
            for key, _ in ready:
                key.data()
        return len(self._events) > before

    def wake(self) -> None:
        self._waker.wake()

    def _received(self, link: Link, message: Any) -> None:
        node = self._nodes[link.node]
        hurried = not isinstance(message, Reported) or message.status != node.status
        self._urgent = self._urgent or hurried or not all(isinstance(event, UNHURRIED) for event in message.events)
        if message is None:
            self._lose(node)
        elif isinstance(message, Reported):
            node.status = message.status
            for event in message.events:
                self._add(event)
        elif isinstance(message, Answer):
            self._answers[link.node, message.number] = message.value
        elif isinstance(message, Begun):
            node.begun = message
        elif isinstance(message, Refused):
            node.refused = message
        else:  # an event that came with large buffers
            self._add(message)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Exited):
            self._ended.add(event.rank)
        elif isinstance(event, Returned):
            self._returned[event.rank] = event

    def _lose(self, node: _Node) -> None:
        """The agent's connection has ended, and with it its ranks."""
        now, host = time.monotonic(), node.link.host
        for rank in node.ranks:
            if rank not in self._ended and not node.status.over:
                self._events.append(Exited(rank, now, None))
                self._ended.add(rank)
                pid = node.begun.pids[rank - node.first] if node.begun else 0
                what = f"its node {host} was lost ({node.link.lost})"
                number = node.link.node
                self._lost.append(
                    Failure(rank, pid, now, -9, what, node=number, host=host, log_path=self.log_path(rank))
                )
        node.status = replace(node.status, over=True, settled=True, complete=False)

    # ------------------------------------------------------------ asking nodes

    def _node(self, rank: int) -> _Node:
        return self._nodes[bisect.bisect(self._nodes, rank, key=lambda node: node.first) - 1]

    def _tell(self, method: str, *arguments: Any) -> None:
        with self._lock:
            for node in self._nodes:
                node.link.send(Call(method, arguments))

    def _ask(self, nodes: Sequence[_Node], method: str, *arguments: Any) -> list[Any]:
        """What the method returns on each of these nodes; None of one that does not answer."""
        number = next(_numbers)
        with self._lock:
            for node in nodes:
                node.link.send(Call(method, arguments, number))
        keys = {(node.link.node, number): node for node in nodes}
        self._wait(lambda: all(key in self._answers or node.link.lost for key, node in keys.items()), _ANSWER_SECONDS)
        return [self._answers.pop(key, None) for key in keys]

    def _wait(self, there: Callable[[], object], seconds: float) -> None:
        """Receive until that is so; events are kept for the next poll."""
        end = time.monotonic() + seconds
        while not there() and time.monotonic() < end:
            self._take(_TICK)

    def _merged(self, answers: Sequence[Mapping[int, Any] | None]) -> dict[int, Any]:
        return {
            rank + node.first: value
            for node, answer in zip(self._nodes, answers, strict=True)
            for rank, value in (answer or {}).items()
        }

    # ------------------------------------------------------------ the end

    def dismiss(self, seconds: float) -> None:
        self._ask(self._nodes, "dismiss", seconds)

    def dispose(self, keep_logs: bool = False) -> None:
        if self._closed:
            return
        disposed = self._ask(self._nodes, "dispose", keep_logs)
        self._closed = True
        for node, ended in zip(self._nodes, disposed, strict=True):
            if not ended:  # what its ranks still do and say is not for the next run
                node.link.close("it did not end its ranks")
            node.status = replace(node.status, over=True, settled=True)
            node.link.unwatch()
        if self._copies is not None:
            run_directories.done(self._copies, keep=True)
        self._waker.close()
        inherited.unmark(self._selector.fileno())
        self._selector.close()
        self._agents.done()
