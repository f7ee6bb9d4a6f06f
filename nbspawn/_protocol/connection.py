"""TCP connections between the kernel and the agents: both ends prove that they know the run's token.

Nothing is unpickled before that: whoever can send a pickle can run code. Each end answers the other's challenge
(HMAC, RFC 2104), and each connection says which node it comes from, and what for. What is sent later is not encrypted.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

CONTROL, BULK, LIFE = PURPOSES = b"C", b"B", b"L"
TOKEN_BYTES = 32

_HANDSHAKE_SECONDS = 10.0
_WHO = struct.Struct("!cI")
_LENGTH = struct.Struct("!Q")
TRANSFER = struct.Struct("!QQ")
"""Before the bytes of a transfer: its number, and how many bytes they are."""


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


def accept(listener: socket.socket, token: bytes) -> tuple[socket.socket, bytes, int] | None:
    """The kernel's end of one connection: with its purpose and the number of its node. None if whoever connected does
    not know the token."""
    connection, _ = listener.accept()
    try:
        connection.settimeout(_HANDSHAKE_SECONDS)
        mine = secrets.token_bytes(TOKEN_BYTES)
        connection.sendall(mine)
        who = receive_exactly(connection, _WHO.size)
        proof = receive_exactly(connection, TOKEN_BYTES)
        theirs = receive_exactly(connection, TOKEN_BYTES)
        if hmac.compare_digest(proof, hmac.digest(token, b"agent" + who + mine, "sha256")):
            connection.sendall(hmac.digest(token, b"kernel" + theirs, "sha256"))
            purpose, node = _WHO.unpack(who)
            _prepare(connection, purpose)
            return connection, purpose, node
    except (OSError, EOFError):
        pass
    connection.close()
    return None


def _prepare(connection: socket.socket, purpose: bytes) -> None:
    """Without a timeout. Over *life* nothing is ever sent: the operating systems ask and answer there, and end it six
    seconds after a host or a link is gone. Heartbeats of our own would take a process that is busy, or stopped for a
    while, for dead. So would the system on a connection with data: one that is not read from for long looks the same
    as one that is cut."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if purpose == LIFE:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def frame(message: object) -> bytes:
    """A message as it is sent over control."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes the bytes of a control connection apart, cut anywhere."""

    def __init__(self, load: Callable[[bytes], Any]) -> None:
        self._load = load
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete. Raises UnpicklingError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield self._load(body)


def receive(connection: socket.socket, load: Callable[[bytes], Any] = pickle.loads) -> Any:
    """Wait for the next message of a control connection. Raises EOFError at its end."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return load(receive_exactly(connection, length))


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
