"""Which start method, and one sentence why."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbspawn.engine.fork_safety import fork_hazards, held_locks, poisoned_runtimes, probe_if_changed, unsafe_to_fork
from nbspawn.engine.forkserver import FORKSERVER, SPAWN, server
from nbspawn.errors import PayloadError, StartError, UsageError

METHODS = ("auto", "fork", "forkserver", "spawn")
_TORCH_NAMES = {"fork": "fork", "forkserver": FORKSERVER, "spawn": SPAWN}


@dataclass(frozen=True)
class Choice:
    """``method`` is 'fork', 'forkserver' or 'spawn'; ``title`` and ``why`` are what the view says of it."""

    method: str
    why: str
    warm: bool = False
    """Was the fork server ready when it was needed?"""

    @property
    def torch_name(self) -> str:
        """The name under which torch's ``start_processes`` finds the context."""
        return _TORCH_NAMES[self.method]

    @property
    def title(self) -> str:
        """As people say it."""
        if self.method == "forkserver":
            return "fork server" + (", warm" if self.warm else "")
        return self.method


def choose(
    requested: str,
    pack: Callable[[], Any],
    variables: Mapping[str, object],
    kind: str,
    needed: Sequence[str] = (),
) -> tuple[Choice, Any]:
    """Settle the method and pack the job, a ``kind`` that uses ``variables``, if it has to travel: ``(choice, packed
    or None)``. ``needed`` are modules that take seconds to import, and that each rank needs.

    Raises StartError if ``requested`` cannot work here, PayloadError if the job cannot travel and fork is not safe
    either, UsageError for an unknown method.
    """
    if requested not in METHODS:
        raise UsageError(f"no start method is called {requested!r}: use one of {', '.join(METHODS)}")
    if requested == "fork":
        if locks := held_locks(variables):
            raise StartError(f"fork cannot work here: {_join(locks)}. Release it first, or create it inside the cell.")
        hazards = fork_hazards() + poisoned_runtimes() or probe_if_changed()
        if hazards:
            raise StartError(
                f"fork cannot work here: {_join(hazards)}. Use -m forkserver (the default finds it by itself), or "
                "restart the kernel and start the ranks before that."
            )
        return Choice("fork", "as you asked; nothing that makes fork unsafe is running in this kernel"), None

    def unsafe() -> list[str]:
        return held_locks(variables) or unsafe_to_fork()

    was_warm = server.has(needed)
    if requested == "forkserver":
        _wait_for_server(needed)
    if requested != "auto":
        return Choice(requested, "as you asked", was_warm), pack()
    # A fork of a kernel without the modules would have each rank import them: then waiting for the server is faster.
    if not was_warm and hasattr(os, "fork") and all(name in sys.modules for name in needed) and not unsafe():
        server.warm_up(needed)
        return Choice("fork", "safe here, and the fork server is still warming up"), None
    try:
        packed = pack()
    except PayloadError as stuck:
        hazards = unsafe()
        if hazards:
            also = f"And fork, which would need no sending, is unsafe: {_join(hazards)}."
            raise PayloadError(f"{stuck}\n{also}", stuck.culprit) from None
        return Choice("fork", f"{stuck.culprit} cannot travel, and fork is safe here"), None
    try:
        _wait_for_server(needed)
    except StartError as failure:
        hazards = unsafe()
        if hazards:
            raise StartError(f"{failure}\nAnd fork is unsafe: {_join(hazards)}.") from None
        packed[0].close()
        return Choice("fork", f"safe here, and {failure}"), None
    return Choice("forkserver", f"everything that the {kind} uses can travel", was_warm), packed


def _wait_for_server(needed: Sequence[str]) -> None:
    try:
        server.get(needed)
    except OSError as failure:
        raise StartError(f"the fork server cannot start: {failure}") from None


def _join(hazards: list[str]) -> str:
    return "; and ".join(hazards)
