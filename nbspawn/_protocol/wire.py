"""Encodes messages as bytes on a stream socket, and decodes them; large buffers are sent in a separate file."""

from __future__ import annotations

import errno
import os
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from nbspawn._protocol import plain, shared_memory
from nbspawn._protocol.messages import Command, Inspected, RankEvent, Returned

_HEAD = struct.Struct("!QLL")
_SIZE = struct.Struct("!Q")
_ATTACHED = 256 * 1024  # bytes: a larger buffer is not sent through the socket


def encode_command(command: Command) -> bytes:
    """A frame for a rank, which the kernel may have run anything."""
    return _frame(pickle.dumps(command, protocol=5))


def encode_event(event: RankEvent, command_number: int, attached: list[int] | None = None) -> bytes:
    """A frame for the kernel: three numbers in network order (the length of the rest of the frame, the number of
    buffers in a separate file, the command number), the sizes of these buffers, and the pickled parts of the event
    (plain.py).

    A caller that can send descriptors passes ``attached``. Large buffers are then written to a file
    (_protocol/shared_memory.py) whose descriptor is appended to it, and has to be sent with the frame. A value for
    which there can be no file is lost, and says why. Raises NotPlainError.
    """
    large: list[shared_memory.Large] = []
    most = None if attached is None else _ATTACHED
    body = pickled(RankEvent, event, most, large)
    if attached is not None and large:
        try:
            attached.append(shared_memory.write(large))
        except OSError as refusal:
            assert isinstance(event, (Returned, Inspected))
            size = sum(buffer.nbytes for buffer in large)
            event = event.lost(f"its {size / 1e6:,.0f} MB could not be written by the rank: {refusal.strerror}")
            return encode_event(event, command_number)
    return _frame(body, [buffer.nbytes for buffer in large], command_number)


def pickled(declared: Any, value: object, most: int | None = None, large: list[Any] | None = None) -> bytes:
    """The pickled parts of a value of this type (plain.py). Buffers of ``most`` bytes or more, and those of a device,
    are appended to ``large`` instead. Raises NotPlainError."""

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = shared_memory.raw(buffer)
        on_host = isinstance(raw, memoryview)
        if on_host and (large is None or most is None or raw.nbytes < most):
            return True
        assert large is not None
        large.append(raw)
        return False

    return pickle.dumps(plain.apart(declared, value), protocol=5, buffer_callback=stays)


def _frame(body: bytes, sizes: Sequence[int] = (), command_number: int = 0) -> bytes:
    before = b"".join(map(_SIZE.pack, sizes))
    return b"".join((_HEAD.pack(len(before) + len(body), len(sizes), command_number), before, body))


load_event = partial(plain.loaded, RankEvent)
"""The event of a rank, from its parts."""


class Decoder:
    """Decodes the bytes of a stream socket, cut anywhere, by ``load``. Descriptors that were received with the bytes
    are appended to ``attached`` before these are fed: None for one that this process could not receive."""

    def __init__(self, load: Callable[..., Any] = pickle.loads) -> None:
        self.attached: deque[int | None] = deque()
        self._load = load
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """Yield the messages that ``data`` completes, each with its command number. If the file of a value cannot be
        mapped, the value is lost, and contains the reason. In place of a message that cannot be loaded comes the
        NotPlainError."""
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
            except plain.NotPlainError as error:
                message = error
            yield command_number, message

    def close(self) -> None:
        """Close the descriptors that no message has used: no more bytes will be fed."""
        while self.attached:
            fd = self.attached.popleft()
            if fd is not None:
                os.close(fd)

    def _with_buffers(self, body: bytes, count: int) -> Any:
        if len(body) < count * _SIZE.size or not self.attached:
            raise plain.NotPlainError("its buffers are missing")
        sizes = [size for (size,) in _SIZE.iter_unpack(body[: count * _SIZE.size])]
        rest = memoryview(body)[count * _SIZE.size :]
        try:
            return self._load(rest, self._mapped(sizes))
        except OSError as refusal:
            size = f"{sum(sizes) / 1e6:,.0f} MB"
            message = self._load(rest, [b""] * count)
            return message.lost(f"its {size} could not be received by the kernel: {refusal.strerror}")

    def _mapped(self, sizes: Sequence[int]) -> list[memoryview]:
        fd = self.attached.popleft()
        if fd is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            return shared_memory.read([fd], sizes)
        finally:
            os.close(fd)
