"""``%ranks auto on``: every later plain cell runs in kept ranks, as if ``%%ranks`` stood above it.

Cells that begin with ``%%`` stay in the notebook, and so do the line magics and ``!commands`` at the head of a cell:
``%pip install`` and ``!ls`` are wanted once. What follows them goes to the ranks.
"""

from __future__ import annotations

import os
from typing import Any


class AutoMode:
    """One of IPython's ``input_transformers_cleanup``; ``target`` is the name of the session, None while it is off."""

    has_side_effects = True
    """So IPython does not call it to find out whether a cell that is being typed is complete."""

    def __init__(self, shell: Any) -> None:
        self.target: str | None = None
        self._shell = shell
        self._pid = os.getpid()
        self._running = False  # a cell: what is transformed now is a part of it, such as the body of %%time
        shell.input_transformers_cleanup.append(self)
        shell.events.register("pre_execute", self._begins)
        shell.events.register("post_execute", self._ends)

    def unload(self) -> None:
        """Leave the shell as it was."""
        self._shell.input_transformers_cleanup.remove(self)
        self._shell.events.unregister("pre_execute", self._begins)
        self._shell.events.unregister("post_execute", self._ends)

    def _begins(self) -> None:
        self._running = True

    def _ends(self) -> None:
        self._running = False

    def __call__(self, lines: list[str]) -> list[str]:
        """The cell's lines, with those for the ranks as one call."""
        # A forked rank inherits the shell with everything in it.
        if self.target is None or self._running or os.getpid() != self._pid:
            return lines
        head = _local(lines)
        if not any(map(_says_something, lines[head:])):
            return lines
        body = "#\n" * head + "".join(lines[head:])  # with the line numbers that the person sees
        line = f"--auto @{self.target}" if self.target else "--auto"
        return [*lines[:head], f"get_ipython().run_cell_magic('ranks', {line!r}, {body!r})\n"]


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _local(lines: list[str]) -> int:
    """How many lines at the head of the cell stay in the notebook: all of a cell magic, else magics and commands."""
    head, continued = 0, False
    for number, line in enumerate(lines):
        if not continued:
            if line.startswith("%%"):
                return len(lines)
            if not _says_something(line):
                continue
            if not (line.startswith(("%", "!", "?")) or line.rstrip().endswith("?")):
                break
        head, continued = number + 1, line.rstrip().endswith("\\")
    return head
