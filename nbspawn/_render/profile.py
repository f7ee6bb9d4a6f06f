"""Where the time went, drawn: the timeline, and the cell's source with each line's share of every rank's time.

A straggler is a rank whose share at a line is far from its peers'; what a rank waited for the others, or for its GPU,
is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from nbspawn._protocol.frames import Frame
from nbspawn._render import timeline
from nbspawn._render.html import BOX, FOLD, QUIET
from nbspawn._render.text import cell, clip
from nbspawn._state.line_profile import Line, Profile, unfold
from nbspawn._state.snapshot import Snapshot

LEAST_SECONDS = 1.0  # a shorter run has been looked at too seldom
_LEAST_SHARE = 0.01  # of a rank's time
_LEAST_BELOW = 0.05  # the same of what a line calls
_MAX_RANKS = 8  # more are summed up as their least, their middle and their most
_MAX_LINES = 60  # of a longer cell only the lines that took time are shown
_LONGEST = 200  # columns of code in HTML

_TABLE = "border:0;border-collapse:collapse;font-size:inherit;font-variant-numeric:tabular-nums;margin:6px 0"
_CELL = "border:0;padding:0 8px;text-align:right;white-space:nowrap"
_SHARE = f"{_CELL};width:4.2em;min-width:4.2em;box-sizing:content-box"
_EMPTY = '<td style="border:0"></td>'
_CODE = "border:0;padding:0 0 0 10px;text-align:left;font-family:var(--jp-code-font-family,monospace);white-space:pre"
_SWATCH = "display:inline-block;width:.8em;height:.8em;margin:0 8px 0 0;float:left"


@dataclass(frozen=True)
class _Row:
    number: str
    shares: tuple[str, ...]
    weights: tuple[float, ...]
    """Of the shares: how much of its colour a cell has, 0 to 1."""
    code: str
    depth: int = 0
    frame: Frame | None = None


def worth_showing(profile: Profile) -> bool:
    """Has any rank run for long enough?"""
    return max(profile.totals.values(), default=0.0) >= LEAST_SECONDS


def text(profile: Profile, snapshot: Snapshot, width: int = 100) -> str:
    """The timeline, which takes up to 80 columns, and a table of at most ``width`` columns and one line a row."""
    columns = ["line", *_headings(profile)]
    drawn = list(_rows(profile, snapshot))
    widths = [
        max(len(name), *(len((row.number, *row.shares)[index]) for row in drawn)) for index, name in enumerate(columns)
    ]
    key = timeline.key(profile)
    head = "  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))
    lines = [_title(profile), *timeline.text(profile, snapshot), f"   {head}"]
    for row in drawn:
        numbers = "  ".join(share.rjust(width) for share, width in zip((row.number, *row.shares), widths, strict=True))
        letter = key.letter(row.frame) if row.frame in key.lines else " "
        lines.append(f"{letter}  {numbers}  {clip(row.code, max(1, width - len(numbers) - 5))}".rstrip())
    return "\n".join(lines)


def html(profile: Profile, snapshot: Snapshot, open_: bool, name: str) -> str:
    """A fold, ``open_`` from the start or not; reads without styles. ``name`` is unique in the page."""
    key = timeline.key(profile)
    names = "".join(f'<th style="{_SHARE};font-weight:normal" align="right">{name}</th>' for name in _headings(profile))
    rows = []
    for row in _rows(profile, snapshot):
        swatch = f'<span style="{_SWATCH};background:{key.colour(row.frame)}"></span>' if row.frame in key.lines else ""
        shares = "".join(
            f'<td style="{_CELL}{_heat(weight)}" align="right">{_aligned(share)}</td>' if share else _EMPTY
            for share, weight in zip(row.shares, row.weights, strict=True)
        )
        quiet = f";color:{QUIET}" if row.depth else ""
        rows.append(
            f'<tr style="background:none"><td style="{_CELL};color:{QUIET}" align="right">{swatch}{row.number}</td>'
            f'{shares}<td style="{_CODE}{quiet}">{escape(clip(row.code, _LONGEST)) or " "}</td></tr>'
        )
    return (
        f'<details{" open" if open_ else ""} style="{BOX};overflow-x:auto">'
        f'<summary style="{FOLD}">{_title(profile)}</summary>'
        f'<div style="margin:6px 0">{timeline.html(profile, snapshot, name)}</div>'
        f'<table style="{_TABLE}"><thead><tr style="color:{QUIET}">'
        f'<th style="{_CELL};font-weight:normal" align="right">line</th>{names}<th></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></details>"
    )


def _title(profile: Profile) -> str:
    device = "; dark, °, g: for its GPU" if any(line.device for line in profile.lines.values()) else ""
    return f"Where the time went, by rank (grey, ·, w: waiting for other ranks{device})"


def _aligned(share: str) -> str:
    """The numbers are below one another, with the letter and without it."""
    number, _, letter = share.partition(" % ")
    letter = letter and f" {letter}"
    return f'{number}{" %" * bool(letter)}<span style="display:inline-block;width:1.2em">{letter}</span>'


def _heat(share: float) -> str:
    return f";background:rgba(224,120,20,{0.7 * min(share, 1.0):.2f})" if share >= _LEAST_SHARE else ""


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
        yield _row(profile, line, str(above), _code(snapshot, line.frame), frame=line.frame)
        for depth, lower in unfold(line, _LEAST_BELOW * max(profile.totals.values())):
            assert lower.frame is not None
            where = f"{lower.frame.name}, line {lower.frame.line}: {cell(snapshot.text(lower.frame))}"
            yield _row(profile, lower, "", "  " * depth + where, depth)


def _order(line: Line) -> tuple[bool, str, int]:
    return (True, "", 0) if line.frame is None else (False, line.frame.file, line.frame.line)


def _code(snapshot: Snapshot, frame: Frame) -> str:
    """The line's code, with its indentation where it is the cell's."""
    run = snapshot.run
    if frame.file == run.cell and frame.line <= len(run.source):
        line = run.source[frame.line - 1].expandtabs(4)
        return " " * (len(line) - len(line.lstrip(" "))) + cell(line)
    return cell(snapshot.source(frame))


def _row(profile: Profile, line: Line, number: str, code: str, depth: int = 0, frame: Frame | None = None) -> _Row:
    ranks = sorted(profile.totals)
    shares = {rank: line.seconds.get(rank, 0.0) / profile.totals[rank] for rank in ranks if profile.totals[rank]}
    told = {rank: _share(shares[rank], line, rank) for rank in shares}
    if len(ranks) <= _MAX_RANKS:
        texts = tuple(told.get(rank, "") for rank in ranks)
        return _Row(number, texts, tuple(shares.get(rank, 0.0) for rank in ranks), code, depth, frame)
    order = sorted(shares, key=lambda rank: shares[rank])
    picked = (order[0], order[len(order) // 2], order[-1])
    texts = tuple(told[rank] for rank in picked)
    most = str(order[-1]) if texts[-1] else ""
    return _Row(number, (*texts, most), (*(shares[rank] for rank in picked), 0.0), code, depth, frame)


def _share(share: float, line: Line, rank: int) -> str:
    if share < _LEAST_SHARE:
        return ""
    half = line.seconds[rank] / 2
    mark = " w" if line.waiting.get(rank, 0.0) >= half else " g" if line.device.get(rank, 0.0) >= half else ""
    return f"{share:.0%}".replace("%", " %") + mark
