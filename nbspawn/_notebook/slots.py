"""A place for displays within a widget: the interface of a display publisher, drawn by widgets of a ``VBox``.

Each display is a child: an ``HTML`` widget, whose update redraws nothing else, or an ``Output``, for which the front
end chooses the renderer. Unlike ``with output:`` this may be called from any thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from html import escape
from typing import Any

import ipywidgets  # type: ignore[import-untyped]

from nbspawn._render.lines import strip_ansi

_IMAGES = ("image/png", "image/jpeg", "image/gif")


class Slots:
    """``box`` is the widget."""

    def __init__(self) -> None:
        self.box = ipywidgets.VBox()
        self._slots: dict[str, _Slot] = {}

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any],
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        """Publish a display, as ``DisplayPublisher.publish`` does."""
        name = (transient or {}).get("display_id") or uuid.uuid4().hex
        if update and name not in self._slots:
            return
        slot = self._slots.setdefault(name, _Slot())
        if slot.show(data, metadata):
            self.box.children = [one.widget for one in self._slots.values()]

    def clear(self) -> None:
        """Remove all displays."""
        slots, self._slots = self._slots, {}
        self.box.children = ()
        for slot in slots.values():
            slot.close()

    def html(self) -> str:
        """All displays as HTML that needs no widgets and no kernel."""
        return "".join(slot.html() for slot in self._slots.values())


class _Slot:
    """A display, as a widget."""

    def __init__(self) -> None:
        self.widget: Any = None
        self._data: Mapping[str, Any] = {}

    def show(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
        """Show a mime bundle, or nothing for an empty one. True if ``widget`` is another one now."""
        self._data = data
        before = self.widget
        if set(data) <= {"text/html", "text/plain"} and "text/html" in data:
            if not isinstance(self.widget, ipywidgets.HTML):
                self.close()
                self.widget = ipywidgets.HTML(layout={"width": "100%"})
            self.widget.value = data["text/html"]
        else:
            if not isinstance(self.widget, ipywidgets.Output):
                self.close()
                self.widget = ipywidgets.Output()
            output = {"output_type": "display_data", "data": dict(data), "metadata": dict(metadata)}
            self.widget.outputs = (output,) if data else ()
        self.widget.layout.display = "" if data else "none"  # an empty widget has a margin
        return self.widget is not before

    def html(self) -> str:
        data = self._data
        if "text/html" in data:
            return str(data["text/html"])
        for kind in _IMAGES:
            if kind in data:
                return f'<div><img alt="" src="data:{kind};base64,{data[kind].strip()}"></div>'
        text = strip_ansi(str(data.get("text/plain", "")))
        return f'<pre style="white-space:pre-wrap;margin:2px 0">{escape(text)}</pre>' if text else ""

    def close(self) -> None:
        """Close the widget, if there is one."""
        if self.widget is not None:
            close(self.widget)


def close(widget: Any) -> None:
    """Close a widget, with its children and the models of layouts and styles: each is a comm of its own."""
    close_parts(widget)
    widget.close()


def close_parts(widget: Any, besides: Collection[Any] = ()) -> None:
    """Close what a widget is made of, but not the widget itself; ``besides`` stay, with what they have."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, ipywidgets.Widget) and part not in besides:
            close_parts(part, besides)
            part.close()
