"""How a command is run and watched: what ``%%spawn`` and ``%%ranks`` take beside what starting ranks needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nbspawn._session.views import View
from nbspawn.errors import UsageError

GRACE_PERIOD = 3.0  # seconds; enough for a `finally` that writes a checkpoint, short enough to wait for


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Times are seconds. When a rank fails or the time is out, the others get KeyboardInterrupt, after the grace period
    SIGTERM, then SIGKILL. The first interrupt from the user does the same, the second kills.

    Raises UsageError for a value that cannot be.
    """

    timeout: float | None = None
    """None: no limit."""
    grace_period: float = GRACE_PERIOD
    view: View | None = None
    """None: the notebook's, or in a script marked lines."""
    pdb: bool = False
    """Let the user look at the frame that raised."""
    show_locals: bool = False
    """Show the variables of the frame that raised."""
    timings: bool = False
    """Tell how long the phases of the run took."""
    banner: str = ""
    """To stand above all."""
    explain: Callable[[BaseException], None] | None = None
    """Completes an error with what the user can do."""

    def __post_init__(self) -> None:
        for name in ("timeout", "grace_period"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{name} must be a number of seconds, 0 or more, got {value!r:.60}")
