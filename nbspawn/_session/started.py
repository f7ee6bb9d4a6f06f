"""Ranks that have been started: how, what they have been sent since, and whether their process group is whole."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._carried import replaced, settings
from nbspawn._engine import clusters
from nbspawn._engine.base import Engine
from nbspawn._engine.cluster.agents import Agents, connected
from nbspawn._engine.cluster.hosts import HostRanks, IdleAgentLostError
from nbspawn._engine.jobs import CellJob, Job, fill, pack
from nbspawn._engine.kernel.door import door
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._engine.launch import resolve_start, start
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.start.fork_safety import foreign_threads
from nbspawn._engine.start.start_method import Start, fork_instead
from nbspawn._payload.packing import Packed
from nbspawn._protocol.messages import UNGROUPED, RunCell, RunFunction
from nbspawn._protocol.payload import Shared
from nbspawn._session import views
from nbspawn._state.run import Run
from nbspawn.errors import PayloadError, StartError, interrupt_error

_log = logging.getLogger(__name__)

_NOTICE = 1.0  # seconds
_NOT_DEBUGGED = (
    "The notebook's debugger does not stop ranks on other machines: breakpoint() in the code does, and `%ranks debug`."
)
_NAMED = 4
"""So many nodes are named in a view's heading."""


@dataclass
class StartedRanks:
    """Replaced as a whole when new ranks are started."""

    engine: Engine
    how: tuple[str, str] = ("", "")
    """The start method, and the reason for it if that is worth showing."""
    notes: tuple[str, ...] = ()
    since: float = field(default_factory=time.monotonic)
    packed: float = 0.0
    """When the payload of the current command was packed."""
    known: list[set[str]] = field(default_factory=list)
    """By rank: the files of the notebook's cells that were sent to it."""
    magics: dict[str, object] = field(default_factory=dict)
    """Those of the notebook that all ranks have."""
    kept: bool = False
    used: bool = False
    """Has a command been sent?"""
    cut: bool = False
    """Did the notebook show less than their whole output?"""
    regrouped: bool = False
    """Has the process group of ``backend`` been created again?"""
    instead: Callable[[PayloadError], StartedRanks] | None = None
    """Starts others in their place, if none of them can load what the first command needs: without the attribute of a
    module that was at fault, or, if the user has left the method to nbspawn, forked ones. Raises PayloadError."""

    def send(
        self,
        job: Job,
        command: RunCell | RunFunction,
        selected: Sequence[int],
        interrupts: InterruptFlag,
        held: ExitStack,
    ) -> None:
        """Send the command to these ranks. What they need until they have run it is ``held``."""
        self.instead = None
        if isinstance(job, CellJob):
            magics, job = job.magics, job.without(self.magics)
            if len(selected) == len(self.known):
                self.magics.update(magics)
        if job.variables:
            packed = pack(job, interrupts)
            held.callback(packed.close)
            if packed.spawn_arguments:
                raise StartError("queues, locks and shared tensors can be passed to ranks only when they are started")
            fill(packed)
            paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in packed.fds]
            command = replace(command, payload=Shared(paths, packed.sizes))
        self.packed = time.monotonic()
        self.engine.run({rank: self._with_unknown_sources(rank, command) for rank in selected})

    def _with_unknown_sources(self, rank: int, command: RunCell | RunFunction) -> RunCell | RunFunction:
        """The command with those sources that the rank does not have yet: a notebook may have hundreds of cells."""
        if isinstance(command, RunFunction):
            return command
        unknown = command.sources.keys() - self.known[rank]
        self.known[rank] |= unknown
        if len(unknown) == len(command.sources):
            return command
        return replace(command, sources={name: command.sources[name] for name in unknown})

    def regroup_if_broken(self, run: Run) -> Run:
        """Have kept ranks create the process group of ``backend`` again, if a command may have broken it: after an
        error one rank has made collective calls that others have not."""
        engine = self.engine
        if not self.kept:
            return run
        if not engine.all_alive:
            note = "The session has ended. `%ranks restart` starts its ranks again, without their variables."
        elif any(rank.stop for rank in run.ranks) or any(
            failure.lost_peer or UNGROUPED in failure.what for failure in engine.failures
        ):
            try:
                note = "The process group was broken, and is created again." if engine.regroup() else ""
                self.regrouped = self.regrouped or bool(note)
            except OSError as error:
                note = f"The process group was broken, and cannot be created again yet: {error.strerror}."
        else:
            note = ""
        return replace(run, notes=(*run.notes, note)) if note else run


