"""What the notebook extension sets, when it is loaded: how a notebook differs from a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbspawn._protocol.edits import Reload
from nbspawn._session.attachment import BackgroundView, stream_view
from nbspawn._session.views import StreamView, View

cell_names: Callable[[], Mapping[str, str]] = dict
"""IPython's names for the notebook's cells ('Cell In[5]'), by file name."""

colors: Callable[[], str] = str
"""IPython's colours for tracebacks ('' for none)."""

compiler_flags: Callable[[], int] = int
"""The compiler's flags that the notebook's cells have set by ``from __future__ import ...``."""


def no_autoreload() -> Reload | None:
    """No edits: there is no notebook."""
    return None


autoreload: Callable[[], Reload | None] = no_autoreload
"""Which edited modules kept ranks load again, by the notebook's %autoreload."""

make_default: Callable[[], View] = StreamView
"""Makes the view of a run without an explicit one."""


def print_text(_: Any, text: str) -> None:
    """Display an object by its text."""
    print(text)


display: Callable[[Any, str], None] = print_text
"""Displays a session (its pool) or a background run, of which ``text`` is the repr."""

make_background: Callable[[], BackgroundView] = stream_view
"""Makes the view of a run in the background."""
