"""The memory of ranks as a table of text and of HTML: a row for each variable, a column for each rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median_low
from typing import Literal, NamedTuple

from nbspawn._protocol.memory import Held, Memory
from nbspawn._render import grid
from nbspawn._render.html import FOLD
from nbspawn._render.report import Report
from nbspawn._render.text import LABEL_WIDTH, clip, size
from nbspawn._state.wording import few_ranges, name_ranks

_VARIABLES = 12
_COLUMNS = 6  # with more ranks, those that are alike share one
_SENTENCES = 3
_SUMMARIES = 8
_NAME = 20  # columns of a variable's name
_WIDTH = 120  # columns of a description
_FAR, _FAR_BYTES = 1.5, 10_000_000  # so much more than usual is no chance

_PRE = f"margin:0 0 6px 1em;{grid.CODE};line-height:1.3;white-space:pre"

Reports = Mapping[int, Memory]
Kind = Literal["whole", "part", "variable"]
Column = tuple[str, Sequence[int]]
"""Its heading, and the indexes of its ranks in the rows."""


class Row(NamedTuple):
    """``sizes`` in bytes, in the order of the ranks; ``what`` has them. A part is one of the row above."""

    name: str
    sizes: tuple[int, ...]
    what: str
    kind: Kind

    @property
    def usual(self) -> int:
        """What a rank has; of two, the one that has less."""
        return median_low(self.sizes)

    def stands_out(self, index: int) -> bool:
        """Has this rank far more than usual?"""
        return _is_far(self.sizes[index], self.usual)


def rows(reports: Reports) -> list[Row]:
    """The rows of the table: the process, torch as a whole, then the largest variables in the order of their size."""
    found = [
        _row("process", reports, lambda one: one.resident),
        _row("shared", reports, lambda one: max(one.shared, 0), "of the process's, with other processes", "part"),
        _row("peak", reports, lambda one: one.peak, "since the rank's start", "part"),
        _row("on GPU", reports, lambda one: sum(device.allocated for device in one.devices), "allocated by torch"),
        _row("cached", reports, lambda one: sum(device.cached for device in one.devices), "and free", "part"),
        _row("peak", reports, lambda one: sum(device.peak for device in one.devices), "allocated", "part"),
        _row("in all", reports, lambda one: _known(one, "own"), "with the context, and what libraries have", "part"),
        _row("whole GPU", reports, lambda one: _known(one, "used"), "by all processes" + _of_all(reports)),
        _row("tensors", reports, lambda one: one.tensors, "and arrays, in main memory"),
        _row("pinned", reports, lambda one: one.pinned, "by torch", "part"),
    ]
    held = [{one.name: one for one in report.variables} for report in reports.values()]
    names = dict.fromkeys(name for variables in held for name in variables)
    variables = [_variable(name, reports, [one.get(name, _NOTHING) for one in held]) for name in names]
    variables.sort(key=lambda row: -max(row.sizes))
    rest = [row.sizes for row in variables[_VARIABLES:]] + [tuple(one.others.size for one in reports.values())]
    found += [
        *variables[:_VARIABLES],
        Row("others", tuple(map(sum, zip(*rest, strict=True))), "smaller variables", "whole"),
        _variable("(no variable)", reports, [one.elsewhere for one in reports.values()]),
    ]
    return [row for row in found if any(row.sizes)]


def _known(report: Memory, what: str) -> int:
    """The sum over all devices of the rank, as far as the driver tells."""
    return sum(max(getattr(device.load, what), 0) for device in report.devices)


def _of_all(reports: Reports) -> str:
    totals = {_known(report, "total") for report in reports.values()} - {0}
    return f", of {_amount(max(totals))}" if len(totals) == 1 else ""


def report(title: str, reports: Reports, nprocs: int) -> Report:
    """A table, what stands out, and what each row is. Of ``nprocs`` ranks some may
    have no report."""
    drawn = rows(reports) if reports else []
    said = [*_sentences(drawn, reports), *_without(reports, nprocs)]
    return Report(_text(title, drawn, reports, said), _html(title, drawn, reports, said))


def _text(title: str, drawn: Sequence[Row], reports: Reports, said: Sequence[str]) -> str:
    columns = _columns(drawn, list(reports))
    cells = [["rank", *(label for label, _ in columns)]]
    for row in drawn:
        cells.append([_indent(row, " ") + clip(row.name, _NAME), *(_amounts(row, indexes) for _, indexes in columns)])
    lines = grid.text(cells, "l" + "r" * len(columns))
    described = [clip(f"{row.name}: {row.what}", _WIDTH) for row in drawn if row.kind == "variable"]
    summary = [line for summary in _summaries(reports)[:1] for line in ("", *summary)]
    return "\n".join([title, *(lines if drawn else []), *said, *(["", *described] if described else []), *summary])


def _html(title: str, drawn: Sequence[Row], reports: Reports, said: Sequence[str]) -> str:
    """What stands out is bold."""
    columns = _columns(drawn, list(reports))
    lines = [[grid.head("rank"), *(grid.head(label, "r") for label, _ in columns), grid.head("")]]
    for row in drawn:
        name, what = _indent(row, "&nbsp;&nbsp;") + escape(clip(row.name, _NAME)), escape(clip(row.what, _WIDTH))
        amounts = (grid.cell(_marked(row, indexes), "r") for _, indexes in columns)
        lines.append([grid.cell(name), *amounts, grid.cell(what, style=f"{grid.FAINT};white-space:normal")])
    sentences = "".join(f"<div>{escape(one)}</div>" for one in said)
    folds = "".join(
        f'<details><summary style="{FOLD}">{escape(head)}</summary><pre style="{_PRE}">{escape(text)}</pre></details>'
        for head, text in _summaries(reports)
    )
    return grid.box(f"<div><b>{escape(title)}</b></div>", grid.html(lines if drawn else ()), sentences, folds)


_NOTHING = Held("", 0, "")


def _row(name: str, reports: Reports, of: Callable[[Memory], int], what: str = "", kind: Kind = "whole") -> Row:
    return Row(name, tuple(map(of, reports.values())), what, kind)


def _variable(name: str, reports: Reports, held: Sequence[Held]) -> Row:
    """What it is in the rank that has most of it, with the rank's number if it is not the same in all."""
    most = max(range(len(held)), key=lambda index: held[index].size)
    what = held[most].what
    if any(one.what != what for one in held):
        what = f"rank {list(reports)[most]}: {what}"
    return Row(name, tuple(one.size for one in held), what, "variable")


