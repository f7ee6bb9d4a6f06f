"""Arrays and storages that are a file's contents: a rank maps the file again, so that what one writes all others read.

As bytes they would be copies: nothing that a rank writes would reach the file, and a read-only one could be written to.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any


def is_array(kind: type) -> bool:
    """Are objects of this type numpy's memory-mapped arrays?"""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, getattr(numpy, "memmap", ()))


def reduce_array(array: Any) -> Any:
    """By the name of the file. Not what was computed from such an array, and not a copy-on-write one: its changes are
    in no file."""
    numpy = sys.modules["numpy"]
    mapping, name = getattr(array, "_mmap", None), array.filename
    if mapping is None or name is None or array.mode == "c" or array.dtype.hasobject:
        return NotImplemented
    file_start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    _check(name, file_start + len(mapping))
    start = _address(array) - _address(numpy.frombuffer(mapping, numpy.uint8))
    mode = "r" if array.mode == "r" or not array.flags.writeable else "r+"
    place = (os.fspath(name), mode, file_start, len(mapping))
    return _array, (type(array), place, array.offset, array.shape, array.dtype, start, array.strides)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _array(kind: Any, place: tuple[str, Any, int, int], offset: int, *layout: Any) -> Any:
    import numpy

    name, mode, file_start, length = place
    whole: Any = numpy.memmap(name, numpy.uint8, mode, file_start, (length,))
    shape, dtype, start, strides = layout
    array = numpy.ndarray.__new__(kind, shape, dtype, whole, start, strides)
    array._mmap, array.filename, array.mode, array.offset = whole._mmap, whole.filename, whole.mode, offset
    return array


def file_of_storage(storage: Any) -> str | None:
    """The file of ``torch.from_file(..., shared=True)``. torch 2.2 does not tell it."""
    return getattr(storage, "filename", None)


def reduce_storage(storage: Any) -> Any:
    """By the name of the file."""
    name, size = storage.filename, storage.nbytes()
    _check(name, size)
    return _storage, (os.path.abspath(name), size)


def _storage(name: str, size: int) -> Any:
    import torch

    return torch.UntypedStorage.from_file(name, shared=True, nbytes=size)


def _check(name: str, size: int) -> None:
    try:
        there = os.stat(name).st_size >= size
    except OSError:
        there = False
    if not there:
        raise TypeError("the file that it maps has gone")
