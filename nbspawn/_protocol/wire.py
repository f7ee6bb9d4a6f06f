"""How messages become bytes on a stream socket, and messages again; large buffers go beside them, in a file."""

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


_ATTACHED = 256 * 1024  # bytes from which a buffer does not go through the socket


def encode(message: Event | Command, attached: list[int] | None = None, turn: int = 0) -> bytes:
    """One frame: three numbers (network order; the length of what follows them, how many buffers lie elsewhere, and the
    command that it belongs to), the sizes of these buffers, and the pickled message.

    A caller that can send descriptors gives ``attached``. Large buffers are then in a file (_protocol/shared_memory.py)
    that is appended to it, and that has to go with the frame.
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
    return b"".join((_HEAD.pack(len(sizes) + len(body), len(large), turn), sizes, body))


class _OfRanks(pickle.Unpickler):
    """Loads what ranks send, which is of this package alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for any other."""
        if module not in _MODULES_OF_RANKS:
            raise pickle.UnpicklingError(f"a message of a rank holds a {module}.{name}")
        return super().find_class(module, name)


_MODULES_OF_RANKS = ("nbspawn._protocol.messages", "nbspawn._protocol.frames", "nbspawn._payload.packing")


def load_of_rank(body: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """The message of a rank. Raises UnpicklingError if it holds anything foreign."""
    return _OfRanks(io.BytesIO(body), buffers=buffers).load()


class Decoder:
    """Turns the bytes of a stream socket back into messages, however they were cut, by ``load``. Descriptors that came
    with them are put into ``attached`` before the bytes are fed: None for one that this process could not take."""

    def __init__(self, load: Callable[..., Any] = pickle.loads) -> None:
        self.attached: deque[int | None] = deque()
        self._load = load
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """Yield the messages that ``data`` completes, each with the number of its command. The value of a ``Returned``
        whose file cannot be mapped is lost, and says why."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            length, count, turn = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            yield turn, self._with_buffers(body, count) if count else self._load(body)

    def close(self) -> None:
        """Nothing more will be fed."""
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
            told = f"its {sum(sizes) / 1e6:,.0f} MB did not come to the kernel: {refusal.strerror}"
            return replace(message, value=message.value.lost(told))

    def _mapped(self, sizes: Sequence[int]) -> list[memoryview]:
        fd = self.attached.popleft()
        if fd is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            return shared_memory.read([fd], sizes)
        finally:
            os.close(fd)
