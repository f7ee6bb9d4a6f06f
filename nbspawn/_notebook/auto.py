"""``%ranks auto on``: every later plain cell runs in kept ranks, as if it began with ``%%ranks``.

Cells that begin with ``%%`` run in the notebook. So do the line magics and ``!commands`` at the top of a cell:
``%pip install`` and ``!ls`` should run once. What follows them runs in the ranks.
"""

from __future__ import annotations

import os
from typing import Any


class AutoMode:
    """Auto mode, as one of IPython's ``input_transformers_cleanup``; ``target`` is the name of the session, None while
    it is off."""

    has_side_effects = True
    """IPython then does not call it to check whether a cell that is being typed is complete."""

    def __init__(self, shell: Any) -> None:
        self.target: str | None = None
        self._shell = shell
        self._pid = os.getpid()
        self._running = False  # a cell runs: what is transformed now is a part of it, such as the body of %%time
        shell.input_transformers_cleanup.append(self)
        shell.events.register("pre_execute", self._begins)
        shell.events.register("post_execute", self._ends)

    def unload(self) -> None:
        """Unregister from the shell."""
        self._shell.input_transformers_cleanup.remove(self)
        self._shell.events.unregister("pre_execute", self._begins)
        self._shell.events.unregister("post_execute", self._ends)

    def _begins(self) -> None:
        self._running = True

    def _ends(self) -> None:
        self._running = False

    def _is_silent(self) -> bool:
        """Does a front end ask for something of its own, such as the variables to list? That is not a user's cell."""
        content = getattr(self._shell, "parent_header", None) or {}
        return bool(content.get("content", {}).get("silent"))

    def __call__(self, lines: list[str]) -> list[str]:
        """The cell's lines; those for the ranks become one call of ``%%ranks``."""
        # A forked rank inherits the shell with everything in it.
        if self.target is None or self._running or os.getpid() != self._pid or self._is_silent():
            return lines
        head = _notebook_lines(lines)
        if not any(map(_is_code, lines[head:])):
            return lines
        body = "#\n" * head + "".join(lines[head:])  # with the line numbers that the user sees
        line = f"--auto @{self.target}" if self.target else "--auto"
        return [*lines[:head], f"get_ipython().run_cell_magic('ranks', {line!r}, {body!r})\n"]


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _notebook_lines(lines: list[str]) -> int:
    """How many lines at the top of the cell run in the notebook: all of a cell magic, else magics and commands."""
    head, continued = 0, False
    for number, line in enumerate(lines):
        if not continued:
            if line.startswith("%%"):
                return len(lines)
            if not _is_code(line):
                continue
            if not (line.startswith(("%", "!", "?")) or line.rstrip().endswith("?")):
                break
        head, continued = number + 1, line.rstrip().endswith("\\")
    return head
