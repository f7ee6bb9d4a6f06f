"""Which view fits where this kernel or terminal shows its output."""

from __future__ import annotations

import os
import sys
from typing import Any

from nbspawn.views import View


def in_kernel(shell: Any) -> bool:
    """Does a Jupyter front end show the output? (Else it is IPython in a terminal or in a pipe.)"""
    return hasattr(shell, "kernel")


def can_redraw(shell: Any) -> bool:
    """Can the terminal move its cursor up?"""
    return sys.stdout.isatty() and not getattr(shell, "simple_prompt", True) and os.environ.get("TERM") != "dumb"


def view(shell: Any, kind: str = "auto", lines: bool = False) -> View:
    """``kind`` is what ``--view`` takes; ``lines`` is ``--lines``."""
    if in_kernel(shell):
        from nbspawn.notebook.view import NotebookView

        # Where nobody can type there is nobody to click either: nbclient, papermill.
        controls = kind == "widget" or (kind == "auto" and bool(getattr(shell.kernel, "_allow_stdin", False)))
        return NotebookView(shell, "html" if kind in ("auto", "widget") else kind, lines, controls)
    from nbspawn.notebook.console import ConsoleView

    return ConsoleView(live=can_redraw(shell), table=kind != "quiet", lines=lines)
