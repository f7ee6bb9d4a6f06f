"""Displays a widget together with a picture of it: plain HTML, which is what is left where there is no kernel.

The picture is an output of its own. While the widget is in the page, a style within the widget hides the picture. Where
there is no widget, JupyterLab and Notebook say "Loading widget..." for ever; a style within the picture hides that.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import ipywidgets  # type: ignore[import-untyped]
from IPython import get_ipython

from nbspawn._notebook.controls import view_of

_LOADING = ".jp-OutputArea-child:not(:has(.jp-OutputArea-output *)):has(+.jp-OutputArea-child .{}){{display:none}}"
"""The output before the one with this class, if there is no element in it."""


class Picture:
    """What stays of a widget in a saved notebook. ``hider`` has to be a child of the widget."""

    def __init__(self) -> None:
        self._name = f"nbspawn-{uuid.uuid4().hex}"
        self._html = ""
        # It takes no space: a widget has a margin even if it is empty.
        self.hider = ipywidgets.HTML(f"<style>.{self._name}{{display:none}}</style>", layout={"display": "none"})
        self._publish: Callable[..., None] | None = None

    def show(self, widget: Any, text: str) -> None:
        """Display the widget, and the picture below it. ``text`` is for consoles."""
        # Stored, because `%%capture` in a later cell replaces the shell's publisher for a while.
        self._publish = get_ipython().display_pub.publish
        if widget.comm is not None:  # it is not closed
            self._publish(data={**view_of(widget), "text/plain": text}, metadata={})
        self._draw(update=False)

    def draw(self, html: str) -> None:
        """Show another picture."""
        self._html = html
        if self._publish is not None:
            self._draw(update=True)

    def _draw(self, update: bool) -> None:
        assert self._publish is not None
        hides = f"<style>{_LOADING.format(self._name)}</style>"
        data = {"text/html": f'<div class="{self._name}">{hides}{self._html}</div>', "text/plain": ""}
        self._publish(data=data, metadata={}, transient={"display_id": self._name}, update=update)
