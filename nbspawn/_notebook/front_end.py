"""Chooses the view that fits the front end or the terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from nbspawn._session.views import View

if TYPE_CHECKING:
    from nbspawn._session.background import BackgroundView


def in_kernel(shell: Any) -> bool:
    """Does a Jupyter front end show the output? (Otherwise this is IPython in a terminal or a pipe.)"""
    return hasattr(shell, "kernel")


def can_redraw(shell: Any) -> bool:
    """Can the terminal move its cursor up?"""
    return sys.stdout.isatty() and not getattr(shell, "simple_prompt", True) and os.environ.get("TERM") != "dumb"


def default_view(shell: Any) -> View:
    """The view of runs that are started from Python, such as ``nbspawn.spawn``."""
    return _foreground(shell, "auto", False, None)


def default_background_view(shell: Any) -> BackgroundView:
    """The view of background runs that are started from Python, such as ``Session.run(..., background=True)``."""
    return _background(shell, "auto", False, None)


def view(shell: Any, given: Any) -> View:
    """The view of a cell, from its options."""
    return _foreground(shell, given.view, given.profile, given.local_ranks_filter)


def background_view(shell: Any, given: Any) -> BackgroundView:
    """The view of a cell in the background, from its options."""
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
    """Are there buttons? By default not under nbclient and papermill, where stdin is off: no user is there to click."""
    return kind == "widget" or (kind == "auto" and bool(getattr(shell.kernel, "_allow_stdin", False)))
