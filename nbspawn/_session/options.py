"""How a command is run and shown: the options of ``%%spawn`` and ``%%ranks`` that do not concern the start of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nbspawn._session.views import View
from nbspawn.errors import UsageError

GRACE_PERIOD = 3.0  # seconds; enough for a `finally` that writes a checkpoint, short enough to wait for


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Times are seconds. After a failure or a timeout the other ranks get KeyboardInterrupt, after the grace period
    SIGTERM, then SIGKILL. The user's first interrupt does the same, the second kills.

    Raises UsageError for an invalid value.
    """

    timeout: float | None = None
    """None: no limit."""
    grace_period: float = GRACE_PERIOD
    view: View | None = None
    """None: the notebook's default view, or in a script lines marked with their ranks."""
    pdb: bool = False
    """Open the debugger in the frame that raised."""
    show_locals: bool = False
    """Show the variables of the frame that raised."""
    timings: bool = False
    """Show how long the phases of the run took."""
    banner: str = ""
    """A line to show above the table."""
    explain: Callable[[BaseException], None] | None = None
    """Adds to an error what the user can do."""

    def __post_init__(self) -> None:
        for name in ("timeout", "grace_period"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{name} must be a number of seconds, 0 or more, got {value!r:.60}")
