"""A rank's plain traceback as the notebook shows its own: with the names and the lines of the notebook's cells. Pure.

A rank that runs a function does not have the cells' sources; the kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nbspawn._protocol.frames import Frame
from nbspawn._state.run import Source

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<name>.*))?')


def in_cells(traceback: str, names: Mapping[str, str], source: Source) -> tuple[str, ...]:
    """The lines of the traceback. ``names`` are IPython's for the cells ('Cell In[5]'), by file name."""
    found = []
    lines = traceback.splitlines()
    for index, line in enumerate(lines):
        frame = _FRAME.fullmatch(line)
        if frame is None or frame["file"] not in names:
            found.append(line)
            continue
        function = frame["name"] or "<module>"
        found.append(f"  {names[frame['file']]}, line {frame['line']}, in {function}")
        has_source = lines[index + 1 : index + 2] and lines[index + 1].startswith("    ")
        if not has_source and (text := source(Frame(frame["file"], int(frame["line"]), function))):
            found.append(f"    {text}")
    return tuple(found)
