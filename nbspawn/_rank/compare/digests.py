"""Digests of values, a chunk at a time: equal values have equal digests, whichever bytes stand for them.

-0.0 is 0.0, and one NaN is like another. No tensor is copied as a whole. The digest is SHA-1, the fastest of hashlib's
(tests/benchmarks/diff.py); nobody forges weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from typing import Any

import torch

from nbspawn._protocol.value_digests import CHUNK, DIGEST, Statistics

_NUMBERS = ("float", "bfloat", "complex", "int", "uint", "bool")
"""How the types begin whose elements are numbers; other bits can only be compared."""
_ORDERED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}
_ORDERED |= {torch.int8, torch.int16, torch.int32, torch.int64}


class Numbers:
    """The elements of a tensor, in order. Those of one byte (float8) are taken as float32, with which torch can
    compute."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.device.type == "xla":  # which compiles a program for each chunk
            tensor = tensor.cpu()
        small = tensor.is_floating_point() and tensor.element_size() == 1
        self._tensor = tensor
        self._dtype = torch.float32 if small else tensor.dtype
        self._step = CHUNK // self._dtype.itemsize
        name = str(self._dtype).removeprefix("torch.")
        self.dtype = name if name.startswith(_NUMBERS) else ""
        self.shape = tuple(tensor.shape)
        self.nbytes = tensor.numel() * tensor.element_size()

    def digests(self) -> tuple[bytes, Statistics | None]:
        """The digests of all chunks, one after the other; and the statistics, if the type has an order."""
        seen = _Seen()
        chunks = range(0, self._tensor.numel(), self._step)
        return b"".join(_digest(_memory(self._values(start, seen))) for start in chunks), seen.statistics

    def chunk(self, number: int) -> Any:
        """The bytes of the elements in it, of type ``dtype``."""
        return _memory(self._values(number * self._step, _Seen()))

    def _values(self, start: int, seen: _Seen) -> torch.Tensor:
        values = _elements(self._tensor, start, min(self._tensor.numel(), start + self._step))
        values = values.to("cpu", self._dtype).contiguous()
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.is_floating_point():
            values = values + 0.0  # -0.0 becomes 0.0
        if values.dtype in _ORDERED and seen.add(values):
            values[values.isnan()] = math.nan
        return values


class Contents:
    """Bytes that stand for a value without elements: of a string, of a pickle."""

    dtype, shape = "", ()

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def digests(self) -> tuple[bytes, None]:
        """One digest of all."""
        return _digest(self._data), None


class _Seen:
    """The elements that were read, in figures."""

    def __init__(self) -> None:
        self._low, self._high = math.inf, -math.inf
        self._nans = self._infs = 0
        self._ordered = False

    def add(self, values: torch.Tensor) -> bool:
        """Are there NaN among them?"""
        self._ordered = True
        low, high = (bound.item() for bound in values.aminmax())
        if has_nan := low != low:
            numbers = values[~values.isnan()]
            self._nans += values.numel() - numbers.numel()
            if not numbers.numel():
                return True
            low, high = (bound.item() for bound in numbers.aminmax())
        if math.inf in (-low, high):
            self._infs += int(values.isinf().sum())
        self._low, self._high = min(self._low, low), max(self._high, high)
        return has_nan

    @property
    def statistics(self) -> Statistics | None:
        if not self._ordered:
            return None
        some = self._low <= self._high
        return Statistics(self._low if some else None, self._high if some else None, self._nans, self._infs)


def _elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements from ``start`` to ``stop``, as if the tensor were flat. Of one that is not contiguous a few rows are
    copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor[0].numel()
    first, last = start // row, -(-stop // row)
    if row * tensor.element_size() <= CHUNK:
        return tensor[first:last].reshape(-1)[start - first * row : stop - first * row]
    rows = range(first, last)
    return torch.cat([_elements(tensor[i], max(0, start - i * row), min(row, stop - i * row)) for i in rows])


def _memory(values: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor, which they keep."""
    memory: Any = (ctypes.c_ubyte * (values.numel() * values.element_size())).from_address(values.data_ptr())
    memory.owner = values
    return memory


def _digest(data: Any) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()[:DIGEST]
