"""Encodes messages as bytes on a stream socket, and decodes them; large buffers are sent in a separate file."""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from nbspawn._protocol import shared_memory
from nbspawn._protocol.messages import Command, Event

_HEAD = struct.Struct("!QLL")
_SIZE = struct.Struct("!Q")
_ATTACHED = 256 * 1024  # bytes: a larger buffer is not sent through the socket


def encode(message: Event | Command, attached: list[int] | None = None, command_number: int = 0) -> bytes:
    """One frame: three numbers in network order (the length of the rest of the frame, the number of buffers in a
    separate file, the command number), the sizes of these buffers, and the pickled message.

    A caller that can send descriptors passes ``attached``. Large buffers are then written to a file
    (_protocol/shared_memory.py) whose descriptor is appended to it, and has to be sent with the frame.
    """
    large: list[memoryview] = []

    def stays_in_frame(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if attached is None or raw.nbytes < _ATTACHED:
            return True
        large.append(raw)
        return False

    body = pickle.dumps(message, protocol=5, buffer_callback=stays_in_frame)
    if attached is not None and large:
        attached.append(shared_memory.write(large))
    sizes = b"".join(_SIZE.pack(buffer.nbytes) for buffer in large)
    return b"".join((_HEAD.pack(len(sizes) + len(body), len(large), command_number), sizes, body))


class _OfRanks(pickle.Unpickler):
    """Unpickles the messages of ranks, which contain only classes of this package."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for any other class."""
        if module not in _MODULES_OF_RANKS:
            raise pickle.UnpicklingError(f"a message of a rank contains a {module}.{name}")
        return super().find_class(module, name)


_MODULES_OF_RANKS = (
    *("nbspawn._protocol.messages", "nbspawn._protocol.frames", "nbspawn._payload.packing"),
    *("nbspawn._protocol.collectives", "nbspawn._protocol.memory"),
    *("nbspawn._protocol.agents", "nbspawn._protocol.gauges", "nbspawn.errors"),  # an agent's
)


def load_of_rank(body: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """The message of a rank, or of the agent that passes it on. Raises UnpicklingError if it contains a class of
    another package."""
    return _OfRanks(io.BytesIO(body), buffers=buffers).load()


class Decoder:
    """Decodes the bytes of a stream socket, cut anywhere, by ``load``. Descriptors that were received with the bytes
    are appended to ``attached`` before these are fed: None for one that this process could not receive."""

    def __init__(self, load: Callable[..., Any] = pickle.loads) -> None:
        self.attached: deque[int | None] = deque()
        self._load = load
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """Yield the messages that ``data`` completes, each with its command number. If the file of a ``Returned``
        cannot be mapped, the value is lost, and contains the reason. In place of a message that cannot be loaded comes
        the UnpicklingError."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            length, count, command_number = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            try:
                message = self._with_buffers(body, count) if count else self._load(body)
            except pickle.UnpicklingError as error:
                message = error
            yield command_number, message

    def close(self) -> None:
        """Close the descriptors that no message has used: no more bytes will be fed."""
        while self.attached:
            fd = self.attached.popleft()
            if fd is not None:
                os.close(fd)

    def _with_buffers(self, body: bytes, count: int) -> Any:
        sizes = [size for (size,) in _SIZE.iter_unpack(body[: count * _SIZE.size])]
        rest = memoryview(body)[count * _SIZE.size :]
        try:
            return self._load(rest, buffers=self._mapped(sizes))
        except OSError as refusal:
            message = self._load(rest, buffers=[b""] * count)
            reason = f"its {sum(sizes) / 1e6:,.0f} MB could not be received by the kernel: {refusal.strerror}"
            return replace(message, value=message.value.lost(reason))

    def _mapped(self, sizes: Sequence[int]) -> list[memoryview]:
        fd = self.attached.popleft()
        if fd is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            return shared_memory.read([fd], sizes)
        finally:
            os.close(fd)
