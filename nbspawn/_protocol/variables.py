"""What a rank reports of its variables, as plain data."""

from __future__ import annotations

from typing import NamedTuple


class Variables(NamedTuple):
    """The variables of one rank: the name and one line about the value of each, in the order in which they were bound;
    ``more`` were left out."""

    found: tuple[tuple[str, str], ...]
    more: int