def _columns(drawn: Sequence[Row], ranks: Sequence[int]) -> list[Column]:
    """A column a rank; of many ranks, one for those that have about the same in each row, and one for those for which
    there is no room."""
    if len(ranks) <= _COLUMNS:
        return [(str(rank), [index]) for index, rank in enumerate(ranks)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(ranks)):
        far = tuple(_is_far(row.sizes[index], row.usual) - _is_far(row.usual, row.sizes[index]) for row in drawn)
        alike.setdefault(far, []).append(index)
    groups = sorted(alike.values(), key=lambda indexes: (-len(indexes), indexes))
    if len(groups) > _COLUMNS:
        rest = sorted(index for indexes in groups[_COLUMNS - 1 :] for index in indexes)
        groups = [*groups[: _COLUMNS - 1], rest]
    return [(few_ranges((ranks[index] for index in indexes), LABEL_WIDTH), indexes) for indexes in sorted(groups)]


def _sentences(drawn: Sequence[Row], reports: Reports) -> list[str]:
    """Which ranks have far more of a variable than others, the largest first; and whose numbers may be too small."""
    ranks = list(reports)
    found: list[str] = []
    for row in sorted(drawn, key=lambda row: row.usual - max(row.sizes)):
        far = [rank for index, rank in enumerate(ranks) if row.stands_out(index)]
        if far and row.kind == "variable" and len(found) < _SENTENCES:
            has, most = ("has", "") if len(far) == 1 else ("have", "up to ")
            usual = _amount(row.usual) if row.usual else "none"
            found.append(f"{name_ranks(far)} {has} {most}{_amount(max(row.sizes))} in {row.name}, others have {usual}.")
    if partial := [rank for rank, report in reports.items() if report.partial]:
        found.append(f"{name_ranks(partial)}: not all objects were looked at, there are too many.")
    return found


def _without(reports: Reports, nprocs: int) -> list[str]:
    """Why ranks have no report."""
    silent = [rank for rank in range(nprocs) if rank not in reports]
    why = "no answer; ended, stopped, or in native code that holds Python's lock"
    return [f"{name_ranks(silent)}: {why}."] if silent else []


def _summaries(reports: Reports) -> list[tuple[str, str]]:
    """What torch's allocator says of each GPU, with a heading."""
    return [
        (f"torch's allocator, rank {rank}, {device.name}", device.summary)
        for rank, report in reports.items()
        for device in report.devices
    ][:_SUMMARIES]


def _indent(row: Row, by: str) -> str:
    return by if row.kind == "part" else ""


def _amounts(row: Row, indexes: Sequence[int]) -> str:
    """'40 MB'; '40 MB-1.2 GB' of ranks that are not alike."""
    sizes = [row.sizes[index] for index in indexes]
    least, most = min(sizes), max(sizes)
    return f"{_amount(least)}-{_amount(most)}" if _is_far(most, least) else _amount(median_low(sizes))


def _marked(row: Row, indexes: Sequence[int]) -> str:
    amounts = _amounts(row, indexes)
    return f"<b>{amounts}</b>" if any(map(row.stands_out, indexes)) else amounts


def _amount(count: int) -> str:
    if count >= 999_500:
        return size(count)
    return f"{count / 1e3:.0f} kB" if count >= 1000 else f"{count} B" if count else "-"


def _is_far(more: int, less: int) -> bool:
    return more > _FAR * less and more - less > _FAR_BYTES
