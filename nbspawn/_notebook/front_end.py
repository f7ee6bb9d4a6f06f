"""Which view fits where this kernel or terminal shows its output."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from nbspawn._session.views import View

if TYPE_CHECKING:
    from nbspawn._session.background import BehindView


def in_kernel(shell: Any) -> bool:
    """Does a Jupyter front end show the output? (Else it is IPython in a terminal or in a pipe.)"""
    return hasattr(shell, "kernel")


def can_redraw(shell: Any) -> bool:
    """Can the terminal move its cursor up?"""
    return sys.stdout.isatty() and not getattr(shell, "simple_prompt", True) and os.environ.get("TERM") != "dumb"


def view(shell: Any, kind: str = "auto", lines: bool = False) -> View:
    """``kind`` is what ``--view`` takes; ``lines`` is ``--lines``."""
    if in_kernel(shell):
        from nbspawn._notebook.view import NotebookView

        return NotebookView(shell, _kind(kind), lines, _with_controls(shell, kind))
    from nbspawn._notebook.console import ConsoleView

    return ConsoleView(live=can_redraw(shell), table=kind != "quiet", lines=lines)


def view_behind(shell: Any, kind: str = "auto", lines: bool = False) -> BehindView:
    """For a run in the background."""
    from nbspawn._notebook.behind import ConsoleBehind, NotebookBehind

    if in_kernel(shell):
        return NotebookBehind(shell, _kind(kind), lines, _with_controls(shell, kind))
    return ConsoleBehind(table=kind != "quiet", lines=lines)


def _kind(kind: str) -> str:
    return "html" if kind in ("auto", "widget") else kind


def _with_controls(shell: Any, kind: str) -> bool:
    """Where nobody can type there is nobody to click either: nbclient, papermill."""
    return kind == "widget" or (kind == "auto" and bool(getattr(shell.kernel, "_allow_stdin", False)))
