"""Which start method, and one sentence why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbspawn._engine.contexts import FORKSERVER, SPAWN
from nbspawn._engine.fork_safety import fork_hazards, poisoned_runtimes, probe_if_changed, stranded, unsafe_to_fork
from nbspawn._engine.forkserver import server
from nbspawn.errors import PayloadError, StartError, UsageError, interrupted

METHODS = ("auto", "fork", "forkserver", "spawn")
_WORTH_SAYING = 0.1  # seconds of waiting for the fork server
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
    environment: Mapping[str, str] | None = None,
    give_up: Callable[[], object] = bool,
) -> tuple[Choice, Any]:
    """Settle the method and pack the job, a ``kind`` that uses ``variables``, if it has to travel: ``(choice, packed
    or None)``. ``needed`` are modules that take seconds to import, and that each rank needs; ``environment`` is what
    the ranks' will be. What can travel goes by the fork server, whether it is ready or not: how a cell behaves must not
    depend on when it runs. While the server starts, this waits, or until ``give_up`` says so: KeyboardInterrupt.

    Raises StartError if ``requested`` cannot work here, PayloadError if the job cannot travel and fork is not safe
    either, UsageError for an unknown method.
    """
    if requested not in METHODS:
        raise UsageError(f"no start method is called {requested!r}: use one of {', '.join(METHODS)}")
    if requested == "fork":
        if found := stranded(variables):
            raise StartError(f"fork cannot work here: {_join(found)}. Release it first, or create it inside the cell.")
        hazards = fork_hazards() + poisoned_runtimes() or probe_if_changed()
        if hazards:
            raise StartError(
                f"fork cannot work here: {_join(hazards)}. Use -m forkserver (the default finds it by itself), or "
                "restart the kernel and start the ranks before that."
            )
        return Choice("fork", "as you asked; nothing that makes fork unsafe is running in this kernel"), None

    def unsafe() -> list[str]:
        return stranded(variables) or unsafe_to_fork()

    if requested == "spawn":
        return Choice(requested, "as you asked"), pack()
    waited = ""

    def wait_for_server() -> None:
        nonlocal waited
        began = time.monotonic()
        outdated = server.warm and environment is not None and server.out_of_date(environment)
        try:
            server.get(needed, environment, give_up)
        except KeyboardInterrupt:
            raise interrupted((), "no ranks have been started") from None
        except OSError as failure:
            raise StartError(f"the fork server cannot start: {failure}") from None
        if time.monotonic() - began > _WORTH_SAYING:
            why = f"start again, since {outdated}" if outdated else "start"
            waited = f"waited {time.monotonic() - began:.1f} s for it to {why}"

    if requested == "forkserver":
        wait_for_server()
        return Choice(requested, waited or "as you asked", not waited), pack()
    try:
        packed = pack()
    except PayloadError as stuck:
        hazards = unsafe()
        if hazards:
            also = f"And fork, which would need no sending, is unsafe: {_join(hazards)}."
            raise PayloadError(f"{stuck}\n{also}", stuck.culprit) from None
        return Choice("fork", f"{stuck.culprit} cannot travel, and fork is safe here"), None
    try:
        wait_for_server()
    except KeyboardInterrupt:
        packed[0].close()
        raise
    except StartError as failure:
        packed[0].close()
        hazards = unsafe()
        if hazards:
            raise StartError(f"{failure}\nAnd fork is unsafe: {_join(hazards)}.") from None
        return Choice("fork", f"safe here, and {failure}"), None
    return Choice("forkserver", waited or f"everything that the {kind} uses can travel", not waited), packed


def _join(hazards: list[str]) -> str:
    return "; and ".join(hazards)
