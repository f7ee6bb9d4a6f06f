"""The ranks' last collectives, group by group, and what is wrong with them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from nbspawn._render import grid
from nbspawn._render.html import FOLD
from nbspawn._render.report import Report
from nbspawn._render.text import clip
from nbspawn._state.collectives import Group, Reports, alike, findings, groups, tensors_of
from nbspawn._state.run import Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.whereabouts import line_of
from nbspawn._state.wording import few_ranges

_NUMBERS = 6  # of one group: the last ones, and those that ranks are in
_GROUPS = 8
_WIDTH = 120
_RANKS = 24  # columns


class _Row(NamedTuple):
    """``state`` says which ranks are in the call, have passed it or have not reached it."""

    number: str
    call: str
    line: str
    state: str


_NO_GROUP = "The ranks are in no process group."
_NOT_ONE = "The ranks have made groups each for itself, or with processes of other runs: there is nothing to compare."
_NO_CALLS = "No calls are recorded in the ranks' process groups."


def report(title: str, reports: Reports, snapshot: Snapshot) -> Report:
    """A report with what is wrong under its ``title``, and a table for each group."""
    wrong = findings(snapshot, reports)
    found = [group for group in groups(snapshot.run, reports) if any(group.calls.values())]
    tables = [(group, list(_rows(snapshot.run, group))) for group in found[:_GROUPS]]
    silent = [rank.rank for rank in snapshot.run.ranks if rank.rank not in reports and rank.state != "idle"]
    notes = []
    if len(found) > _GROUPS:
        notes.append(f"and {len(found) - _GROUPS} more groups.")
    if not found:
        notes.append(_why_nothing(reports))
    elif silent:
        named = few_ranges(silent, _RANKS)
        notes.append(
            f"Of rank{'s' * (len(silent) > 1)} {named} nothing is known: ended, in no group, or without an answer."
        )
    return Report(_text(title, wrong, tables, notes), _html(title, wrong, tables, notes))


def _why_nothing(reports: Reports) -> str:
    of_ranks = [group for report in reports.values() for group in report.groups]
    if any(group.calls for group in of_ranks):
        return _NOT_ONE
    return _NO_CALLS if of_ranks else _NO_GROUP


def _rows(run: Run, group: Group) -> Iterator[_Row]:
    numbers = sorted({number for calls in group.calls.values() for number in calls})
    pending = [number for number in numbers if any(call.pending for call in group.at(number).values())]
    shown = sorted({*numbers[-_NUMBERS:], *pending[:_NUMBERS]})
    for number in shown:
        at = group.at(number)
        kinds = alike(at)
        for index, (call, ranks) in enumerate(kinds):
            inside = [rank for rank in ranks if at[rank].pending]
            missing = [rank for rank in group.calls if rank not in at and group.last(rank) < number]
            parts = []
            if inside:
                parts.append(f"{_ranks(group, inside)} in it")
            if len(inside) < len(ranks):
                passed = [rank for rank in ranks if rank not in inside]
                parts.append("done" if len(passed) == len(group.members) else f"{_ranks(group, passed)} done")
            if missing and index == 0:
                parts.append(f"{_ranks(group, missing)} not there yet")
            mark = "≠ " if len(kinds) > 1 else ""
            described = f"{mark}{call.name} {tensors_of(call)}".strip()
            yield _Row(str(number), described, line_of(run, call.frames), ", ".join(parts))


def _ranks(group: Group, ranks: Sequence[int]) -> str:
    if len(ranks) == len(group.members) > 1:
        return "all"
    return f"rank{'s' * (len(ranks) > 1)} {few_ranges(ranks, _RANKS)}"


def _text(title: str, wrong: Sequence[str], tables: Sequence[tuple[Group, list[_Row]]], notes: Sequence[str]) -> str:
    lines = [title, *wrong]
    for group, rows in tables:
        lines += ["", group.label[0].upper() + group.label[1:]]
        lines += [f"  {clip(line, _WIDTH)}" for line in grid.text(rows, "rlll")]
    return "\n".join([*lines, *([""] * bool(notes and tables)), *notes])


def _html(title: str, wrong: Sequence[str], tables: Sequence[tuple[Group, list[_Row]]], notes: Sequence[str]) -> str:
    parts = [f'<details open><summary style="{FOLD}"><b>{escape(title)}</b></summary>']
    parts += [f"<div><b>{escape(sentence)}</b></div>" for sentence in wrong]
    for group, rows in tables:
        parts.append(f"<div>{escape(group.label[0].upper() + group.label[1:])}</div>")
        styles = (grid.FAINT, grid.CODE, grid.FAINT, "")
        drawn = [[grid.cell(escape(text), "l", style) for text, style in zip(row, styles, strict=True)] for row in rows]
        parts.append(grid.html(drawn))
    parts += [f'<div style="{grid.FAINT}">{escape(note)}</div>' for note in notes]
    return grid.box(*parts, "</details>")
