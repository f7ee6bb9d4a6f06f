"""Numbers that ranks have printed by name, drawn as curves: an image within the HTML, as the timeline is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from urllib.parse import quote

from nbspawn._render.html import BOX, QUIET
from nbspawn._render.text import duration
from nbspawn._render.timeline import COLOURS
from nbspawn._state.curves import Course, Curves
from nbspawn._state.run import Run
from nbspawn._state.wording import few_ranges

_WIDTH, _HEIGHT = 330, 122  # pixels of one picture
_TOP, _BOTTOM, _LEFT = 32, 106, 4
_TEXT = "#808080"  # legible on white and on black: an image does not know the theme
_UNQUOTED = " ='/:;,.()+-*!?"
_RANKS = 16  # columns of their numbers
_NAMED = 8  # of those that are not drawn


def html(curves: Curves, run: Run) -> str:
    """A picture for each number, and the names of those that have none; '' if there is none."""
    pictures = "".join(
        f'<img alt="{escape(_told(name, ranks))}" style="display:inline-block;max-width:100%;margin:4px 16px 0 0" '
        f'width="{_WIDTH}" height="{_HEIGHT}" '
        f'src="data:image/svg+xml,{quote("".join(_svg(name, ranks, run)), safe=_UNQUOTED)}">'
        for name, ranks in curves.drawn.items()
    )
    left_out = curves.left_out
    named = f"not drawn: {', '.join(left_out[:_NAMED])}{', …' * (len(left_out) > _NAMED)}"
    return pictures + (f'<div style="{BOX};color:{QUIET}">{escape(named)}</div>' if left_out else "")


def _told(name: str, ranks: Mapping[int, Course]) -> str:
    """'loss of ranks 0-3: 0.912 to 0.314', of the lowest rank."""
    course = next(iter(ranks.values()))
    values, last = course.values, course.last
    return f"{name} of rank{'s' * (len(ranks) > 1)} {few_ranges(ranks, _RANKS)}: {values[0]:.4g} to {last:.4g}"


def _svg(name: str, ranks: Mapping[int, Course], run: Run) -> Iterator[str]:
    """Single quotes only: it is to be an attribute."""
    end = max(course.times[-1] for course in ranks.values())
    begin = min(course.times[0] for course in ranks.values())
    low, high = min(course.least for course in ranks.values()), max(course.most for course in ranks.values())
    across = (_WIDTH - 2 * _LEFT) / (end - begin or 1.0)
    up = (_BOTTOM - _TOP - 2) / (high - low or 1.0)
    yield (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}' fill='{_TEXT}' "
        "font-family='system-ui,sans-serif' font-size='11'>"
    )
    yield f"<path d='M0 {_TOP}h{_WIDTH}M0 {_BOTTOM}h{_WIDTH}' stroke='{_TEXT}' stroke-opacity='.25'/>"
    last = [course.last for course in ranks.values()]
    now = f"{last[0]:.4g}" if len(set(last)) == 1 else f"{min(last):.4g}–{max(last):.4g}"
    if odd := [rank for rank, course in ranks.items() if not math.isfinite(course.last)]:
        now = f"{ranks[odd[0]].last} in rank{'s' * (len(odd) > 1)} {few_ranges(odd, _RANKS)}"
    of = f" of ranks {few_ranges(ranks, _RANKS)}" if len(run.ranks) > len(ranks) else ""
    yield f"<text x='0' y='12'><tspan font-weight='bold'>{escape(name)}</tspan>{of}  {now}</text>"
    yield f"<text x='{_WIDTH}' y='12' text-anchor='end'>min {low:.4g}, max {high:.4g}</text>"
    same = len({(*course.values,) for course in ranks.values()}) == 1 and len(ranks) > 1
    for index, course in enumerate(list(ranks.values())[: 1 if same else None]):
        points = " ".join(
            f"{_LEFT + (time - begin) * across:.0f},{_BOTTOM - 1 - (value - low) * up:.0f}"
            for time, value in zip(course.times, course.values, strict=True)
        )
        yield f"<polyline fill='none' stroke='{COLOURS[index]}' stroke-width='1.5' points='{points}'/>"
    for x, anchor, time in ((0, "start", begin), (_WIDTH, "end", end)):
        at = duration(time - run.started)
        yield f"<text x='{x}' y='{_HEIGHT - 3}' text-anchor='{anchor}'>{at}</text>"
    if len(run.ranks) > 1:
        yield from _legend(ranks, same)
    yield "</svg>"


def _legend(ranks: Mapping[int, Course], same: bool) -> Iterator[str]:
    """The ranks' numbers in their colours, at the right."""
    if same:
        yield f"<text x='{_WIDTH}' y='26' text-anchor='end'>ranks {few_ranges(ranks, _RANKS)}</text>"
        return
    for index, rank in enumerate(ranks):
        x = _WIDTH - 14 * (len(ranks) - 1 - index)
        yield f"<text x='{x}' y='26' text-anchor='end' fill='{COLOURS[index]}'>{rank}</text>"
