"""From this node's numbers of ranks, clock and paths to the run's numbers, and the kernel's clock and paths."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbspawn._agent.clock import Clock
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.frames import Position
from nbspawn._protocol.messages import Event, Raised, Sampled
from nbspawn._protocol.place import Place

_MOST = 1000  # positions that are remembered
_MOMENTS = ("time", "since", "ready")  # fields of events


class Translation:
    """Translates between a node and one run, in which the node has this place. ``sent_from`` has the kernel's folders,
    by the node's."""

    def __init__(self, place: Place, clock: Clock, sent_from: Mapping[str, str]) -> None:
        self._place, self._clock, self._sent_from = place, clock, sent_from
        self._host = socket.gethostname()
        self._positions: dict[Position, Position] = {}

    def event(self, event: Event) -> Event:
        """An event of the local engine, as the kernel takes it."""
        offset = self._clock.offset
        moments = {name: getattr(event, name) + offset for name in _MOMENTS if getattr(event, name, 0.0)}
        if isinstance(event, Sampled):
            spent = tuple((self._same(position), seconds) for position, seconds in event.spent)
            event = replace(event, position=self._same(event.position), spent=spent)
        if isinstance(event, Raised):
            event = replace(event, **self._tracebacks(event))
        return replace(event, rank=event.rank + self._place.first, **moments)

    def _tracebacks(self, error: Raised | Failure) -> dict[str, Any]:
        """Its fields with a traceback, in which files that were sent have the names that the user knows."""
        lines = [error.traceback, *error.rendered]
        for there, here in self._sent_from.items():
            lines = [line.replace(f"{there}/", f"{here}/") for line in lines]
        return {"traceback": lines[0], "rendered": tuple(lines[1:])}

    def _same(self, position: Position) -> Position:
        """The first of equal positions, which are most in a message: it is sent once."""
        if len(self._positions) > _MOST:
            self._positions.clear()
        return self._positions.setdefault(position, position)

    def failure(self, failure: Failure) -> Failure:
        """A failure of the node, in the run's terms."""
        return replace(
            failure,
            **self._tracebacks(failure),
            rank=failure.rank + self._place.first,
            time=failure.time + self._clock.offset,
            time_error=self._clock.error,
            node=self._place.node,
            host=self._host,
            log_path=f"{self._host}:{failure.log_path}",
        )
