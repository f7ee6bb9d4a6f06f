"""This node's ends of the connections to the kernel: threads read and write them, while ranks are watched."""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbspawn._agent.clock import Clock
from nbspawn._protocol import connection, shared_memory
from nbspawn._protocol.agents import Begin, ClockTold, FromAgent, RunNext, Transfer, Unwanted, WithBuffers
from nbspawn._protocol.messages import Event, Inspected, Returned
from nbspawn._protocol.transfers import Incoming, Outgoing
from nbspawn._protocol.wire import pickled

_LARGE = 256 * 1024  # bytes: a larger buffer does not go over control


class Received:
    """What came over bulk, or still comes; to ``launch.start`` it is what a ``Packed`` is in the kernel."""

    spawn_arguments: tuple[Any, ...] = ()

    def __init__(self, transfer: Transfer) -> None:
        self.sizes = transfer.sizes
        self.total = sum(shared_memory.places(transfer.sizes)[-1])
        self.fds = shared_memory.empty_files(self.total)
        self._over = threading.Event()
        self._complete = False

    def fill(self, cancelled: Callable[[], object] = lambda: False) -> None:
        """Wait until it is there; the connection's thread writes it. Raises OSError if it does not come."""
        while not self._over.wait(0.05) and not cancelled():
            pass
        if not (self._complete or cancelled()):
            raise OSError("the kernel has not sent all of what they need")

    def end(self, complete: bool) -> None:
        """No more comes: ranks that wait go on, or fail to read what is not there."""
        self._complete = complete
        shared_memory.unlock(self.fds)
        self._over.set()

    def close(self) -> None:
        """Close the files, once the connection's thread writes to them no more."""
        self._over.wait()
        shared_memory.close(self.fds)
        self.fds = ()


class Connections:
    """``wake`` is called, in a thread, when a message of the kernel has come."""

    def __init__(self, control: socket.socket, bulk: socket.socket, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.clock = Clock()
        self._control, self._bulk = control, bulk
        self._inbox: queue.SimpleQueue[tuple[Any, Received | None]] = queue.SimpleQueue()
        self._large: queue.SimpleQueue[tuple[Transfer, list[memoryview]]] = queue.SimpleQueue()
        self._expected: dict[int, Received] = {}
        self._bulk_lost = threading.Event()
        self._writing: Outgoing | None = None
        self._unwanted = 0
        self._changed = threading.Condition()  # of what is expected
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()  # over control

    def start(self) -> None:
        """Read and write from now on."""
        for work in (self._read_control, self._read_bulk, self._write_bulk):
            threading.Thread(target=work, name=f"nbspawn-{work.__name__}", daemon=True).start()
        self.ask_for_the_time()

    @property
    def waiting(self) -> bool:
        """Has a message come that was not taken?"""
        return not self._inbox.empty()

    def next(self, block: bool) -> tuple[Any, Received | None] | None:
        """The kernel's next message, with what comes over bulk for it; an exception is the end of a connection. None
        if there is none."""
        try:
            return self._inbox.get(block=block)
        except queue.Empty:
            return None

    def send(self, message: FromAgent) -> None:
        """Send a message; waits while the kernel does not read."""
        frame = connection.frame(pickled(FromAgent, message))
        with self._sending:
            self._control.sendall(frame)

    def send_large(self, message: WithBuffers, buffers: list[memoryview]) -> None:
        """Send a message, and its buffers over bulk, beside what else happens."""
        self.send(message)
        self._large.put((message.transfer, buffers))

    def with_buffers(self, event: Event) -> tuple[WithBuffers, list[memoryview]] | None:
        """A value with large buffers, taken apart for ``send_large``; None for any other event."""
        if not isinstance(event, (Returned, Inspected)):
            return None
        buffers: list[memoryview] = []
        body = pickled(Event, event, _LARGE, buffers)
        if not buffers:
            return None
        transfer = Transfer(next(self._numbers), tuple(buffer.nbytes for buffer in buffers))
        return WithBuffers(transfer, body), buffers

    def ask_for_the_time(self) -> None:
        """Ask the kernel for the time, if that is due."""
        if (question := self.clock.question()) is not None:
            self.send(question)

    def _read_control(self) -> None:
        try:
            while True:
                message, received = pickle.loads(connection.receive(self._control)), None
                if isinstance(message, ClockTold):
                    self.clock.learn(message)
                    self.ask_for_the_time()
                    continue
                if isinstance(message, Unwanted):
                    self._forget(message.number)
                    continue
                if isinstance(message, (Begin, RunNext)) and message.transfer is not None:
                    received = Received(message.transfer)
                    with self._changed:
                        self._expected[message.transfer.number] = received
                        self._changed.notify_all()
                    if self._bulk_lost.is_set():
                        received.end(complete=False)
                self._put(message, received)
        except (OSError, EOFError) as lost:
            self._put(lost)
            self.clock.known.set()  # nobody must wait for it

    def _put(self, message: Any, received: Received | None = None) -> None:
        self._inbox.put((message, received))
        self.wake()

    def _read_bulk(self) -> None:
        incoming = Incoming(self._files_for)
        try:
            while True:
                if (ended := incoming.receive(self._bulk)) is not None:
                    number, complete = ended
                    self._expected.pop(number).end(complete)
        except (OSError, EOFError) as lost:
            self._bulk_lost.set()
            for received in list(self._expected.values()):  # nobody must wait for the rest
                received.end(complete=False)
            self._put(lost)

    def _files_for(self, number: int, total: int) -> Sequence[int]:
        with self._changed:
            self._changed.wait_for(partial(self._expected.__contains__, number))
        return self._expected[number].fds

    def _write_bulk(self) -> None:
        try:
            while True:
                transfer, buffers = self._large.get()
                if transfer.number <= self._unwanted:
                    continue
                fd = shared_memory.write(buffers)
                try:
                    self._writing = Outgoing(transfer.number, [fd], os.fstat(fd).st_size)
                finally:
                    os.close(fd)
                if transfer.number <= self._unwanted:  # meanwhile
                    self._writing.cut_off()
                self._writing.send(self._bulk)
        except OSError as lost:
            self._put(lost)

    def _forget(self, number: int) -> None:
        """Send no more of the transfers up to this one."""
        self._unwanted = number
        if (writing := self._writing) is not None and writing.number <= number:
            writing.cut_off()
