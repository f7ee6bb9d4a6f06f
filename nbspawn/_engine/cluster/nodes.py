"""The nodes of one run: what their agents report is gathered here, and they are asked."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbspawn._engine.cluster.agents import Agents
from nbspawn._engine.cluster.link import Link
from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.waker import Waker
from nbspawn._process.garbage import uncollected
from nbspawn._protocol.agents import CALLS, Answer, Begun, Call, Refused, Reported, Status
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.messages import UNHURRIED, Dropped, Event, Exited, Returned
from nbspawn._protocol.plain import NotPlainError, loaded

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # a node that does not answer for so long is passed over; the operating system notices its end
_SOON = ("ask", "stood", "usage", "losses")
"""What an agent answers at once, and may be asked before ranks are stopped."""
SOON_SECONDS = 1.5  # to answer that
_TICK = 0.05
_LOOK_AFTER = 1.0  # seconds
_GATHER = 0.05  # seconds for which events that are not urgent are gathered: of hundreds of nodes each has some
_numbers = itertools.count(1)  # of questions, over all runs: a late answer is not for the next run's


@dataclass
class Node:
    """``count`` ranks from ``first`` on, and what is known of them."""

    link: Link
    first: int
    count: int
    status: Status
    begun: Begun | None = None
    refused: Refused | None = None
    held: dict[int, Exited] = field(default_factory=dict)
    """The ends of ranks whose values are on their way: these come first."""
    silent: bool = False
    """Has it not answered, and said nothing since? It is waited for no more, except for its ranks' end."""

    @property
    def has_answered(self) -> bool:
        """Is known whether its ranks have been started?"""
        return bool(self.begun or self.refused or self.link.lost)

    @property
    def ranks(self) -> range:
        """The run's numbers of the ranks on this node."""
        return range(self.first, self.first + self.count)

    @property
    def log_paths(self) -> list[str]:
        """The paths of the logs on this node, each after the node's name."""
        return [f"{self.link.host}:{path}" for path in self.begun.log_paths] if self.begun else [""] * self.count


