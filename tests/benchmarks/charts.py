"""Charts as SVG: plain, with one grey for all text, which can be read on white and on black."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from samples import shown

TEXT, GRID, OURS, OTHERS = "#787878", "#78787840", "#2f7fd1", "#909090"
WIDTH = 680


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *body, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{more}/>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def dots(title: str, rows: Mapping[str, Sequence[float] | str], unit: str, ours: str) -> str:
    """A row for each series, on a logarithmic axis: a dot at the median, a line from the least to the greatest. Text
    stands where there are no samples."""
    left, right, top, step = 175.0, WIDTH - 85.0, 48.0, 25.0
    values = [value for row in rows.values() if not isinstance(row, str) for value in row]
    bottom = top + step * len(rows)
    body = [_text(0, 16, title, more=' font-weight="600"')]
    if values:
        low, high = _decades(values)
        scale = (right - left) / (high - low)
        for decade in range(low, high + 1):
            x = left + scale * (decade - low)
            body.append(_line(x, top - 8, x, bottom, GRID))
            body.append(_text(x, top - 14, tick(10.0**decade, unit), "middle", ' font-size="11"'))
    for number, (name, row) in enumerate(rows.items()):
        y = top + step * (number + 0.5)
        bold = ' font-weight="600"' if name == ours else ""
        body.append(_text(left - 12, y + 4, name, "end", bold))
        if isinstance(row, str):
            body.append(_text(left + 6, y + 4, row, more=' font-style="italic"'))
            continue
        least, middle, most = (
            left + scale * (math.log10(value) - low) for value in (min(row), statistics.median(row), max(row))
        )
        colour = OURS if name == ours else OTHERS
        body.append(_line(least, y, most, y, colour, ' stroke-width="2"'))
        body.append(f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        body.append(_text(max(most, middle + 5) + 7, y + 4, shown(statistics.median(row), unit), more=bold))
    return _svg(bottom + 6, title, body)


def tick(value: float, unit: str) -> str:
    """A power of ten, as short as can be."""
    number, _, name = shown(value, unit).partition(" ")
    return f"{float(number.replace(',', '')):,g} {name}"


def growth(title: str, label: str, lines: Mapping[str, Mapping[int, float]], ours: str) -> str:
    """A line for each series over a number of ranks, both axes logarithmic. A name that ends in ``, whole cell`` is
    dashed."""
    left, right, top, bottom = 70.0, WIDTH - 20.0, 40.0 + 18 * len(lines), 330.0 + 18 * len(lines)
    body = [_text(0, 16, title, more=' font-weight="600"')]
    counts = sorted({count for line in lines.values() for count in line})
    values = [value for line in lines.values() for value in line.values()]
    if not values:
        return _svg(40, title, [*body, _text(0, 36, "not measured", more=' font-style="italic"')])
    low, high = _decades(values)
    first, last = math.log2(counts[0]), max(math.log2(counts[-1]), math.log2(counts[0]) + 1)

    def x(count: int) -> float:
        return left + (right - left) * (math.log2(count) - first) / (last - first)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (math.log10(value) - low) / (high - low)

    for decade in range(low, high + 1):
        body.append(_line(left, y(10.0**decade), right, y(10.0**decade), GRID))
        body.append(_text(left - 8, y(10.0**decade) + 4, tick(10.0**decade, "s"), "end", ' font-size="11"'))
    for count in counts:
        body.append(_line(x(count), top, x(count), bottom, GRID))
        body.append(_text(x(count), bottom + 18, str(count), "middle", ' font-size="11"'))
    body.append(_text((left + right) / 2, bottom + 38, label, "middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = OURS if name.startswith(ours) else OTHERS
        dashes = ' stroke-dasharray="6 4"' if name.endswith(", whole cell") else ""
        points = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, value in sorted(line.items()))
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        body += [
            f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}"/>'
            for count, value in sorted(line.items())
        ]
        at = 38.0 + 18 * number
        body.append(_line(left, at - 4, left + 34, at - 4, colour, f' stroke-width="2"{dashes}'))
        body.append(_text(left + 42, at, name))
    return _svg(bottom + 46, title, body)
