"""Kept ranks that have nothing to do, as a table of text and of HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from nbspawn._accelerators.accelerator import Load
from nbspawn._render import grid
from nbspawn._render.text import load, size

_COLUMNS = ("rank", "state", "pid", "memory", "device")
_SIDES = "rllrl"


class KeptRank(NamedTuple):
    """``memory`` and ``device_memory`` are bytes (-1: it uses no device), ``load`` is that device's."""

    rank: int
    state: str
    pid: int
    memory: int
    device_memory: int
    load: Load = Load()

    @property
    def cells(self) -> tuple[str, ...]:
        """The rank's row."""
        used = [size(self.device_memory), load([self.load])]
        device = "cpu" if self.device_memory < 0 else ", GPU ".join(filter(None, used))
        return str(self.rank), self.state, str(self.pid), size(self.memory), device


def text(heading: str, ranks: Sequence[KeptRank]) -> str:
    """The heading, and a line for each rank."""
    return "\n".join([heading, *(grid.text([_COLUMNS, *(rank.cells for rank in ranks)], _SIDES) if ranks else ())])


def html(heading: str, ranks: Sequence[KeptRank]) -> str:
    """The table as HTML."""
    rows = [map(grid.head, _COLUMNS, _SIDES), *(map(grid.cell, rank.cells, _SIDES) for rank in ranks)]
    return grid.box(f"<div>{escape(heading)}</div>", grid.html(rows if ranks else ()))
