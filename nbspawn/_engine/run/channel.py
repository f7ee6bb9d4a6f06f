"""The kernel's ends of all channels: one listening unix socket a run, one non-blocking connection a rank.

A rank whose own code has closed every descriptor (``os.closerange``, as daemons do) connects again.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from nbspawn._engine.kernel import descriptors
from nbspawn._protocol.messages import Command, Dropped, Event, RankEvent
from nbspawn._protocol.plain import NotPlainError
from nbspawn._protocol.wire import Decoder, encode_command, load_event

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_AT_ONCE = 4  # descriptors; a message has one at most, and the system ends a read at the bytes that the next came with
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Hub:
    """Accepts ranks and passes on their messages. Nothing here ever blocks: a rank that is stopped in the middle of a
    frame costs nothing but its own messages."""

    def __init__(self, path: Path, nprocs: int, selector: selectors.BaseSelector) -> None:
        self.on_message: Callable[[Event, int], None] | None = None
        """Called with every message, and the number of the command that it belongs to."""
        self._nprocs = nprocs
        self._selector = selector
        self._connections: dict[int, _Connection] = {}
        self._unidentified: list[_Connection] = []
        self._accepted = 0
        self._waiting: dict[int, list[bytes]] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(path))
        self._listener.listen(nprocs)
        descriptors.close_after_fork(self._listener.fileno())
        self._listening = False
        self._listen(True)

    def send(self, rank: int, command: Command) -> None:
        """Queue a command; it leaves as soon as the rank can take it."""
        self.send_all({rank: command})

    def send_all(self, commands: Mapping[int, Command]) -> None:
        """Send each of these ranks its command; often all get the same one."""
        frames = {id(command): encode_command(command) for command in commands.values()}
        for rank, command in commands.items():
            if rank in self._connections and self._connections[rank].open:
                self._connections[rank].write(frames[id(command)])
            else:
                self._waiting.setdefault(rank, []).append(frames[id(command)])

    def drain(self) -> None:
        """Receive all that has been sent by now, also by ranks that still wait to be accepted."""
        self._listen(True)
        self._accept()
        for connection in [*self._unidentified, *self._connections.values()]:
            connection.read()

    def close(self) -> None:
        """Close every socket; what a rank sends later is lost."""
        for connection in [*self._unidentified, *self._connections.values()]:
            connection.close()
        self._listen(False)
        descriptors.close(self._listener.detach())

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listening and not wanted:
            self._selector.unregister(self._listener)
        self._listening = wanted

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # This process has no descriptor left: the system says so whether or not somebody wants to connect.
                # The next poll tries again; the selector would report it without end.
                self._listen(False)
                return
            self._accepted += 1
            self._unidentified.append(_Connection(self._accepted, accepted, self._selector, self._received))

    def _received(self, connection: _Connection, message: RankEvent | NotPlainError, command_number: int) -> None:
        event: Event | None = self._checked(connection, message)
        if event is None:
            return
        if connection.rank is None:  # the first message identifies the rank
            connection.rank = event.rank
            self._unidentified.remove(connection)
            known = self._connections.get(event.rank)
            if known is None or known.number < connection.number:
                self._connections[event.rank] = connection
                # If the rank has connected again, what it had sent before comes first: on the connection that it had,
                # of which may be known neither that it has ended nor whose it was.
                for other in [*self._unidentified, *filter(None, [known])]:
                    if other.number < connection.number:
                        other.read()
                for frame in self._waiting.pop(event.rank, []):
                    connection.write(frame)
        if self.on_message is not None:
            self.on_message(event, command_number)

    def _checked(self, connection: _Connection, message: RankEvent | NotPlainError) -> Event | None:
        """The message if it is one of this rank; else that it is dropped, if the rank is known."""
        if isinstance(message, NotPlainError):
            why = str(message)
        elif message.rank in (connection.rank, *(range(self._nprocs) if connection.rank is None else ())):
            return message
        else:
            why = f"it is of rank {message.rank}"
        _log.error("rank %s: a message is dropped: %s", connection.rank, why)
        return None if connection.rank is None else Dropped(connection.rank, why)


class _Connection:
    def __init__(
        self,
        number: int,
        accepted: socket.socket,
        selector: selectors.BaseSelector,
        received: Callable[[_Connection, RankEvent | NotPlainError, int], None],
    ):
        self.number = number
        """Counted in the order in which they were made."""
        self.rank: int | None = None
        self._socket = accepted
        self._selector = selector
        self._received = received
        self._decoder = Decoder(load_event)
        self._unsent = bytearray()
        self.open = True
        accepted.setblocking(False)
        descriptors.close_after_fork(accepted.fileno())
        self._wanted = selectors.EVENT_READ
        selector.register(accepted, self._wanted, self._ready)

    def _ready(self) -> None:
        self._flush()
        self.read()

    def read(self) -> None:
        while self.open:
            try:
                data, attached, flags, _ = socket.recv_fds(self._socket, _CHUNK, _AT_ONCE, _CLOSED_ON_EXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, attached, flags = b"", [], 0
            self._decoder.attached.extend(attached)
            if flags & socket.MSG_CTRUNC and not attached:  # the system had no number for it
                self._decoder.attached.append(None)
            if not data:
                self.close()
                return
            for command_number, event in self._decoder.feed(data):
                self._received(self, event, command_number)

    def write(self, frame: bytes) -> None:
        self._unsent += frame
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and self.open:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # the rank has ended; its exit code says how
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self.open and wanted != self._wanted:
            self._wanted = wanted
            self._selector.modify(self._socket, wanted, self._ready)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._decoder.close()
            self._selector.unregister(self._socket)
            descriptors.close(self._socket.detach())
