"""Which view fits where this kernel or terminal shows its output."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from nbspawn._session.views import View

if TYPE_CHECKING:
    from nbspawn._session.background import BackgroundView


def in_kernel(shell: Any) -> bool:
    """Does a Jupyter front end show the output? (Else it is IPython in a terminal or in a pipe.)"""
    return hasattr(shell, "kernel")


def can_redraw(shell: Any) -> bool:
    """Can the terminal move its cursor up?"""
    return sys.stdout.isatty() and not getattr(shell, "simple_prompt", True) and os.environ.get("TERM") != "dumb"


def default_view(shell: Any) -> View:
    """For ``nbspawn.spawn`` and the like."""
    return _foreground(shell, "auto", False, None)


def default_background_view(shell: Any) -> BackgroundView:
    """For ``Session.run(..., background=True)`` and the like."""
    return _background(shell, "auto", False, None)


def view(shell: Any, given: Any) -> View:
    """What a cell's options ask for."""
    return _foreground(shell, given.view, given.profile, given.local_ranks_filter)


def background_view(shell: Any, given: Any) -> BackgroundView:
    """The same of a cell in the background."""
    return _background(shell, given.view, given.profile, given.local_ranks_filter)


def _foreground(shell: Any, kind: str, profile: bool, only: frozenset[int] | None) -> View:
    if in_kernel(shell):
        from nbspawn._notebook.view import NotebookView

        return NotebookView(shell, _kind(kind), profile, _with_controls(shell, kind), only=only)
    from nbspawn._notebook.console import ConsoleView

    return ConsoleView(live=can_redraw(shell), table=kind != "quiet", profile=profile, only=only)


def _background(shell: Any, kind: str, profile: bool, only: frozenset[int] | None) -> BackgroundView:
    from nbspawn._notebook import background

    if in_kernel(shell):
        return background.notebook_view(shell, _kind(kind), profile, _with_controls(shell, kind), only)
    return background.console_view(kind != "quiet", profile, only)


def _kind(kind: str) -> str:
    return "html" if kind in ("auto", "widget") else kind


def _with_controls(shell: Any, kind: str) -> bool:
    """Where nobody can type there is nobody to click either: nbclient, papermill."""
    return kind == "widget" or (kind == "auto" and bool(getattr(shell.kernel, "_allow_stdin", False)))
