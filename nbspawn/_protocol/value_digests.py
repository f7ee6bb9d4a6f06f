"""What a rank tells about a value that is compared over ranks: an entry for each of its parts. Plain data."""

from __future__ import annotations

from typing import NamedTuple

CHUNK = 1 << 18
"""Bytes of which there is one digest. So much stays in a processor's cache while it is read several times."""
DIGEST = 16
"""Bytes of a digest."""


class Statistics(NamedTuple):
    """What is known of a tensor's elements: ``low`` and ``high`` are of those that are not NaN, None if all are."""

    low: float | None
    high: float | None
    nans: int
    infs: int


class Entry(NamedTuple):
    """A tensor, a number, a string, …; or what contains such (not a ``leaf``), which precedes its contents."""

    path: str
    """As a user writes it behind the expression: "['0.weight']", ".state[3]['exp_avg']"."""
    kind: str
    """What has to be the same beside the contents: 'float32[8, 8]', 'str', 'dict'; '' if it could not be read."""
    digests: bytes = b""
    """Of its contents, one after the other, each of a chunk."""
    text: str = ""
    """Of a number, a string, …: short; '' of a tensor."""
    nbytes: int = 0
    dtype: str = ""
    """torch's name for the type in which its elements are sent; '' if they are not numbers."""
    shape: tuple[int, ...] = ()
    """Of what this rank has of it."""
    statistics: Statistics | None = None
    part: str = ""
    """Which part of a tensor that is sharded: this is compared with the same part in other ranks; '' is all of it."""
    parts: int = 1
    """How many parts there are."""
    skipped: str = ""
    """Why its contents are not compared."""
    leaf: bool = True


class Entries(NamedTuple):
    """The entries of a value; ``cut``: only the first of them, because there are too many."""

    entries: tuple[Entry, ...]
    cut: bool

    def __repr__(self) -> str:
        return f"<{len(self.entries)} entries>"  # it is a rank's result, of which the text travels, too
