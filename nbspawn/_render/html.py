"""A run as an HTML table: live under the cell, and still in the saved notebook.

It has to read in four places: JupyterLab and Notebook (their colours, by CSS variables), VS Code and Colab (none of
these variables, light or dark), GitHub and mail (no styles at all), and after a sanitizer. So: a plain table, inline
styles only, no script, no id, nothing from outside, and no colour without a word that means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbspawn._render.text import (
    GPU,
    LABEL_WIDTH,
    MARKS,
    MAX_ROWS,
    NODE_WIDTH,
    TREND,
    Row,
    clip,
    heading,
    numbers,
    ports,
    rows,
)
from nbspawn._state.run import Run, State
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.stall import stall
from nbspawn._state.wording import ranges

# Columns of text in a cell: more than any screen shows, and a bound for the size of the saved notebook.
_WIDTH = 160

# The fallbacks are legible on white and on black.
_COLOURS: dict[State, str] = {
    "failed": "var(--jp-error-color1,#e0483e)",
    "waiting for input": "var(--jp-warn-color1,#d97a00)",
    "debugging": "var(--jp-warn-color1,#d97a00)",
    "paused": "var(--jp-warn-color1,#d97a00)",
    "waiting": "var(--jp-info-color1,#00838f)",
    "running": "var(--jp-brand-color1,#3b8eea)",
    "done": "var(--jp-success-color1,#3a9d44)",
}
QUIET = "var(--jp-ui-font-color2,#888)"
FOLD = "display:list-item"  # with its triangle, which classic Notebook takes away

_WIDTHS = {
    "time": "4.5em",
    "peak": "4.5em",
    "device peak": "7em",
    "cpu": "3.2em",
    "memory": "4.5em",
    TREND: "3.7em",
    "device": "4.5em",
    GPU: "10em",
}
_FROM = {"cpu": 560, "memory": 700, TREND: 800, GPU: 900}
"""Pixels of the output from which on a column is there: below, the line of code needs its room."""
_SHORT = 20  # characters of a line of code, where it is not known
_UNTOLD = "clamp(0px,100cqw - 480px,14em)"  # of the last lines' column while there is none: the code has its room

# Front ends style tables of their own accord (JupyterLab: right-aligned, zebra; classic Notebook: border-box), hence
# much that looks obvious.
BOX = (
    "color:var(--jp-ui-font-color1,inherit);font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
    "font-size:var(--jp-ui-font-size1,13px);line-height:20px"
)
_LINE = "height:20px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
_TABLE = (
    "border:0;border-collapse:collapse;font-size:inherit;font-variant-numeric:tabular-nums;margin:2px 0;"
    "min-width:300px;table-layout:fixed;width:100%"
)
_ROW = "background:none;height:20px"
_CELL = "padding:0 12px 0 0;white-space:nowrap"
_HEAD = "box-sizing:content-box;font-weight:normal;overflow:hidden;text-overflow:ellipsis"
_WARNING = "color:var(--jp-warn-color0,#c60)"
# 'interrupted', of a run that is over; 'waiting for input', or 'waiting 1.2 s'; 'waiting for its GPU 1 min 20 s'
_END_STATE, _STATE, _GPU_STATE = "6.5em", "9em;width:clamp(8.2em,20cqw,9em)", "15.5em"
_MARK = "display:inline-block;width:1.2em"
_HIDES = "overflow:hidden"
_MEASURED = {name: _HIDES for name in _FROM} | {TREND: f"{_HIDES};font-size:75%"}  # blocks are up to 0.8 em wide
_CLIPPED = "overflow:hidden;text-overflow:ellipsis"
_CODE = "font-family:var(--jp-code-font-family,monospace);overflow:hidden;text-overflow:ellipsis;white-space:pre"


def brief(snapshot: Snapshot) -> str:
    """The heading as the whole table."""
    return f'<div style="{BOX}">{_heading(snapshot)}</div>'


def _heading(snapshot: Snapshot) -> str:
    ranks, how, time = heading(snapshot)
    banner = snapshot.run.banner
    how = escape(how)
    quiet = f'<span style="color:{QUIET}">{how}</span>'
    mark = f'<div style="{_LINE}"><b style="{_WARNING}">{escape(banner)}</b></div>' if banner else ""
    return f'{mark}<div style="{_LINE}" title="{how}"><b>{ranks}</b> · {time} · {quiet}</div>'


def table(snapshot: Snapshot, drawn: Sequence[Row] | None = None) -> str:
    """The run as HTML; every row is 20 px high, so that an update moves nothing. ``drawn`` as in ``text.table``."""
    run = snapshot.run
    drawn = rows(snapshot) if drawn is None else drawn
    live = not run.over
    nodes = any(row.node for row in drawn)
    columns = numbers(run, drawn)
    told = not live or any(row.text for row in drawn)
    why = escape(stall(snapshot))
    state = _END_STATE if run.over else _GPU_STATE if "device" in columns else _STATE
    label = LABEL_WIDTH + 2 if len(run.ranks) > MAX_ROWS else 5
    return "".join(
        [
            f'<div style="{BOX};overflow-x:auto;container-type:inline-size">',
            _heading(snapshot),
            f'<table style="{_TABLE}"><thead><tr style="{_ROW};color:{QUIET}">',
            _cell("th", "rank", "right", f"{_HEAD};width:{label}ch"),
            _cell("th", "node", "left", f"{_HEAD};width:{NODE_WIDTH}ch") if nodes else "",
            _cell("th", "state", "left", f"{_HEAD};width:{state}"),
            _cell("th", "at", "left", _HEAD + (_line_width(run) if told else "")) if live else "",
            *(_cell("th", name, "right", f"{_HEAD};width:{_WIDTHS[name]}{_narrow(name)}") for name in columns),
            _cell("th", "last line, result or error", "left", _HEAD + (f";width:{_UNTOLD}" if not told else "")),
            "</tr></thead><tbody>",
            *(
                _row(row, live, nodes, {name: column[index] for name, column in columns.items()})
                for index, row in enumerate(drawn)
            ),
            "</tbody></table>",
            # The line is there from the start: the output below must not jump when there is a sentence.
            f'<div style="min-height:20px">{why and f"<b>{why}</b>"}</div>' if live else "",
            *(f"<div>{escape(note)}</div>" for note in (ports(run), *run.notes) if note),
            "</div>",
        ]
    )


def _narrow(column: str) -> str:
    """The style of a column that is not there where the output is narrow."""
    if column not in _FROM:
        return ""
    room = f"(100cqw - {_FROM[column]}px)*99"
    return f";width:clamp(0px,{room},{_WIDTHS[column]});padding-right:clamp(0px,{room},12px)"


def _line_width(run: Run) -> str:
    """What the cell's longest line needs, and at most a third: the same from the first line that a rank has printed
    on, so that no column moves."""
    longest = max((len(line.strip()) for line in run.source), default=_SHORT)
    return f";width:min({max(longest + 5, 14)}ch,33cqw)"


def _row(row: Row, live: bool, nodes: bool, measured: dict[str, str]) -> str:
    colour = _COLOURS.get(row.state, QUIET)
    pid = row.ranks[0].pid
    whole = "ranks " + ranges(rank.rank for rank in row.ranks) if row.ranks[1:] else f"pid {pid}" if pid else ""
    state = f'<span style="color:{colour};{_MARK}">{MARKS[row.state]} </span>{row.state_text}'
    host = f'<tr style="{_ROW}">{_cell("th", escape(clip(row.host, _WIDTH)), "left", f"{_HEAD};overflow:visible")}</tr>'
    return (
        (host if row.host else "")
        + f'<tr style="{_ROW}" title="{clip(whole, _WIDTH)}">'
        + _cell("td", row.label, "right")
        + (_cell("td", escape(clip(row.node, NODE_WIDTH)), "left", _CLIPPED, row.node) if nodes else "")
        + _cell("td", f"<b>{state}</b>" if row.state == "failed" else state, "left", _HIDES)
        + (_cell("td", escape(clip(row.at, _WIDTH)), "left", _CODE, row.at) if live else "")
        + "".join(
            _cell("td", content, "left" if name == TREND else "right", _MEASURED.get(name, ""))
            for name, content in measured.items()
        )
        + _cell("td", escape(clip(row.text, _WIDTH)), "left", _CODE)
        + "</tr>"
    )


def _cell(tag: str, content: str, align: str, style: str = "", whole: str = "") -> str:
    # The attribute is for where styles are taken out: there th is centred and td left-aligned.
    attribute = "" if (tag, align) == ("td", "left") else f' align="{align}"'
    attribute += f' title="{escape(whole)}"' if whole else ""
    return f'<{tag}{attribute} style="{_CELL};text-align:{align}{";" + style if style else ""}">{content}</{tag}>'
