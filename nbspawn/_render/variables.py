"""The variables of ranks as a table of text and of HTML: a row for each value, with the ranks that have it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from nbspawn._protocol.questions import Variables
from nbspawn._render import grid
from nbspawn._render.report import Report
from nbspawn._render.text import LABEL_WIDTH, clip
from nbspawn._state.wording import few_ranges, name_ranks

_VALUES = 4  # of one variable
_NAME = 24  # columns of its name
_WIDTH = 110  # columns of a value

_MISSING = "not there"

Reports = Mapping[int, Variables]


class Row(NamedTuple):
    """The variable ``name`` ('' below its first row) has the value ``what`` in ``ranks`` ('' if all have it)."""

    name: str
    ranks: str
    what: str


def report(title: str, reports: Reports, nprocs: int) -> Report:
    """A row for each variable, and for each value of one that is not the same in all ranks."""
    rows, said = list(_rows(reports)), _sentences(reports, nprocs)
    return Report(_text(title, rows, said), _html(title, rows, said))


def _rows(reports: Reports) -> Iterator[Row]:
    values = {rank: dict(one.found) for rank, one in reports.items()}
    for name in dict.fromkeys(name for own in values.values() for name in own):
        alike: dict[str, list[int]] = {}
        for rank, own in values.items():
            alike.setdefault(own.get(name, _MISSING), []).append(rank)
        if len(alike) == 1:
            yield Row(clip(name, _NAME), "", *alike)
            continue
        for index, (what, ranks) in enumerate(list(alike.items())[:_VALUES]):
            yield Row("" if index else clip(name, _NAME), few_ranges(ranks, LABEL_WIDTH), what)
        if (more := len(alike) - _VALUES) > 0:
            yield Row("", "", f"and {more} more values")


def _sentences(reports: Reports, nprocs: int) -> list[str]:
    found = []
    if any(one.found for one in reports.values()):
        found.append("Compared by what is shown here: `%ranks diff NAME` compares all of a value.")
    if more := max((one.more for one in reports.values()), default=0):
        found.append(f"{more} more variables are not shown.")
    if silent := [rank for rank in range(nprocs) if rank not in reports]:
        found.append(f"{name_ranks(silent)}: no answer; ended, stopped, or in native code that holds Python's lock.")
    if not found:
        found.append("The ranks have no variables yet.")
    return found


def _text(title: str, rows: Sequence[Row], said: Sequence[str]) -> str:
    cells = [(row.name, row.ranks, clip(row.what, _WIDTH)) for row in rows]
    return "\n".join([title, *grid.text(cells, "lrl"), *said])


def _html(title: str, rows: Sequence[Row], said: Sequence[str]) -> str:
    drawn = [
        (
            grid.cell(escape(row.name), style=grid.CODE),
            grid.cell(row.ranks, style=grid.FAINT),
            grid.cell(escape(clip(row.what, _WIDTH)), style=grid.CODE),
        )
        for row in rows
    ]
    sentences = (f"<div>{escape(one)}</div>" for one in said)
    return grid.box(f"<div><b>{escape(title)}</b></div>", grid.html(drawn), *sentences)
