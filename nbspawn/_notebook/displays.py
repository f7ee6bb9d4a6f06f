"""Shows the ranks' displays under the cell: marked with the rank, bounded, and cleared rank by rank."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nbspawn._protocol.messages import ClearOutput, DisplayData
from nbspawn._session.views import BUFFER_TIME

MAX_DISPLAYS = 500
MAX_BYTES = 20_000_000

Publish = Callable[..., None]

_shown_earlier: dict[str, str] = {}
"""The displays of the last cells, by the names that ranks have for them."""


class RankDisplays:
    """Publishes display data of many ranks into one cell.

    A front end clears all of a cell's outputs or none. So each display gets an id of its own here; what a rank clears
    is emptied, then reused for its next display (an animation stays one output). ``write`` prints lines of a rank.
    Beyond the limits only a display's text is shown, and the rank's output says so: no front end opens a notebook of
    gigabytes. What counts is what stays. ``places`` is the maximum number of displays, 0 for no maximum: a newer one
    replaces the oldest.
    """

    def __init__(self, publish: Publish, write: Callable[[int, list[str]], None], places: int = 0) -> None:
        self._publish = publish
        self._write = write
        self._places = deque(f"nbspawn-{uuid.uuid4().hex}" for _ in range(places))
        self._slots: dict[int, list[str]] = {}
        self._cleared: dict[int, list[str]] = {}
        self._named: dict[str, str] = {}
        self._updates: dict[str, DisplayData] = {}
        self._flushed_at = 0.0
        self._sizes: dict[str, int] = {}
        self._over = False

    def reserve(self) -> None:
        """Make all ``places``, as empty displays."""
        for place in self._places:
            self._send(place, {}, {}, update=False)

    def show(self, event: DisplayData) -> None:
        """Show a new display, or a new version of one."""
        name: Any = event.transient.get("display_id")
        if event.update:
            # Of this cell, of an earlier one of kept ranks, or of the notebook: front ends ignore ids that nobody has.
            slot = self._named.get(name) or _shown_earlier.get(name) or event.transient.get("own_id")
            if slot:
                self._updates[slot] = event
            return
        cleared = self._cleared.get(event.rank)
        reused = bool(cleared)
        plain = set(event.data) == {"text/plain"} and name is None
        if plain or self._is_too_much(event, next(iter(cleared or self._places), "")):
            self._write(event.rank, str(event.data.get("text/plain", "<display>")).splitlines())
            return
        slot = cleared.pop(0) if cleared else self._new()
        self._slots.setdefault(event.rank, []).append(slot)
        if name is not None:
            self._named[name] = _shown_earlier[name] = slot
            while len(_shown_earlier) > MAX_DISPLAYS:
                del _shown_earlier[next(iter(_shown_earlier))]
        if not reused:
            self._write(event.rank, ["↓"])
        self._send(slot, event.data, event.metadata, update=reused or bool(self._places))

    def _is_too_much(self, event: DisplayData, reused: str) -> bool:
        size = sum(self._sizes.values()) - self._sizes.get(reused, 0) + _size(event.data)
        over = size > MAX_BYTES or (len(self._sizes) >= MAX_DISPLAYS and not reused)
        if over and not self._over:
            self._over = True
            limits = f"{MAX_DISPLAYS} displays or {MAX_BYTES // 1_000_000} MB"
            self._write(event.rank, [f"… the displays of this cell are over {limits}: of those that follow, the text"])
        return over

    def _new(self) -> str:
        if not self._places:
            return f"nbspawn-{uuid.uuid4().hex}"
        self._places.rotate(-1)
        place = self._places[-1]
        self._forget_names([place])
        self._slots = {rank: [slot for slot in slots if slot != place] for rank, slots in self._slots.items()}
        return place

    def clear(self, event: ClearOutput) -> None:
        """Empty the rank's displays: now, or at its next display (``wait``). Later updates of them are ignored."""
        slots = self._slots.pop(event.rank, [])
        self._forget_names(slots)
        self._updates = {slot: event for slot, event in self._updates.items() if slot not in slots}
        if not event.wait:
            for slot in slots:
                self._send(slot, {}, {}, update=True)
        self._cleared[event.rank] = slots + self._cleared.get(event.rank, [])

    def _forget_names(self, slots: Collection[str]) -> None:
        for names in (self._named, _shown_earlier):
            for name in [name for name, slot in names.items() if slot in slots]:
                del names[name]

    def flush(self, if_due: bool = False) -> None:
        """Send the newest version of each updated display: now, or only if that is due."""
        if if_due and time.monotonic() - self._flushed_at < BUFFER_TIME:
            return
        self._flushed_at = time.monotonic()
        updates, self._updates = self._updates, {}
        for slot, event in updates.items():
            self._send(slot, event.data, event.metadata, update=True)

    def finish(self) -> None:
        """The run is over: empty the displays that were cleared and not reused."""
        self.flush()
        for slots in self._cleared.values():
            for slot in slots:
                self._send(slot, {}, {}, update=True)

    def _send(self, slot: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        self._sizes[slot] = _size(data)
        self._publish(data=dict(data), metadata=dict(metadata), transient={"display_id": slot}, update=update)


def _size(data: Mapping[str, Any]) -> int:
    return sum(len(value) for value in data.values() if isinstance(value, str))
