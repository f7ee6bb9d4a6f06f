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
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbspawn._protocol.messages import (
    Close,
    InputReply,
    InputRequest,
    Inspect,
    Inspected,
    RankEvent,
    Regroup,
    RunCell,
    RunFunction,
)
from nbspawn._protocol.plain import NotPlainError
from nbspawn._protocol.wire import Decoder, encode_event

_CHUNK = 1 << 16


class Channel:
    """Connects to the kernel's socket at ``path``; raises OSError if no kernel listens there any more."""

    def __init__(self, path: Path, command_number: int = 1) -> None:
        self.command_number = command_number
        """The number of the current command, sent with every event."""
        self._running = True
        self._path = os.fspath(path)
        self._pid = os.getpid()
        self._commands: deque[RunFunction | RunCell | Regroup | Close] = deque()
        self._replies: deque[InputReply | Inspect] = deque()
        self._connect()
        # Reentrant: the user's own signal handler may display something while the same thread sends.
        self._send_lock = threading.RLock()
        self._ask_lock = threading.Lock()
        self._question = 0
        self._arrived = threading.Condition()
        self._reader: int | None = None
        """The thread that reads, for all: one waits for a command, another one perhaps for a reply."""
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

    @property
    def own(self) -> bool:
        """Is this the rank's process? One that the user's code has forked does not speak for the rank."""
        return os.getpid() == self._pid

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
        """Defers interrupts (_rank/program/process.py): a partial frame would corrupt everything after it."""
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

    def send(self, event: RankEvent) -> None:
        """Send one event; nothing in a process that the rank has forked. A dead kernel is not an error: the lifeline
        ends this process anyway. Raises NotPlainError."""
        if not self.own:
            return
        attached: list[int] = []
        frame = encode_event(event, self.command_number, attached)
        with self._whole_frame():
            try:
                sent = socket.send_fds(self._socket, [frame], attached) if attached else 0
                self._socket.sendall(frame[sent:])
            except OSError:
                pass
            finally:
                for fd in attached:
                    os.close(fd)

    def try_send(self, event: RankEvent) -> bool:
        """Send an event that may be late or dropped, from a thread of its own. False if another thread is sending, or
        the kernel has not read for a while: important events must not wait for this one."""
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            self._check()
            (unread,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
            if unread > _CHUNK:
                return False
            self._socket.sendall(encode_event(event, self.command_number))
            return True
        except (OSError, NotPlainError):
            return False
        finally:
            self._send_lock.release()

    def begin(self, command_number: int) -> None:
        """A further command of a kept rank runs now."""
        with self._arrived:
            self.command_number = command_number
            self._running = True

    def end(self) -> None:
        """The command has ended: a thread that it has left and that asks gets no answer, now or later."""
        with self._arrived:
            self._running = False
            if self._ask_lock.locked():
                self._replies.append(self._refusal())
                self._arrived.notify_all()

    def _refusal(self) -> InputReply:
        reason = "the cell that has started this thread has ended: nobody can answer"
        return InputReply("refused", reason, self._question)

    def receive(self) -> RunFunction | RunCell | Regroup | Close:
        """Wait for the next command. Raises EOFError when the kernel has closed the channel."""
        return self._take(self._commands)  # type: ignore[no-any-return]

    def ask(self, request: InputRequest | Inspected) -> InputReply | Inspect:
        """Send a request and wait for the reply, or for a question that comes before it and is to be answered by a call
        of this; one thread of the rank at a time. Raises EOFError as ``receive``, and in a process that the rank has
        forked."""
        if not self.own:
            raise EOFError("only the rank itself can ask the user, not a process that it has forked")
        with self._ask_lock:
            if isinstance(request, InputRequest):
                with self._arrived:
                    if not self._running:
                        return self._refusal()
                    self._question += 1
                request = replace(request, number=self._question)
            main = threading.current_thread() is threading.main_thread()
            self.asking = main
            try:
                self.send(request)
                reply = self._take(self._replies)
                while isinstance(reply, InputReply) and reply.number != self._question:
                    reply = self._take(self._replies)  # that one is for a question that somebody has stopped
            finally:
                self.asking = False
        while main and self.on_answered:
            self.on_answered.pop()()
        return reply  # type: ignore[no-any-return]

    def _take(self, wanted: deque[Any]) -> Any:
        """The next of these messages, whoever reads it: this thread, or one that waits for others and reads already."""
        this = threading.get_ident()
        while True:
            try:
                with self._arrived:
                    if wanted:
                        return wanted.popleft()
                    if self._reader is not None:
                        self._arrived.wait()
                        continue
                    self._reader = this
                self._read()
            finally:  # also if an interrupt is raised here
                if self._reader == this:
                    with self._arrived:
                        self._reader = None
                        self._arrived.notify_all()

    def _read(self) -> None:
        data = self._socket.recv(_CHUNK)
        if not data:
            raise EOFError("the kernel has closed the channel")
        for _, message in self._decoder.feed(data):
            (self._replies if isinstance(message, (InputReply, Inspect)) else self._commands).append(message)

    def close(self) -> None:
        """Close the socket; the kernel still reads what was sent before."""
        self._socket.close()
