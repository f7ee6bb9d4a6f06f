"""Large buffers on their way over a *bulk* connection (agents.py): what sends and what receives them.

A transfer is its number and its size, then its bytes in pieces, each after its length. A piece of no bytes cuts the
transfer off: whoever has lost interest in it need not wait until a slow line has carried the rest.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from nbspawn._protocol import shared_memory

_TRANSFER = struct.Struct("!QQ")
_PIECE = struct.Struct("!I")
_PIECE_BYTES = 1 << 18  # at most: a fifth of a second at 10 Mbit/s
_CHUNK = 1 << 20  # bytes per read
_MORE = getattr(socket, "MSG_MORE", 0)  # the bytes of a piece follow its length in one packet


class Outgoing:
    """The first ``total`` bytes of these files as transfer ``number``; the files may then be closed."""

    def __init__(self, number: int, fds: Sequence[int], total: int) -> None:
        self.number = number
        self.bytes_left = total
        self._files = deque((os.dup(fd), part) for fd, part in shared_memory.contents(fds, total))
        self._head = _TRANSFER.pack(number, total)
        self._position = 0  # in the first file
        self._piece = 0  # bytes that are left of it
        self._cut = False

    def send(self, bulk: socket.socket) -> None:
        """Send the rest. Raises BlockingIOError where the connection would block, and OSError."""
        while True:
            while self._head:
                self._head = self._head[bulk.send(self._head, _MORE if self._files else 0) :]
            while self._piece:
                # Behind the end of a file, which empty buffers do not write, are zeros.
                sent = os.sendfile(bulk.fileno(), self._files[0][0], self._position, self._piece) or bulk.send(
                    bytes(self._piece)
                )
                self._position += sent
                self._piece -= sent
                self.bytes_left -= sent
            if self._files and self._position == self._files[0][1]:
                os.close(self._files.popleft()[0])
                self._position = 0
            if not self._files:
                return
            if self._cut:
                self.close()
            else:
                self._piece = min(_PIECE_BYTES, self._files[0][1] - self._position)
            self._head = _PIECE.pack(self._piece)

    def cut_off(self) -> None:
        """Send no more than the current piece. Any thread may call this."""
        self._cut = True

    def close(self) -> None:
        """Close the files that are not sent."""
        shared_memory.close(fd for fd, _ in self._files)
        self._files.clear()


class Incoming:
    """Transfers on their way here, one after the other. ``files`` is called with the number and the size of each, and
    returns the descriptors of the files to fill."""

    def __init__(self, files: Callable[[int, int], Sequence[int]]) -> None:
        self._file_for = files
        self._files: deque[tuple[int, int]] = deque()
        self._head = bytearray()
        self._number = 0
        self._position = 0  # in the first file
        self._piece = 0  # bytes that are left of it

    def receive(self, bulk: socket.socket) -> tuple[int, bool] | None:
        """Take what is there; returns the number of a transfer that has ended, and whether it is complete. Raises
        BlockingIOError where the connection would block, EOFError at its end, and OSError."""
        if self._piece:
            fd, part = self._files[0]
            data = memoryview(_received(bulk, min(_CHUNK, self._piece, part - self._position)))
            self._piece -= len(data)
            while data:
                written = os.pwrite(fd, data, self._position)
                self._position, data = self._position + written, data[written:]
            if self._position < part:
                return None
            self._files.popleft()
            self._position = 0
            return None if self._files else (self._number, True)
        kind = _PIECE if self._files else _TRANSFER
        self._head += _received(bulk, kind.size - len(self._head))
        if len(self._head) < kind.size:
            return None
        fields = kind.unpack(self._head)
        self._head.clear()
        if kind is _TRANSFER:
            self._number, total = fields
            self._files.extend(shared_memory.contents(self._file_for(self._number, total), total))
        elif fields == (0,):
            self._files.clear()
            self._position = 0
            return self._number, False
        else:
            (self._piece,) = fields
        return None


def _received(bulk: socket.socket, most: int) -> bytes:
    data = bulk.recv(most)
    if not data:
        raise EOFError("the other end has closed the connection")
    return data
