"""How the elements of a tensor differ between two ranks, a chunk at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from nbspawn._protocol.value_digests import CHUNK, Entry
from nbspawn._state.agreement import Closer

_SERIAL = 1 << 14
"""Elements that are compared at a time, and none by an index: else torch starts threads, and fork needs none."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tolerance(NamedTuple):
    """Elements whose difference is at most ``atol + rtol * abs(element)`` count as equal, as in torch.allclose."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def given(self) -> bool:
        """Is it more than none?"""
        return self != (0.0, 0.0)


def compare(closer: Closer, entry: Entry, number: int, first: Any, other: Any, tolerance: Tolerance) -> None:
    """Add what differs between these bytes of the chunk of that ``number``. Equal values have equal bytes there."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    chunks = [torch.frombuffer(data, dtype=dtype) for data in (first, other)]
    before = number * (CHUNK // dtype.itemsize)
    for start in range(0, chunks[0].numel(), _SERIAL):
        some = [chunk[start : start + _SERIAL] for chunk in chunks]
        _add(closer, entry, before + start, some[0], some[1], tolerance)


def _add(
    closer: Closer, entry: Entry, before: int, first: torch.Tensor, other: torch.Tensor, tolerance: Tolerance
) -> None:
    bits = [part.view(_BITS[min(part.element_size(), 8)]).view(part.numel(), -1) for part in (first, other)]
    differ = (bits[0] != bits[1]).any(1)
    count = int(differ.sum())
    if not count:
        return
    if closer.values is None:
        place = int(differ.nonzero()[0])
        closer.index = _unraveled(before + place, entry.shape)
        closer.values = first[place].item(), other[place].item()
    closer.count += count
    if _beyond_float(first) or _beyond_float(other):
        _add_large(closer, first.tolist(), other.tolist(), tolerance)
        return
    wide = torch.complex128 if first.is_complex() else torch.float64
    expected = first.to(wide)
    differences = (other.to(wide) - expected).abs()
    limits = tolerance.atol + tolerance.rtol * expected.abs()
    numbers = differ & differences.isfinite()
    closer.close &= bool((numbers & (differences <= limits) | ~differ).all())
    if numbers.any():
        relative = differences / expected.abs()  # infinite where 0 was expected, as in torch.testing
        closer.largest = max(closer.largest or 0.0, _largest(differences, numbers))
        closer.relative = max(closer.relative or 0.0, _largest(relative, numbers))


def _beyond_float(part: torch.Tensor) -> bool:
    """May there be integers among them that no float64 is equal to?"""
    if part.dtype == torch.uint64:  # for which torch has no order
        return True
    return part.dtype == torch.int64 and max(map(abs, map(int, part.aminmax()))) > 2**53


def _add_large(closer: Closer, first: list[int], other: list[int], tolerance: Tolerance) -> None:
    """Add the differences of integers, exactly."""
    for expected, found in zip(first, other, strict=True):
        if difference := abs(found - expected):
            closer.close &= difference <= tolerance.atol + tolerance.rtol * abs(expected)
            closer.largest = max(closer.largest or 0, difference)
            closer.relative = max(closer.relative or 0.0, difference / abs(expected) if expected else math.inf)


def _largest(values: torch.Tensor, of: torch.Tensor) -> float:
    return values.masked_fill(~of, 0.0).max().item()


def _unraveled(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        place, rest = divmod(place, length)
        index.insert(0, rest)
    return tuple(index)
