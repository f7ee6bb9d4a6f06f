"""Arrays and storages that are a file's contents: a rank maps the file again, so that what one writes all others read.

As bytes they would be copies: nothing that a rank writes would reach the file, and a read-only one could be written to.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def is_array(kind: type) -> bool:
    """Are objects of this type numpy's memory-mapped arrays?"""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, getattr(numpy, "memmap", ()))


class Mappings:
    """The mapped files that one pickle refers to: each is made once in the rank, however many arrays are views of
    it."""

    def __init__(self) -> None:
        self._found: dict[int, _Mapping] = {}

    def reduce_array(self, array: Any) -> Any:
        """Reduce an array to the name of its file. Not what was computed from such an array, and not a copy-on-write
        one: its changes are in no file."""
        numpy = sys.modules["numpy"]
        mapping = getattr(array, "_mmap", None)
        if mapping is None or array.filename is None or array.mode == "c" or array.dtype.hasobject:
            return NotImplemented
        first = _address(numpy.frombuffer(mapping, numpy.uint8))
        if (found := self._found.get(id(mapping))) is None:
            start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
            name = _file_at(first, os.fspath(array.filename), start + len(mapping))
            found = self._found[id(mapping)] = _Mapping(mapping, name, array.mode == "r", start)
        layout = array.shape, array.dtype, _address(array) - first, array.strides
        return _array, (type(array), found, array.offset, array.flags.writeable, *layout)


class _Mapping:
    def __init__(self, mapping: mmap.mmap, *place: Any) -> None:
        self._mapping = mapping  # else its id may become another's
        self._place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _map, (*self._place, len(self._mapping))


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _map(name: str, read_only: bool, start: int, length: int) -> Any:
    import numpy

    return numpy.memmap(name, numpy.uint8, "r" if read_only else "r+", start, (length,))


def _array(kind: Any, whole: Any, offset: int, writeable: bool, *layout: Any) -> Any:
    import numpy

    shape, dtype, start, strides = layout
    array = numpy.ndarray.__new__(kind, shape, dtype, whole, start, strides)
    array._mmap, array.filename, array.mode, array.offset = whole._mmap, whole.filename, whole.mode, offset
    if not writeable:
        array.flags.writeable = False
    return array


def reduce_storage(storage: Any) -> Any:
    """Reduce the storage of ``torch.from_file(..., shared=True)`` to the name of the file; None for another one. torch
    2.4 has a name for shared memory, too."""
    name = getattr(storage, "filename", None)
    if not name or name.startswith("/torch_"):
        return None
    return _storage, (_file_at(storage.data_ptr(), name, storage.nbytes()), storage.nbytes())


def _storage(name: str, size: int) -> Any:
    import torch

    return torch.UntypedStorage.from_file(name, shared=True, nbytes=size)


def _file_at(address: int, name: str, size: int) -> str:
    """The path of the file that is mapped there as ``name``, which may be relative to an earlier directory, or by now
    another file's."""
    paths = [os.path.abspath(name)]
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split(" ", 1)[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                paths.insert(0, line.rstrip("\n").split(None, 5)[5])
    if not paths[0].endswith(" (deleted)"):
        for path in paths:
            with suppress(OSError):
                if os.stat(path).st_size >= size:
                    return path
    raise TypeError("the file that it maps has gone")
