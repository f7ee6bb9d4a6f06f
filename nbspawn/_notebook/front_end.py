"""Chooses the view that fits the front end or the terminal."""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbspawn._session.views import View, write_to_stdout

if TYPE_CHECKING:
    from nbspawn._notebook.controls import Controls
    from nbspawn._session.attachment import BackgroundView
    from nbspawn._session.background import BackgroundRun
    from nbspawn._session.pool import Pool


def in_kernel(shell: Any) -> bool:
    """Does a Jupyter front end show the output? (Otherwise this is IPython in a terminal or a pipe.)"""
    return hasattr(shell, "kernel")


def debugger(shell: Any) -> Any:
    """The front end's own debugger, in its kernel; None where there is none."""
    return getattr(getattr(shell, "kernel", None), "debugger", None)


def can_redraw(shell: Any) -> bool:
    """Can the terminal move its cursor up?"""
    return sys.stdout.isatty() and not getattr(shell, "simple_prompt", True) and os.environ.get("TERM") != "dumb"


@contextmanager
def saying(shell: Any, text: str) -> Iterator[None]:
    """Show the text under the cell, or in the terminal, while the block takes long; nothing where nobody looks on."""
    if in_kernel(shell) and _asks(shell):
        place = {"display_id": f"nbspawn-{uuid.uuid4().hex}"}
        shell.display_pub.publish(data={"text/plain": text}, metadata={}, transient=place)
        try:
            yield
        finally:
            shell.display_pub.publish(data={}, metadata={}, transient=place, update=True)
    elif not in_kernel(shell) and can_redraw(shell):
        write_to_stdout(text)
        try:
            yield
        finally:
            write_to_stdout("\r\x1b[K")
    else:
        yield


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


def display(shell: Any, subject: Pool | BackgroundRun, text: str) -> None:
    """Display a session or a background run: as a panel where there are widgets. A run has none in the cell under which
    it is shown anyway."""
    from nbspawn._session.background import BackgroundRun

    here = isinstance(subject, BackgroundRun) and subject.cell == shell.execution_count
    if in_kernel(shell) and not here and importlib.util.find_spec("ipywidgets") is not None:
        from nbspawn._notebook import panel

        panel.show(subject, text)
    else:
        print(text)


def _foreground(shell: Any, kind: str, profile: bool, only: frozenset[int] | None) -> View:
    if in_kernel(shell):
        from nbspawn._notebook.view import NotebookView

        # Stored by the view, because `%%capture` in a later cell replaces the shell's publisher for a while.
        controls = _controls(shell, kind)
        return NotebookView(shell.display_pub.publish, _kind(kind), profile, controls, only, seldom=not _asks(shell))
    from nbspawn._notebook.console import ConsoleView

    return ConsoleView(live=can_redraw(shell), table=kind != "quiet", profile=profile, only=only)


def _background(shell: Any, kind: str, profile: bool, only: frozenset[int] | None) -> BackgroundView:
    from nbspawn._notebook import background

    if in_kernel(shell):
        controls = _controls(shell, kind, between_cells=True)
        view = background.notebook_view(
            shell.display_pub.publish, _kind(kind), profile, controls, only, seldom=not _asks(shell)
        )
        return view._replace(cell=shell.execution_count)
    return background.console_view(kind != "quiet", profile, only)


def _kind(kind: str) -> str:
    return "html" if kind in ("auto", "widget") else kind


def _asks(shell: Any) -> bool:
    """Can the front end ask a user? One that cannot (nbclient, papermill) shows nobody how the run goes, or, like
    jupyter-server-documents, appends each update of a display to the notebook."""
    return bool(getattr(shell.kernel, "_allow_stdin", False))


def _controls(shell: Any, kind: str, between_cells: bool = False) -> Controls | None:
    """The buttons. By default none under nbclient and papermill, where stdin is off: no user is there to click."""
    if kind != "widget" and not (kind == "auto" and _asks(shell)):
        return None
    from nbspawn._notebook.controls import Controls

    return Controls(shell.kernel, shell.display_pub.publish, between_cells)
