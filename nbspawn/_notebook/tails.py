"""The last output of one rank, for a pane: from its log, or, of a rank on another machine, from what it has sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nbspawn._protocol.messages import Event, Printed
from nbspawn._render.lines import LineBuffer, strip_ansi
from nbspawn._session.views import log_path
from nbspawn._state.run import Run

_TAIL = 16_000  # bytes of the log that are shown
_LINES = 20_000  # of all ranks of other machines together that are kept
_LONGEST = 500  # characters of each


class Tails:
    """The ends of the logs of one run."""

    def __init__(self) -> None:
        self._printed: dict[int, deque[str]] = {}

    def add(self, run: Run, events: Sequence[Event]) -> None:
        """Take note of events."""
        for event in events if run.logs else ():
            if isinstance(event, Printed):
                lines = self._printed.setdefault(event.rank, deque(maxlen=max(10, _LINES // len(run.ranks))))
                lines.extend(line[:_LONGEST] for line in event.lines)

    def text(self, run: Run, rank: int) -> str:
        """The rank's last output."""
        return "\n".join(self._printed.get(rank, ())) if run.logs else tail(log_path(run, rank))


def tail(path: str) -> str:
    """The end of a log, as a terminal would show it."""
    try:
        with open(path, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL))
            data = log.read()
    except FileNotFoundError:
        return ""
    lines = LineBuffer()
    complete, current = lines.feed(data)
    return strip_ansi("\n".join([*complete, current]))
