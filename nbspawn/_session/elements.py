"""How the elements of a tensor differ between two ranks, a chunk at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nbspawn._protocol.entries import CHUNK, Entry
from nbspawn._state.agreement import Closer

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
    bits = [chunk.view(_BITS[min(dtype.itemsize, 8)]).view(chunk.numel(), -1) for chunk in chunks]
    where = (bits[0] != bits[1]).any(1).nonzero().flatten()
    if not where.numel():
        return
    if closer.values is None:
        place = int(where[0])
        closer.index = _unraveled(place + number * (CHUNK // dtype.itemsize), entry.shape)
        closer.values = chunks[0][place].item(), chunks[1][place].item()
    closer.count += where.numel()
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected, found = (chunk[where].to(wide) for chunk in chunks)
    differences = (found - expected).abs()
    finite = differences.isfinite()
    closer.close &= bool((finite & (differences <= tolerance.atol + tolerance.rtol * expected.abs())).all())
    if finite.any():
        relative = (differences / expected.abs())[finite]  # infinite where 0 was expected, as in torch.testing
        closer.largest = max(closer.largest or 0.0, differences[finite].max().item())
        closer.relative = max(closer.relative or 0.0, relative.max().item())


def _unraveled(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        place, rest = divmod(place, length)
        index.insert(0, rest)
    return tuple(index)