class Nodes:
    """The ranks follow each other: those of node 0 first. Nodes may be asked by one thread while another one polls."""

    def __init__(self, agents: Agents, nprocs: int, command_number: int) -> None:
        self.returned: dict[int, Returned] = {}
        """By rank, of the last command."""
        self.ended: set[int] = set()
        """The ranks that have."""
        self.lost: list[Failure] = []
        """Those of ranks whose node was lost during the last command."""
        self._agents = agents
        self._events: list[Event] = []
        self._answers: dict[tuple[int, int], Answer | None] = {}
        """Those that are waited for, by node and number; what comes later is dropped."""
        self._look_at = 0.0
        self._urgent = False
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        descriptors.close_after_fork(self._selector.fileno())
        self._waker = Waker(self._selector)
        share, more = divmod(nprocs, len(agents.links))
        counts = [share + (number < more) for number in range(len(agents.links))]
        nothing = Status(command_number, all_exited=False, finished=False, all_alive=True, failures=())
        firsts = itertools.accumulate(counts, initial=0)
        self._nodes = [Node(*each, nothing) for each in zip(agents.links, firsts, counts, strict=False)]
        for node in self._nodes:
            node.link.deliver = self._received
            node.link.watch(self._selector)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def of(self, rank: int) -> Node:
        """The node that the rank is on."""
        return self._nodes[bisect.bisect(self._nodes, rank, key=lambda node: node.first) - 1]

    # ------------------------------------------------------------ watching

    def poll(self, timeout: float) -> list[Event]:
        """New events, after at most ``timeout`` seconds."""
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _LOOK_AFTER
            with self._lock:
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

    def abandon(self, why: str) -> None:
        """Wait no longer for values that are on their way."""
        with self._lock:
            for node in self._nodes:
                node.link.abandon(why)

    def lose(self, nodes: Sequence[Node], why: str) -> None:
        """Take these for lost, and their ranks."""
        with self._lock:
            for node in nodes:
                node.link.lose(why)

    def wake(self) -> None:
        """Have a waiting ``poll`` return."""
        self._waker.wake()

    def wait(self, there: Callable[[], object], seconds: float) -> None:
        """Receive until that is so, or for so long after the last bytes of what is sent to the nodes have left; events
        are kept for the next poll."""
        left, end = 0, 0.0
        while not there():
            before, left = left, sum(node.link.left_to_send for node in self._nodes)
            if left != before or not end:
                end = time.monotonic() + seconds
            if time.monotonic() > end:
                return
            self._take(_TICK)

    def _take(self, timeout: float) -> bool:
        """Receive for so long, or what is there; returns whether events have come."""
        before = len(self._events)
        ready = self._selector.select(None if timeout == math.inf else max(0.0, timeout))
        with self._lock, uncollected():
            for key, _ in ready:
                key.data()
        return len(self._events) > before

    def _received(self, link: Link, message: Any) -> None:
        node = self._nodes[link.node]
        node.silent = False
        if isinstance(message, Exception):
            message = Dropped(node.first, f"its agent's on {link.host}: {message}")
        hurried = not isinstance(message, Reported) or message.status != node.status
        self._urgent = self._urgent or hurried or not all(isinstance(event, UNHURRIED) for event in message.events)
        if message is None:
            self._lose(node)
        elif isinstance(message, Reported):
            node.status = message.status
            for event in message.events:
                self._add(node, event)
        elif isinstance(message, Answer):
            if (link.node, message.number) in self._answers:
                self._answers[link.node, message.number] = message
        elif isinstance(message, Begun):
            node.begun = message
        elif isinstance(message, Refused):
            node.refused = message
        else:  # an event that came with large buffers
            self._add(node, message)
            for rank in node.held.keys() - node.link.awaited:
                self._add(node, node.held.pop(rank))

    def _add(self, node: Node, event: Event) -> None:
        if event.rank not in node.ranks:
            event = Dropped(node.first, f"it is of rank {event.rank}, which is not on {node.link.host}")
        elif isinstance(event, Exited) and event.rank in node.link.awaited:
            node.held[event.rank] = event
            return
        self._events.append(event)
        if isinstance(event, Exited):
            self.ended.add(event.rank)
        elif isinstance(event, Returned):
            self.returned[event.rank] = event

    def _lose(self, node: Node) -> None:
        """The agent's connection has ended, and with it its ranks."""
        now = time.monotonic()
        pids = node.begun.pids if node.begun else [0] * node.count
        why = self._agents.why(node.link)
        of_node = Failure(0, now, code=-9, node=node.link.node, host=node.link.host, node_lost=why)
        for rank, pid, path in zip(node.ranks, pids, node.log_paths, strict=True):
            if rank in node.link.undelivered or (rank not in self.ended and not node.status.all_exited):
                self._add(node, Exited(rank, now, None))
                self.lost.append(replace(of_node, rank=rank, pid=pid, log_path=path))
        node.status = replace(node.status, all_exited=True, finished=True, all_alive=False)

    # ------------------------------------------------------------ asking

    def send(self, node: Node, message: object) -> None:
        """Send a message to this node's agent."""
        with self._lock:
            node.link.send(message)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the method on each node."""
        for node in self._nodes:
            self.send(node, Call(method, arguments))

    def ask(self, method: str, *arguments: Any, only: Node | None = None) -> list[Any]:
        """What the method returns on each node, or on this one; None of one that does not answer."""
        seconds = SOON_SECONDS if method in _SOON else ANSWER_SECONDS
        return self.ask_each(method, lambda _: arguments, self._nodes if only is None else [only], seconds)

    def ask_each(
        self,
        method: str,
        arguments: Callable[[Node], tuple[Any, ...]],
        nodes: Sequence[Node] | None = None,
        seconds: float = ANSWER_SECONDS,
        cancelled: Callable[[], object] = bool,
    ) -> list[Any]:
        """Call this method of each node's engine as ``ask`` does, with ``arguments`` of its own. Answers are waited for
        so many ``seconds`` after the last of these have left, or until that is ``cancelled``."""
        number = next(_numbers)
        keys = {(node.link.node, number): node for node in (self._nodes if nodes is None else nodes)}
        self._answers.update(dict.fromkeys(keys))
        for node in keys.values():
            self.send(node, Call(method, arguments(node), number))

        def missing() -> list[Node]:
            return [node for key, node in keys.items() if not (self._answers[key] or node.link.lost)]

        self.wait(lambda: cancelled() or all(node.silent and method != "dispose" for node in missing()), seconds)
        for node in missing():
            node.silent = True
        return [self._answer(method, node, self._answers.pop(key, None)) for key, node in keys.items()]

    def _answer(self, method: str, node: Node, answer: Answer | None) -> Any:
        """The answer of a node; None for one that cannot be read."""
        if answer is None:
            return None
        try:
            return loaded(CALLS[method], answer.value)
        except NotPlainError as error:
            _log.error("%s: its answer to %s cannot be read: %s", node.link.host, method, error)
            return None

    def by_rank(self, answers: Sequence[Mapping[int, Any] | None]) -> dict[int, Any]:
        """What each node has answered about some of its ranks, with the run's numbers."""
        return {
            rank + node.first: value
            for node, answer in zip(self._nodes, answers, strict=True)
            for rank, value in (answer or {}).items()
        }

    def close(self) -> None:
        """Watch them no more."""
        for node in self._nodes:
            node.link.unwatch()
        self._waker.close()
        descriptors.unmark(self._selector.fileno())
        self._selector.close()
