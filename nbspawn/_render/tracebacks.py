"""A rank's plain traceback as the notebook shows its own: with the names and the lines of the notebook's cells. Pure.

A rank that runs a function does not have the cells' sources; the kernel does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from nbspawn._protocol.frames import Frame
from nbspawn._state.run import Source

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<name>.*))?')


def in_cells(traceback: str, names: Mapping[str, str], source: Source) -> tuple[str, ...]:
    """The lines of the traceback. ``names`` are IPython's for the cells ('Cell In[5]'), by file name."""
    found = []
    lines = traceback.splitlines()
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        frame = _FRAME.fullmatch(line)
        if frame is None:
            found.append(line)
            continue
        place = Frame(frame["file"], int(frame["line"]), frame["name"] or "<module>")
        found.append(f"  {names[place.file]}, line {place.line}, in {place.name}" if place.file in names else line)
        if not following.startswith("    ") and (text := source(place)):
            found.append(f"    {text}")
    return tuple(found)
