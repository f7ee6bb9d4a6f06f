"""The kernel's end of the connections to one agent. Nothing here blocks: a node that is stuck costs only its own."""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nbspawn._engine.kernel import descriptors
from nbspawn._protocol import connection, shared_memory
from nbspawn._protocol.agents import ClockAsked, ClockTold, FromAgent, Hello, Transfer, Unwanted, WithBuffers
from nbspawn._protocol.messages import Event
from nbspawn._protocol.plain import NotPlainError, loaded
from nbspawn._protocol.transfers import Incoming, Outgoing

_CHUNK = 1 << 20


class Link:
    """``hello`` is the agent's first message, None until it has come. ``deliver`` gets each further one, a
    NotPlainError in place of one that cannot be read, and None when the connection has ended, for the reason
    ``lost``."""

    def __init__(self, node: int, control: socket.socket, bulk: socket.socket, life: socket.socket) -> None:
        self.node = node
        self.hello: Hello | None = None
        self.deliver: Callable[[Link, Any], None] = lambda link, message: None
        self.lost = ""
        self._control, self._bulk, self._life = control, bulk, life
        self._frames = connection.Frames()
        self._unsent = bytearray()
        self._outgoing: deque[Outgoing] = deque()
        self._transfers = 0
        self._incoming = Incoming(self._new_file)
        self._files: dict[int, int] = {}
        """Those that transfers fill, by their numbers."""
        self._complete: set[int] = set()
        self._announced: dict[int, tuple[WithBuffers, Any]] = {}
        """Messages whose buffers have not arrived, by the number of the transfer; and each without them."""
        self._unwanted = 0
        """Transfers up to this one are dropped."""
        self.undelivered: frozenset[int] = frozenset()
        """The ranks whose values were on their way when the connection ended."""
        self._selector: selectors.BaseSelector | None = None
        for end in (control, bulk, life):
            end.setblocking(False)
            descriptors.close_after_fork(end.fileno())

    @property
    def host(self) -> str:
        """The node's name."""
        return self.hello.host if self.hello is not None else f"node {self.node}"

    @property
    def address(self) -> str:
        """The address at which other nodes reach the node."""
        return self.hello.address if self.hello is not None else ""

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks of which a message has been announced whose buffers have not arrived."""
        announced = list(self._announced.values())  # another thread may receive meanwhile
        return frozenset(event.rank for _, event in announced if not isinstance(event, Exception))

    @property
    def left_to_send(self) -> int:
        """How many bytes wait to be sent to the agent."""
        return len(self._unsent) + sum(each.bytes_left for each in list(self._outgoing))

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Report to this selector from now on, whose keys' data are called."""
        self._selector = selector
        if not self.lost:
            selector.register(self._control, selectors.EVENT_READ, self._control_is_ready)
            selector.register(self._bulk, selectors.EVENT_READ, self._bulk_is_ready)
            selector.register(self._life, selectors.EVENT_READ, self.check)

    def unwatch(self) -> None:
        """Report to no selector; what comes meanwhile waits, except for transfers that have begun."""
        self.deliver = lambda link, message: None
        self.abandon("")
        if self._selector is not None and not self.lost:
            for end in (self._control, self._bulk, self._life):
                self._selector.unregister(end)
        self._selector = None

    # ------------------------------------------------------------ to the agent

    def send(self, message: object) -> None:
        """Queue a message; it leaves as soon as the agent can take it."""
        if not self.lost:
            self._unsent += connection.frame(pickle.dumps(message, protocol=5))
            self._control_is_ready(reads=False)

    def transfer(self, fds: Sequence[int], sizes: Sequence[int]) -> Transfer:
        """Queue the contents of these files, which may then be closed; returns what to announce."""
        self._transfers += 1
        if not self.lost:
            self._outgoing.append(Outgoing(self._transfers, fds, sum(shared_memory.places(sizes)[-1])))
            self._bulk_is_ready(reads=False)
        return Transfer(self._transfers, tuple(sizes))

    # ------------------------------------------------------------ sockets

    def _control_is_ready(self, reads: bool = True) -> None:
        try:
            with suppress(BlockingIOError):
                while self._unsent:
                    del self._unsent[: self._control.send(self._unsent)]
            self._want(self._control, bool(self._unsent), self._control_is_ready)
            with suppress(BlockingIOError):
                while reads and not self.lost:
                    if not (data := self._control.recv(_CHUNK)):
                        raise EOFError("its agent has ended")
                    for body in self._frames.feed(data):
                        self._received(body)
        except (OSError, EOFError) as error:
            self.lose(error)

    def _bulk_is_ready(self, reads: bool = True) -> None:
        try:
            with suppress(BlockingIOError):
                while self._outgoing:
                    self._outgoing[0].send(self._bulk)
                    self._outgoing.popleft()
            self._want(self._bulk, bool(self._outgoing), self._bulk_is_ready)
            with suppress(BlockingIOError):
                while reads and not self.lost:
                    if (ended := self._incoming.receive(self._bulk)) is not None:
                        self._arrived(*ended)
        except (OSError, EOFError) as error:
            self.lose(error)

    def check(self) -> None:
        """Notice the agent's end, if it is known; also while nobody watches."""
        try:
            with suppress(BlockingIOError):
                if not self.lost and not self._life.recv(1):
                    raise EOFError("its agent has ended")
        except (OSError, EOFError) as error:
            self.lose(error)

    def _want(self, end: socket.socket, write: bool, ready: Callable[[], None]) -> None:
        if self._selector is not None and not self.lost:
            self._selector.modify(end, selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0), ready)

    def _received(self, body: bytes) -> None:
        message = _read(FromAgent, body)
        if isinstance(message, WithBuffers):
            empty = [memoryview(b"")] * len(message.transfer.sizes)
            self._announced[message.transfer.number] = message, _read(Event, message.body, empty)
            if message.transfer.number in self._complete:  # bulk was faster than control
                self._arrived(message.transfer.number, complete=True)
        elif isinstance(message, ClockAsked):
            self.send(ClockTold(message.time, time.monotonic()))
        elif isinstance(message, Hello):
            self.hello = message
        else:
            self.deliver(self, message)

    def _new_file(self, number: int, total: int) -> Sequence[int]:
        self._files[number] = shared_memory.anonymous_file()
        return [self._files[number]]

    def _arrived(self, number: int, complete: bool) -> None:
        if complete and number > self._unwanted and number not in self._announced:
            self._complete.add(number)
            return
        self._complete.discard(number)
        announced, fd = self._announced.pop(number, None), self._files.pop(number)
        try:
            if announced is None:
                return
            message, _ = announced
            buffers = shared_memory.read([fd], message.transfer.sizes)
        finally:
            os.close(fd)
        self.deliver(self, _read(Event, message.body, buffers))

    def abandon(self, why: str) -> None:
        """Wait for no transfer any more, in either direction: values that were announced are delivered as lost, and
        ``why``."""
        for outgoing in self._outgoing:
            outgoing.cut_off()
        if self._announced:
            self._unwanted = max(self._announced)
            self.send(Unwanted(self._unwanted))
        while self._announced:
            message, event = self._announced.pop(min(self._announced))
            size = f"{sum(message.transfer.sizes) / 1e6:,.0f} MB"
            self.deliver(self, event if isinstance(event, Exception) else event.lost(f"its {size} {why}"))

    def lose(self, why: Exception | str) -> None:
        """The node is lost, for this reason."""
        if not self.lost:
            self.close(str(why) or type(why).__name__)
            self.deliver(self, None)

    def close(self, why: str = "it was closed") -> None:
        """Close the connections; the agent ends with them, and its ranks."""
        if self.lost:
            return
        self.lost = why
        self.undelivered = self.awaited
        self._announced.clear()
        for end in (self._control, self._bulk, self._life):
            if self._selector is not None:
                self._selector.unregister(end)
            descriptors.close(end.detach())
        while self._outgoing:
            self._outgoing.popleft().close()
        shared_memory.close(self._files.values())
        self._files.clear()


def _read(declared: Any, body: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    try:
        return loaded(declared, body, buffers)
    except NotPlainError as error:
        return error
