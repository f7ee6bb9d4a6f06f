"""What a cell uses, packed once for all ranks; and what a rank's last expression was, on its way back.

``pack`` writes one anonymous file in memory (a memfd): the pickle stream, and behind it every large buffer as it is.
Each rank maps that file privately, so that all ranks share its pages until one of them writes, and what one writes
stays its own, as after a fork. Views go on aliasing their base, tied weights stay tied, and what the person moved to
shared memory stays shared. How objects are pickled is told in pickler.py, and what is said of one that cannot be in
culprit.py.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nbspawn.culprit import Unpackable, culprit, one_line, trial
from nbspawn.pickler import Pickler, loads, new_classes_are_the_kernels, track_classes

__all__ = ["Header", "Packed", "Unpackable", "Value", "load", "pack", "pack_variables", "track_classes"]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector that torch's kernels load
REPR_LIMIT = 2000  # characters
_NONE = pickle.dumps(None)


# ---------------------------------------------------------------- to the ranks


class Header(NamedTuple):
    """Where things lie in the file, in bytes: the pickle stream is the first ``head``; buffers are (start, length)."""

    size: int
    head: int
    offsets: tuple[tuple[int, int], ...]


class Packed:
    """An object packed for any number of ranks; a context manager that closes ``fd``.

    Send ``describe()`` in a message, ``fd`` as descriptors travel, and ``beside`` as an argument of the process. Keep
    it open until every rank has it; what lies beside must live as long as the ranks use it.
    """

    def __init__(self, fd: int, header: Header, beside: tuple[object, ...]) -> None:
        self.fd = fd
        self.size, self.head, self.offsets = header
        self.beside = beside

    def describe(self) -> Header:
        return Header(self.size, self.head, self.offsets)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def pack(obj: object, namespace: dict[str, Any] | None = None, name: str = "object") -> Packed:
    """Pack ``obj``; ``namespace`` is the notebook's, which its functions have as globals.

    Raises ``Unpackable``, with ``name`` as the variable, if a part of it cannot travel; ``OSError`` if there is no
    room for the file.
    """
    try:
        pickler, head = _pickled(obj, namespace)
    except Exception as error:
        raise culprit(name, obj, error, namespace) from error
    return _in_a_file(pickler, head)


def pack_variables(
    variables: Mapping[str, object], optional: Collection[str] = frozenset(), namespace: dict[str, Any] | None = None
) -> Packed:
    """Pack the variables of a cell as one dict. Those named in ``optional`` stay behind where they cannot travel.

    Raises ``Unpackable`` about the first of the others that cannot travel; its ``others`` are the rest.
    """
    variables = dict(variables)
    try:
        pickler, head = _pickled(variables, namespace)
    except Exception:
        errors = {name: error for name, value in variables.items() if (error := trial(value, namespace))}
    else:
        return _in_a_file(pickler, head)
    culprits = [culprit(name, variables[name], errors[name], namespace) for name in errors if name not in optional]
    if culprits:
        culprits[0].others = tuple(culprits[1:])
        raise culprits[0] from errors[culprits[0].variable]
    rest = {name: value for name, value in variables.items() if name not in errors}
    return pack(rest, namespace, "what the cell uses")


def load(fd: int, header: Header, beside: Sequence[object] = (), namespace: dict[str, Any] | None = None) -> Any:
    """In the rank: the object that was packed. Functions of the notebook get ``namespace`` as their globals.

    The mapping lives as long as something uses it; ``fd`` may be closed at once. Raises what unpickling raises:
    ``ModuleNotFoundError``, for one, where the rank cannot import what the notebook did.
    """
    mapped = memoryview(mmap.mmap(fd, header.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    buffers = [mapped[start : start + length] for start, length in header.offsets]
    with new_classes_are_the_kernels():
        return loads(mapped[: header.head], buffers, beside, namespace)


def _pickled(obj: object, namespace: dict[str, Any] | None) -> tuple[Pickler, memoryview]:
    pickler = Pickler(namespace)
    stream = io.BytesIO()
    pickler.dump(obj, stream)
    return pickler, stream.getbuffer()


def _in_a_file(pickler: Pickler, head: memoryview) -> Packed:
    end = head.nbytes
    offsets = []
    for buffer in pickler.buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + buffer.nbytes
        offsets.append((start, buffer.nbytes))
    packed = Packed(_anonymous_file(), Header(end, head.nbytes, tuple(offsets)), tuple(pickler.beside))
    try:
        os.ftruncate(packed.fd, packed.size)
        _write(packed.fd, head, 0)
        for (start, _), buffer in zip(offsets, pickler.buffers, strict=True):
            _write(packed.fd, buffer, start)
    except BaseException:
        packed.close()
        raise
    return packed


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("nbspawn", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="nbspawn-") as file:  # has no name from the start
        return os.dup(file.fileno())


def _write(fd: int, buffer: memoryview, start: int) -> None:
    while buffer.nbytes:  # Linux writes at most 2 GiB at a call
        written = os.pwrite(fd, buffer, start)
        buffer, start = buffer[written:], start + written


# ---------------------------------------------------------------- and back


@dataclass
class Value:
    """A rank's result on its way to the kernel: the object by value, or its repr and the reason why it had to stay."""

    data: bytes = b""
    buffers: list[bytearray] = field(default_factory=list, repr=False)
    repr: str = ""
    reason: str = ""
    _loaded: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, obj: object) -> Value:
        """Pack ``obj`` in the rank. Never raises: what cannot travel is kept as text."""
        if obj is None:
            return cls(_NONE)
        pickler = Pickler(None, returning=True)
        stream = io.BytesIO()
        try:
            pickler.dump(obj, stream)
        except Exception as error:
            return cls(repr=_shown(obj), reason=culprit("the result", obj, error, None, returning=True).reason)
        return cls(stream.getvalue(), [bytearray(buffer) for buffer in pickler.buffers])

    def get(self) -> Any:
        """The object, the same one at every call. Raises ``Unpackable`` if it had to stay or cannot be loaded."""
        if self.reason:
            raise Unpackable("the result", "the result", f"{self.reason}. It reads: {self.repr}")
        if not self._loaded:
            try:
                self._loaded.append(loads(self.data, self.buffers))
            except Exception as error:
                raise Unpackable("the result", "the result", f"it cannot be loaded: {one_line(error)}") from error
        return self._loaded[0]

    def text(self) -> str:
        """A repr of at most ``REPR_LIMIT`` characters. Never raises."""
        try:
            return _shown(self.get())
        except Unpackable as error:
            return self.repr or str(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": []}


def _shown(obj: object) -> str:
    try:
        text = repr(obj)
    except Exception as error:
        text = f"<{type(obj).__name__}, whose repr raises {one_line(error)}>"
    return text if len(text) <= REPR_LIMIT else text[: REPR_LIMIT - 3] + "..."
