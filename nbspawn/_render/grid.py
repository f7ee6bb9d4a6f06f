"""Small tables: as lines of text, and as HTML that can be read without styles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbspawn._render.html import BOX, QUIET

CODE = "font-family:var(--jp-code-font-family,monospace)"
FAINT = f"color:{QUIET}"
_TABLE = "border:0;border-collapse:collapse;font-size:inherit;font-variant-numeric:tabular-nums;margin:2px 0"
_CELL = "border:0;padding:0 14px 0 0;vertical-align:top;white-space:nowrap"


def text(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The lines of a table. ``sides`` has an 'l' or an 'r' for each column, by which it is aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if side == 'l' else '>'}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*row).rstrip() for row in rows]


def html(rows: Iterable[Iterable[str]]) -> str:
    """A table of cells; '' if it has no rows."""
    drawn = "".join(f'<tr style="background:none;height:20px">{"".join(row)}</tr>' for row in rows)
    return drawn and f'<table style="{_TABLE}">{drawn}</table>'


def cell(content: str, side: str = "l", style: str = "", tag: str = "td") -> str:
    """A cell of HTML ``content``, aligned to a side as in ``text``."""
    align = "left" if side == "l" else "right"
    return f'<{tag} align="{align}" style="{_CELL};text-align:{align}{style and f";{style}"}">{content}</{tag}>'


def head(content: str, side: str = "l") -> str:
    """A cell of the heading."""
    return cell(content, side, f"{FAINT};font-weight:normal", "th")


def box(*parts: str) -> str:
    """What stands under a cell."""
    return f'<div style="{BOX};overflow-x:auto;margin:2px 0 6px 0">{"".join(parts)}</div>'
