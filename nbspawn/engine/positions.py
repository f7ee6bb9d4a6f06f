"""Where ranks stand, from the stacks that they wrote (rank/stacks.py): a line of the cell, and the call it is in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nbspawn.status import name_ranks

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Position:
    """``line`` is the cell's (1-based) if the stack passes through the cell; ``call`` the innermost function, and
    ``where`` its file and line."""

    line: int | None
    call: str
    where: str

    def __str__(self) -> str:
        if self.line is None:
            return f"in {self.call} ({self.where})" if self.where else "not in the cell's code"
        return f"at line {self.line}" + ("" if self.call.startswith("<") else f", in {self.call}")


def read(path: Path, cell: str | None) -> Position | None:
    """The newest stack in ``path``; None if there is none yet."""
    try:
        text = path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return None
    frames = _frames(text)
    if cell is None or not frames:
        return innermost(text)
    in_cell = [frame for frame in frames if frame["file"] == cell]
    return Position(int(in_cell[0]["line"]), frames[0]["name"], "") if in_cell else Position(None, "", "")


def innermost(text: str) -> Position | None:
    """The function at the top of the last stack in what faulthandler wrote; None if there is none."""
    frames = _frames(text)
    if not frames:
        return None
    return Position(None, frames[0]["name"], f"{Path(frames[0]['file']).name}, line {frames[0]['line']}")


def _frames(text: str) -> list[dict[str, str]]:
    return [match.groupdict() for match in _FRAME.finditer(text.rpartition("hread 0x")[2])]


def crash(path: Path) -> str:
    """The stack of a rank that crashed, as faulthandler wrote it, without the frames that are not the person's."""
    try:
        text = path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""
    lines = text.partition("\n\nExtension modules:")[0].splitlines()
    ours = [number for number, line in enumerate(lines) if any(part in line for part in _BELOW_THE_PERSON)]
    return "\n".join(lines[: ours[0]] if ours else lines)


_BELOW_THE_PERSON = (f"{os.sep}IPython{os.sep}core{os.sep}interactiveshell.py", f"{os.sep}nbspawn{os.sep}rank{os.sep}")


def sentences(positions: Mapping[int, Position], ending: str) -> list[str]:
    """One sentence for each group of ranks that stood at the same place: 'Ranks 0 and 3 were at line 12, in wait.'"""
    groups: dict[Position, list[int]] = {}
    for rank, position in sorted(positions.items()):
        groups.setdefault(position, []).append(rank)
    told = []
    for position, ranks in groups.items():
        verb = "was" if len(ranks) == 1 else "were"
        told.append(f"{name_ranks(ranks)} {verb} {position}{f' and {verb} {ending}' if ending else ''}.")
    return told
