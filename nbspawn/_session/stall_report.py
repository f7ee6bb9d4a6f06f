"""When the stacks of ranks that stand still are shown unasked: once for each long stall.

Pure but for its own memory; the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

LONG = 30.0  # seconds after a stall is first found: then it is shown where, while the ranks can still be looked at
_EVERY = 1.0  # seconds between two looks: each goes through all ranks


class Standstill:
    """``now`` is when the command began, in seconds."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._since: float | None = None
        self._shown = False

    def long(self, now: float, stalled: Callable[[], bool]) -> bool:
        """Are the stacks to be shown at ``now`` seconds? ``stalled`` is called about once a second."""
        if now - self._looked_at < _EVERY:
            return False
        self._looked_at = now
        if not stalled():
            self._since, self._shown = None, False
        elif self._since is None:
            self._since = now
        elif now - self._since >= LONG and not self._shown:
            self._shown = True
            return True
        return False
