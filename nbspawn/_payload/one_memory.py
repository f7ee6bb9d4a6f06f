"""Arrays and storages of tensors that lie over one memory lie over one memory in a rank, too.

By itself numpy writes each array's own bytes, a view's as well, and what ``torch.from_numpy`` has made knows nothing of
the array. So the addresses of all that is pickled are noted. Where some overlap, all is pickled again, and these are
views of one buffer (``Region``). Of two that are far apart in their base, like a row and a column of a matrix, the base
is not sent: they are copies. So are those of pandas' objects: which of these share an array until one is written to, it
knows in the notebook, and not in a rank.
"""

from __future__ import annotations

import bisect
import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_LARGER = 2  # times what lies in it, a region may be
_SMALL = 1 << 16  # bytes, which it may always be


class Extent(NamedTuple):
    """Where something lies: its first address, the one behind it, and how many of the bytes in between are its own."""

    start: int
    end: int
    own: int
    what: object


class Region:
    """The memory in which these lie."""

    def __init__(self, inside: list[Extent]) -> None:
        self._inside = inside  # which keeps it
        self.start, self.end = inside[0].start, max(one.end for one in inside)

    @property
    def is_full(self) -> bool:
        """Is much of it theirs?"""
        return self.end - self.start <= max(_LARGER * sum(one.own for one in self._inside), _SMALL)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[pickle.PickleBuffer]]:
        memory: Any = (ctypes.c_ubyte * (self.end - self.start)).from_address(self.start)
        memory.owner = self
        return _itself, (pickle.PickleBuffer(memory),)


class Memories:
    """What is over one memory in one pickle; without ``regions``, nothing is known of that yet."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self._regions = regions  # in the order of their addresses
        self._starts = [region.start for region in regions]
        self._arrays: list[Any] = []
        self._storages: list[Any] = []
        self._apart: dict[int, Any] = {}

    def shared(self) -> list[Region]:
        """The regions in which more than one thing lies, of those that have been pickled."""
        if not self._storages and all(array.base is None for array in self._arrays):
            return []  # each has its own
        extents = [_of_array(one) for one in self._arrays if one.size and not one.dtype.hasobject]
        extents += [_of_storage(one) for one in self._storages if one.nbytes()]
        groups: list[list[Extent]] = []
        end = 0
        for one in sorted(extents, key=_start):
            if one.start < end:
                groups[-1].append(one)
            else:
                groups.append([one])
            end = max(end, one.end)
        return [region for group in groups if len(group) > 1 and (region := Region(group)).is_full]

    def reduce_of_pandas(self, obj: Any) -> Any:
        """Reduce an object of pandas by its own ``__reduce__``, and what is in that is no matter of ours."""
        reduced = obj.__reduce_ex__(5)
        todo = [reduced]
        for one in todo:  # it grows
            if type(one) in (tuple, list):
                todo += one
            elif type(one) is dict:
                todo += one.values()
            else:
                self._apart[id(one)] = one
        return reduced

    def reduce_array(self, array: Any) -> Any:
        """Reduce an array of numpy's own class."""
        if id(array) in self._apart:
            return NotImplemented
        if 0 in array.strides and array.size > 1 and not array.dtype.hasobject:
            return _reduce_repeated(array)
        if not self._regions:
            self._arrays.append(array)
            return NotImplemented
        if array.dtype.hasobject or not array.size or (region := self._region(_of_array(array))) is None:
            return NotImplemented
        first = _address(array) - region.start
        return _view, (region, array.dtype, array.shape, array.strides, first, array.flags.writeable)

    def reduce_storage(self, storage: Any) -> Any:
        """Reduce a storage in the memory of this process; None for one that lies alone, or of which that is not known
        yet."""
        self._storages.append(storage)
        region = self._region(extent := _of_storage(storage)) if self._regions and storage.nbytes() else None
        return None if region is None else (_storage, (region, extent.start - region.start, extent.own))

    def _region(self, extent: Extent) -> Region | None:
        at = bisect.bisect_right(self._starts, extent.start) - 1
        return self._regions[at] if at >= 0 and extent.end <= self._regions[at].end else None


def _start(extent: Extent) -> int:
    return extent.start


def _of_storage(storage: Any) -> Extent:
    start, size = storage.data_ptr(), storage.nbytes()
    return Extent(start, start + size, size, storage)


def _of_array(array: Any) -> Extent:
    start, size = _address(array), array.nbytes
    if array.flags.c_contiguous:
        return Extent(start, start + size, size, array)
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    before, behind = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    return Extent(start + before, start + behind + array.itemsize, size, array)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _reduce_repeated(array: Any) -> Any:
    """``np.broadcast_to`` gives such an array: the same elements again and again, which are sent once."""
    once: list[Any] = [slice(None) if stride else 0 for stride in array.strides]
    once.append(...)  # else the only one is no array
    return _repeat, (array[tuple(once)], array.shape, tuple(map(bool, array.strides)), array.flags.writeable)


# ---------------------------------------------------------------- called by the stream, when it is loaded


def _itself(obj: Any) -> Any:
    return obj


def _view(region: Any, dtype: Any, shape: Any, strides: Any, first: int, writeable: bool) -> Any:
    import numpy

    array = numpy.ndarray(shape, dtype, region, first, strides)
    if not writeable:
        array.flags.writeable = False
    return array


def _storage(region: Any, first: int, size: int) -> Any:
    import torch

    return torch.frombuffer(region, dtype=torch.uint8, count=size, offset=first).untyped_storage()


def _repeat(once: Any, shape: Any, moves: Any, writeable: bool) -> Any:
    import numpy

    strides = iter(once.strides)
    return numpy.lib.stride_tricks.as_strided(
        once, shape, [next(strides) if moving else 0 for moving in moves], writeable=writeable
    )