def start_ranks(
    options: LaunchOptions,
    job: Job,
    command: RunCell | RunFunction,
    interrupts: InterruptFlag,
    how: Start | None = None,
) -> StartedRanks:
    """Start ranks with their first command. Errors as in ``resolve_start`` and ``start`` (_engine/launch.py)."""
    if options.on is not None:
        return _start_on_nodes(options, job, command, interrupts)
    how = resolve_start(job, options, interrupts) if how is None else how
    nprocs = int(options.nprocs)
    note = kinds.named(options.accelerator).note(nprocs, {**os.environ, **options.env}, options.backend)
    notes: tuple[str, ...] = (note,) if note else ()
    if how.packed is not None:
        notes += replaced.left_out(how.packed.left_out)
    elif threads := foreign_threads():
        notes += (f"Fork may not work here: {'; and '.join(threads)}. -m forkserver does without fork.",)
    since = time.monotonic()
    _log.debug("%d ranks start: %s, %s", nprocs, how.title, how.why)
    engine = start(command, how, options, job.inherited, interrupts=interrupts)
    if options.keep:
        engine.serve()
    known = [set(job.sources) for _ in range(nprocs)]
    shown = how.title, how.why if how.news else ""
    started = StartedRanks(engine, shown, notes, since, since, known, kept=options.keep)
    if isinstance(job, CellJob):
        started.magics.update(job.magics)
    may_fork = options.start_method == "auto" and how.method == "forkserver"

    def instead(stuck: PayloadError) -> StartedRanks:
        if replaced.give_up(stuck.culprit):
            return start_ranks(options, job, command, interrupts)
        if may_fork:
            return start_ranks(options, job, command, interrupts, fork_instead(stuck, job.variables))
        raise stuck

    if may_fork or (how.packed is not None and replaced.read()):
        started.instead = instead
    return started


def _start_on_nodes(
    options: LaunchOptions, job: Job, command: RunCell | RunFunction, interrupts: InterruptFlag
) -> StartedRanks:
    starter: Any = options.on
    if isinstance(starter, str):
        starter = clusters.named(starter).module.starter(starter, options.nprocs, options.nodes, options.backend)
    since = time.monotonic()
    with pack(replace(job, replaced=replaced.read()), interrupts, descriptors=0, elsewhere=True) as packed:
        if packed.spawn_arguments:
            raise PayloadError(
                "queues, locks and shared tensors belong to one machine, and cannot be sent to other nodes"
            )
        try:
            agents, engine = _engine_on(starter, command, packed, options, interrupts)
        except KeyboardInterrupt:
            raise interrupt_error((), "nothing was started: the nodes were not ready yet") from None
    known = [set(job.sources) for _ in range(int(options.nprocs))]
    hosts = [link.host for link in agents.links]
    named = ", ".join(hosts if len(hosts) <= _NAMED else [*hosts[:_NAMED], "…"])
    how = f"{len(hosts)} node{'s' * (len(hosts) > 1)}", named
    notes = replaced.left_out(packed.left_out, elsewhere=True)
    if door.is_open():
        notes += (_NOT_DEBUGGED,)
    started = StartedRanks(engine, how, notes, since, since, known, kept=options.keep)
    if isinstance(job, CellJob):
        started.magics.update(job.magics)
    return started


def _engine_on(
    starter: Any,
    command: RunCell | RunFunction,
    packed: Packed,
    options: LaunchOptions,
    interrupts: InterruptFlag,
) -> tuple[Agents, HostRanks]:
    while True:
        agents = connected(starter, _Waiting(interrupts))
        with suppress(IdleAgentLostError):  # then it is started anew
            return agents, HostRanks(agents, command, packed, options, settings.read(), lambda: interrupts.count)


class _Waiting:
    """Tells the user what is waited for, once, if it takes long. Raises KeyboardInterrupt if they have stopped it."""

    def __init__(self, interrupts: InterruptFlag) -> None:
        self._interrupts = interrupts
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def __call__(self, what: str) -> None:
        if self._interrupts.count:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - self._since.setdefault(what, now) > _NOTICE and what not in self._told:
            self._told.add(what)
            views.write_to_stdout(f"{what}. Stop cancels.\n")
