"""Chooses the start method, and gives the reason in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nbspawn._accelerators.accelerator import Accelerator
from nbspawn._accelerators.kinds import CPU
from nbspawn._engine.start.fork_safety import (
    fork_hazards,
    poisoned_runtimes,
    probe_if_changed,
    stranded,
    unsafe_to_fork,
)
from nbspawn._engine.start.forkserver import server
from nbspawn._engine.start.start_contexts import FORKSERVER, SPAWN
from nbspawn._payload import imported
from nbspawn._payload.diagnosis import OR_FORK
from nbspawn._payload.packing import Packed
from nbspawn.errors import PayloadError, StartError, UsageError, interrupt_error

METHODS = ("auto", "fork", "forkserver", "spawn")
_WORTH_REPORTING = 0.1  # seconds of waiting for the fork server
_TORCH_NAMES = {"fork": "fork", "forkserver": FORKSERVER, "spawn": SPAWN}


@dataclass(frozen=True)
class Start:
    """``method`` is 'fork', 'forkserver' or 'spawn', ``why`` the reason; ``packed`` is the packed job, except under
    fork."""

    method: str
    why: str
    packed: Packed | None = None
    news: bool = False
    """Does the view show the reason? Not if the user asked for the method, or it is the usual one."""

    @property
    def torch_name(self) -> str:
        """The name of the context for torch's ``start_processes``."""
        return _TORCH_NAMES[self.method]

    @property
    def title(self) -> str:
        """The name in the view."""
        return "fork server" if self.method == "forkserver" else self.method


def choose(
    requested: str,
    pack: Callable[[], Packed],
    variables: Mapping[str, object],
    kind: str,
    accelerator: Accelerator = CPU,
    environment: Mapping[str, str] | None = None,
    cancelled: Callable[[], object] = bool,
    modules: frozenset[str] = frozenset(),
    nprocs: int = 1,
) -> Start:
    """Choose the method, and pack the job unless the method is fork. ``kind`` is the kind of the job, ``variables`` are
    what it uses, ``modules`` what it imports besides. ``accelerator`` and ``environment`` are the ranks'. By default a
    job that can be packed uses the fork server, whether the server is ready or not: the behaviour of a cell must not
    depend on when it runs. This function waits for the server's start, and for modules that it is about to have, until
    ``cancelled`` returns True: then it raises KeyboardInterrupt.

    Raises StartError if ``requested`` cannot work here, PayloadError if the job cannot be packed and fork is not safe
    either, UsageError for an unknown method.
    """
    if requested not in METHODS:
        raise UsageError(f"unknown start method {requested!r}: expected one of {', '.join(METHODS)}")
    if requested == "fork":
        _refuse_unsafe_fork(variables)
        return Start("fork", "as you asked; nothing that makes fork unsafe is running in this kernel")
    if requested == "spawn":
        return Start("spawn", "as you asked", pack())
    if requested == "auto" and accelerator.only_spawn:
        return Start("spawn", accelerator.only_spawn, pack(), news=True)
    try:
        packed = pack()
    except PayloadError as stuck:
        if requested == "forkserver":
            raise
        return fork_instead(stuck, variables)
    try:
        waited = _wait_for_server(accelerator.packages, environment, cancelled)
        waited = _wait_for_imports(imported.with_late(packed.modules | modules), nprocs, cancelled) or waited
    except BaseException as failure:
        packed.close()
        if requested == "auto" and isinstance(failure, StartError):
            return fork_instead(failure, variables)
        raise
    usual = "as you asked" if requested == "forkserver" else f"everything that the {kind} uses can travel"
    return Start("forkserver", waited or usual, packed, bool(waited))


def _wait_for_server(
    needed: Sequence[str], environment: Mapping[str, str] | None, cancelled: Callable[[], object]
) -> str:
    """Wait for the server; returns a text about the wait, '' if it was short."""
    began = time.monotonic()
    outdated = server.warm and environment is not None and server.out_of_date(environment)
    with _as_errors_of_a_run():
        server.get(needed, environment, cancelled)
    passed = time.monotonic() - began
    if passed <= _WORTH_REPORTING:
        return ""
    return f"waited {passed:.1f} s for it to {f'start again, since {outdated}' if outdated else 'start'}"


def _wait_for_imports(modules: Collection[str], nprocs: int, cancelled: Callable[[], object]) -> str:
    """Wait for what these ranks will import; returns a text about the wait, '' if it was short."""
    began = time.monotonic()
    with _as_errors_of_a_run():
        waited_for = server.wait_for(modules, nprocs, cancelled)
    passed = time.monotonic() - began
    return f"waited {passed:.1f} s while it imported {waited_for} for all ranks" if passed > _WORTH_REPORTING else ""


@contextmanager
def _as_errors_of_a_run() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise interrupt_error((), "no ranks have been started") from None
    except OSError as failure:
        raise StartError(f"the fork server cannot start: {failure}") from None


def _refuse_unsafe_fork(variables: Mapping[str, object]) -> None:
    if found := stranded(variables):
        raise StartError(f"fork cannot work here: {_join(found)}. Release it first, or create it inside the cell.")
    if hazards := fork_hazards() + poisoned_runtimes() or probe_if_changed():
        raise StartError(
            f"fork cannot work here: {_join(hazards)}. Use -m forkserver (or the default, auto), or restart "
            "the kernel and start the ranks before that."
        )


def fork_instead(refusal: PayloadError | StartError, variables: Mapping[str, object]) -> Start:
    """Fork if that is safe: it needs neither a payload nor a server. Otherwise raise one error with both reasons: why
    the fork server cannot be used, and what makes fork unsafe."""
    hazards = stranded(variables) or unsafe_to_fork()
    if isinstance(refusal, PayloadError):
        if hazards:
            also = f"And fork, which would need no sending, is unsafe: {_join(hazards)}."
            without = str(refusal).replace(OR_FORK, "")
            raise PayloadError(f"{without}\n{also}", refusal.culprit) from None
        return Start("fork", f"{refusal.culprit} cannot travel, and fork is safe here", news=True)
    if hazards:
        raise StartError(f"{refusal}\nAnd fork is unsafe: {_join(hazards)}.") from None
    return Start("fork", f"safe here, and {refusal}", news=True)


def _join(hazards: list[str]) -> str:
    return "; and ".join(hazards)
