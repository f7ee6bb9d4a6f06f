"""Kept ranks that have nothing to do, as a table of text and of HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from nbspawn._accelerators.accelerator import Load
from nbspawn._render.html import BOX, QUIET
from nbspawn._render.text import load, size

_COLUMNS = ("rank", "state", "pid", "memory", "device")
_CELL = "border:0;padding:0 14px 0 0;white-space:nowrap"


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
    rows = [_COLUMNS, *(rank.cells for rank in ranks)] if ranks else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        rank, state, pid, memory, device = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{row[0]:>{len(rank)}}  {state}  {pid}  {row[3]:>{len(memory)}}  {device}".rstrip())
    return "\n".join([heading, *lines])


def html(heading: str, ranks: Sequence[KeptRank]) -> str:
    """The table as HTML, which can be read without styles."""
    rows = [("th", _COLUMNS, f";color:{QUIET};font-weight:normal"), *(("td", rank.cells, "") for rank in ranks)]
    drawn = []
    for tag, cells, style in rows:
        aligned = zip(cells, ("right", "left", "left", "right", "left"), strict=True)
        drawn.append(
            '<tr style="background:none">'
            + "".join(
                f'<{tag} align="{side}" style="{_CELL};text-align:{side}{style}">{cell}</{tag}>'
                for cell, side in aligned
            )
            + "</tr>"
        )
    table = f'<table style="border:0;border-collapse:collapse;font-size:inherit;margin:2px 0">{"".join(drawn)}</table>'
    return f'<div style="{BOX};overflow-x:auto"><div>{escape(heading)}</div>{table if ranks else ""}</div>'
