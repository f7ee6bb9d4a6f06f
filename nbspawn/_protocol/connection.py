"""TCP connections between the kernel and the agents: both ends prove that they know the run's token.

Nothing is unpickled before that: whoever can send a pickle can run code. Each end answers the other's challenge
(HMAC, RFC 2104), and each connection says which node it comes from, and what for. What is sent later is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

CONTROL, BULK, LIFE = PURPOSES = b"C", b"B", b"L"
TOKEN_BYTES = 32

_HANDSHAKE_SECONDS = 10.0
_UNSENT = 1 << 19  # bytes
_WHO = struct.Struct("!cI")
_PROVEN = _WHO.size + TOKEN_BYTES
_SAID = _PROVEN + TOKEN_BYTES
_PARTS = slice(0, _WHO.size), slice(_WHO.size, _PROVEN), slice(_PROVEN, _SAID)
"""What an agent says first: where it comes from, its proof, and its own challenge."""
_LENGTH = struct.Struct("!Q")


def connect(address: tuple[str, int], token: bytes, purpose: bytes, node: int) -> socket.socket:
    """The agent's end. Raises OSError, PermissionError if the other end does not know the token."""
    connection = socket.create_connection(address, _HANDSHAKE_SECONDS)
    try:
        who = _WHO.pack(purpose, node)
        mine = secrets.token_bytes(TOKEN_BYTES)
        theirs = receive_exactly(connection, TOKEN_BYTES)
        connection.sendall(who + hmac.digest(token, b"agent" + who + theirs, "sha256") + mine)
        proof = receive_exactly(connection, TOKEN_BYTES)
        if not hmac.compare_digest(proof, hmac.digest(token, b"kernel" + mine, "sha256")):
            raise PermissionError("the other end does not know this run's token")
        _prepare(connection, purpose)
    except BaseException:
        connection.close()
        raise
    return connection


class Guest:
    """The kernel's end of a connection that was accepted, of which nothing is known. Never blocks."""

    def __init__(self, accepted: socket.socket, token: bytes) -> None:
        self.socket = accepted
        self._token = token
        self._mine = secrets.token_bytes(TOKEN_BYTES)
        self._heard = bytearray()
        accepted.setblocking(False)
        with suppress(OSError):  # it has gone again
            accepted.send(self._mine)  # a new connection has room for so little

    def who(self) -> tuple[bytes, int] | None:
        """The connection's purpose and the number of its node, once it has proven that it knows the token. None as long
        as it has not said enough. Raises OSError, EOFError, PermissionError if it does not know the token."""
        with suppress(BlockingIOError):
            while len(self._heard) < _SAID:
                data = self.socket.recv(_SAID - len(self._heard))
                if not data:
                    raise EOFError("the other end has closed the connection")
                self._heard += data
        if len(self._heard) < _SAID:
            return None
        who, proof, theirs = (bytes(self._heard[part]) for part in _PARTS)
        if not hmac.compare_digest(proof, hmac.digest(self._token, b"agent" + who + self._mine, "sha256")):
            raise PermissionError("the other end does not know this run's token")
        self.socket.send(hmac.digest(self._token, b"kernel" + theirs, "sha256"))
        purpose, node = _WHO.unpack(who)
        _prepare(self.socket, purpose)
        return purpose, node


def _prepare(connection: socket.socket, purpose: bytes) -> None:
    """Prepare a socket, without a timeout. Over *life* nothing is ever sent: the operating systems ask and answer
    there, and end it six seconds after a host or a link is gone. Heartbeats of our own would take a process that is
    busy, or stopped for a while, for dead. So would the system on a connection with data: one that is not read from for
    long looks the same as one that is cut."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if purpose == BULK and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # What is in the system's buffers cannot be cut off any more.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    if purpose == LIFE:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def frame(body: bytes) -> bytes:
    """A message as it is sent over control."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes the bytes of a control connection apart, cut anywhere."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield body


def receive(connection: socket.socket) -> bytes:
    """Wait for the next message of a control connection. Raises EOFError at its end."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return receive_exactly(connection, length)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Wait for so many bytes. Raises EOFError if the connection ends before."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest.nbytes:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError("the other end has closed the connection")
        rest = rest[count:]
    return bytes(data)
