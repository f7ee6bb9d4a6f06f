"""The rank's end of its channel to the kernel: blocking, thread-safe, never interrupted in the middle of a frame."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbspawn._protocol.messages import Command, Event, InputReply, InputRequest, Inspect, Inspected
from nbspawn._protocol.wire import Decoder, encode

_CHUNK = 1 << 16


class Channel:
    """Connects to the kernel's socket at ``path``; raises OSError if no kernel listens there any more."""

    def __init__(self, path: Path, command_number: int = 1) -> None:
        self.command_number = command_number
        """The number of the current command, sent with every event."""
        self._path = os.fspath(path)
        self._connect()
        # Reentrant: the user's own signal handler may display something while the same thread sends.
        self._send_lock = threading.RLock()
        self._ask_lock = threading.Lock()
        # In a process that is forked while another thread sends, the lock would be held for ever.
        os.register_at_fork(
            before=self._send_lock.acquire,
            after_in_parent=self._send_lock.release,
            after_in_child=self._send_lock.release,
        )
        # Of the main thread: signal handlers run in it, and must not interrupt what it has begun here.
        self.sending = 0
        self.asking = False
        self.on_answered: list[Callable[[], None]] = []
        self.on_sent: list[Any] = []
        self.on_failure: list[Callable[[], None]] = []
        """What features still have to send when the rank has failed: their context managers are then not exited."""

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(self._path)
        self._inode = os.fstat(self._socket.fileno()).st_ino
        self._decoder = Decoder()
        self._commands: deque[Command] = deque()

    def _check(self) -> None:
        """Connect again if the user's code has closed every descriptor. It may have opened something else with this
        number, which is left alone."""
        with contextlib.suppress(OSError):
            if os.fstat(self._socket.fileno()).st_ino == self._inode:
                return
        self._socket.detach()
        with contextlib.suppress(OSError):  # no kernel any more
            self._connect()

    @contextmanager
    def _whole_frame(self) -> Iterator[None]:
        """Defers interrupts (_rank/process.py): a partial frame would corrupt everything after it."""
        main = threading.current_thread() is threading.main_thread()
        with self._send_lock:
            self.sending += main
            try:
                self._check()
                yield
            finally:
                self.sending -= main
        while main and self.on_sent and not self.sending:
            self.on_sent.pop()()

    def send(self, event: Event) -> None:
        """Send one event. A dead kernel is not an error: the lifeline ends this process anyway."""
        attached: list[int] = []
        frame = encode(event, attached, self.command_number)
        with self._whole_frame():
            try:
                sent = socket.send_fds(self._socket, [frame], attached) if attached else 0
                self._socket.sendall(frame[sent:])
            except OSError:
                pass
            finally:
                for fd in attached:
                    os.close(fd)

    def try_send(self, event: Event) -> bool:
        """Send an event that may be late or dropped, from a thread of its own. False if another thread is sending, or
        the kernel has not read for a while: important events must not wait for this one."""
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            self._check()
            (unread,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
            if unread > _CHUNK:
                return False
            self._socket.sendall(encode(event, command_number=self.command_number))
            return True
        except OSError:
            return False
        finally:
            self._send_lock.release()

    def receive(self) -> Command:
        """Wait for the next command. Raises EOFError when the kernel has closed the channel."""
        while not self._commands:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise EOFError("the kernel has closed the channel")
            self._commands.extend(command for _, command in self._decoder.feed(data))
        return self._commands.popleft()

    def ask(self, request: InputRequest | Inspected) -> InputReply | Inspect:
        """Send a request and wait for the reply, or for a question that comes before it and is to be answered by a call
        of this; one thread of the rank at a time."""
        with self._ask_lock:
            main = threading.current_thread() is threading.main_thread()
            self.asking = main
            try:
                self.send(request)
                reply = self.receive()
            finally:
                self.asking = False
        while main and self.on_answered:
            self.on_answered.pop()()
        assert isinstance(reply, (InputReply, Inspect))
        return reply

    def close(self) -> None:
        """Close the socket; the kernel still reads what was sent before."""
        self._socket.close()
