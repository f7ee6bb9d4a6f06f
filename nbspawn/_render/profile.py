"""Where the time went, drawn: the cell's source with each line's share of every rank's time, as text and as HTML.

A straggler is a rank whose share at a line is far from its peers'; what a rank waited for the others is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from nbspawn._protocol.frames import Frame
from nbspawn._render.html import BOX
from nbspawn._render.text import cell, clip
from nbspawn._state.line_profile import Line, Profile, unfold
from nbspawn._state.snapshot import Snapshot

LEAST_SECONDS = 1.0  # a shorter run has been looked at too seldom
_LEAST_SHARE = 0.01  # of a rank's time
_MAX_RANKS = 8  # more are summed up as their least, their middle and their most
_MAX_LINES = 60  # of a longer cell only the lines that took time are shown
_WIDTH = 100

_QUIET = "var(--jp-ui-font-color2,#888)"
_FOLD = "display:list-item"  # with its triangle, which classic Notebook takes away
_TABLE = "border:0;border-collapse:collapse;font-size:inherit;font-variant-numeric:tabular-nums;margin:2px 0"
_CELL = "border:0;padding:0 10px 0 0;text-align:right;white-space:nowrap"
_CODE = "border:0;padding:0 0 0 10px;text-align:left;font-family:var(--jp-code-font-family,monospace);white-space:pre"


@dataclass(frozen=True)
class _Row:
    number: str
    shares: tuple[str, ...]
    weights: tuple[float, ...]
    """How much of the cell's background is filled, 0 to 1."""
    code: str
    depth: int = 0


def worth_showing(profile: Profile) -> bool:
    """Has any rank run for long enough?"""
    return max(profile.totals.values(), default=0.0) >= LEAST_SECONDS


def text(profile: Profile, snapshot: Snapshot) -> str:
    """A table of at most 100 columns and one line a row."""
    columns = ["line", *_headings(profile)]
    drawn = list(_rows(profile, snapshot))
    widths = [
        max(len(name), *(len((row.number, *row.shares)[index]) for row in drawn)) for index, name in enumerate(columns)
    ]
    lines = [_TITLE, "  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))]
    for row in drawn:
        numbers = "  ".join(share.rjust(width) for share, width in zip((row.number, *row.shares), widths, strict=True))
        lines.append(f"{numbers}  {clip(row.code, _WIDTH - len(numbers) - 2)}".rstrip())
    return "\n".join(lines)


def html(profile: Profile, snapshot: Snapshot, open_: bool) -> str:
    """A fold, ``open_`` from the start or not; reads without styles."""
    rows: list[str] = []
    drawn = list(_rows(profile, snapshot))
    for index, row in enumerate(drawn):
        if row.depth:
            continue  # in the fold of its line
        below = []
        for lower in drawn[index + 1 :]:
            if not lower.depth:
                break
            below.append(lower)
        code = escape(row.code) or " "
        if below:
            lines = "\n".join(f"{' · '.join(filter(None, lower.shares)):>12}  {escape(lower.code)}" for lower in below)
            code = (
                f'<details><summary style="{_FOLD}">{code}</summary>'
                f'<pre style="margin:0;color:{_QUIET}">{lines}</pre></details>'
            )
        numbers = "".join(
            f'<td style="{_CELL}{_bar(weight)}" align="right">{share}</td>'
            for share, weight in zip(row.shares, row.weights, strict=True)
        )
        rows.append(
            f'<tr style="background:none"><td style="{_CELL};color:{_QUIET}" align="right">{row.number}</td>{numbers}'
            f'<td style="{_CODE}">{code}</td></tr>'
        )
    names = "".join(f'<th style="{_CELL};font-weight:normal" align="right">{name}</th>' for name in _headings(profile))
    return (
        f'<details{" open" if open_ else ""} style="{BOX}"><summary style="{_FOLD}">{_TITLE}</summary>'
        f'<table style="{_TABLE}"><thead><tr style="color:{_QUIET}">'
        f'<th style="{_CELL};font-weight:normal">line</th>{names}<th></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></details>"
    )


_TITLE = "Where the time went, by rank (w: of it, waiting for other ranks)"


def _bar(share: float) -> str:
    if share < _LEAST_SHARE:
        return ""
    end = f"{min(share, 1.0):.0%}"
    return f";background:linear-gradient(to left,rgba(128,128,128,.28) {end},transparent {end})"


def _headings(profile: Profile) -> list[str]:
    ranks = sorted(profile.totals)
    return [f"rank {rank}" for rank in ranks] if len(ranks) <= _MAX_RANKS else ["least", "middle", "most", "of rank"]


def _rows(profile: Profile, snapshot: Snapshot) -> Iterator[_Row]:
    run = snapshot.run
    lines = dict(profile.lines)
    least = _LEAST_SHARE * max(profile.totals.values())
    whole = run.cell is not None and len(run.source) <= _MAX_LINES
    if whole:
        for number in range(1, len("\n".join(run.source).rstrip().split("\n")) + 1):
            frame = Frame(run.cell or "", number, "")
            lines.setdefault(frame, Line(frame))
    else:
        lines = {frame: line for frame, line in lines.items() if max(line.seconds.values()) >= least}
    above = 0
    for line in sorted(lines.values(), key=_order):
        if line.frame is None:
            if max(line.seconds.values()) >= least:
                yield _row(profile, line, "", "(outside of the cell's code)")
            continue
        if not whole and above and line.frame.line != above + 1:
            blank = len(_headings(profile))
            yield _Row("…", ("",) * blank, (0.0,) * blank, "")
        above = line.frame.line
        yield _row(profile, line, str(above), _code(snapshot, line.frame))
        for depth, lower in unfold(line, least):
            assert lower.frame is not None
            where = f"{lower.frame.name}, line {lower.frame.line}: {cell(snapshot.text(lower.frame))}"
            yield _row(profile, lower, "", "  " * depth + where, depth)


def _order(line: Line) -> tuple[bool, str, int]:
    return (True, "", 0) if line.frame is None else (False, line.frame.file, line.frame.line)


def _code(snapshot: Snapshot, frame: Frame) -> str:
    """With its indentation, where it is the cell's."""
    run = snapshot.run
    if frame.file == run.cell and frame.line <= len(run.source):
        return run.source[frame.line - 1].rstrip().expandtabs(4)
    return cell(snapshot.source(frame))


def _row(profile: Profile, line: Line, number: str, code: str, depth: int = 0) -> _Row:
    ranks = sorted(profile.totals)
    shares = {rank: line.seconds.get(rank, 0.0) / profile.totals[rank] for rank in ranks if profile.totals[rank]}
    waits = {rank: line.waiting.get(rank, 0.0) / profile.totals[rank] for rank in shares}
    if len(ranks) <= _MAX_RANKS:
        texts = tuple(_share(shares.get(rank, 0.0), waits.get(rank, 0.0)) for rank in ranks)
        return _Row(number, texts, tuple(shares.get(rank, 0.0) for rank in ranks), code, depth)
    order = sorted(shares, key=lambda rank: shares[rank])
    picked = (order[0], order[len(order) // 2], order[-1])
    texts = tuple(_share(shares[rank], waits[rank]) for rank in picked)
    most = str(order[-1]) if texts[-1] else ""
    return _Row(number, (*texts, most), (*(shares[rank] for rank in picked), 0.0), code, depth)


def _share(share: float, waiting: float) -> str:
    if share < _LEAST_SHARE:
        return ""
    return f"{share:.0%}".replace("%", " %") + (" w" if waiting >= share / 2 else "")
