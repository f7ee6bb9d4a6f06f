"""What is known of a run, and how one event changes it: pure, with the clock passed in.

    run = Run.new(4, "fork server", "everything that the cell uses can travel", "/tmp/nbspawn-x", now)
    run = reduce(run, events, now)         # in the order in which they came

All times are CLOCK_MONOTONIC in seconds. Nothing here draws (_render/) or acts (_engine/): a ``Run`` can be built from
a list of events in a test, and the same list always gives the same ``Run``. Events may come in an odd order (a rank
that dies while it starts, a report that is read after the exit): every order gives some sensible state.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nbspawn._accelerators.accelerator import Load
from nbspawn._protocol.collectives import Collectives
from nbspawn._protocol.failure import Ending, exit_code
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import (
    Dropped,
    Event,
    Exited,
    InputRequest,
    Leaving,
    Listening,
    Measured,
    Printed,
    Raised,
    Resumed,
    Returned,
    Sampled,
    Started,
    Stopped,
    Stopping,
)
from nbspawn._state import wording
from nbspawn._state.history import extended
from nbspawn._state.phases import Moments, phases

State = Literal[
    "starting",
    "running",
    "waiting",
    "waiting for input",
    "debugging",
    "paused",
    "stopping",
    "done",
    "failed",
    "killed",
    "interrupted",
    "idle",
]
"""'waiting' is in a collective, for other ranks, or for the rank's device, where collectives are queued. 'debugging' is
at a debugger's prompt, or waits for its turn there; 'paused' in a graphical one, of a front end. 'idle' is a kept rank
that was not asked to run this."""

Source = Callable[[Frame], str]
"""Finds the text of a line."""

FINAL: frozenset[State] = frozenset({"done", "failed", "killed", "interrupted", "idle"})

# A line is kept to be drawn in one row: what is longer than any screen is only weight in every redraw.
_LINE_LIMIT = 1000


def spot(frames: Sequence[Frame], cell: str | None) -> Frame | None:
    """The frame whose line is worth showing, of the user's (outermost first): that of the running ``cell`` if it is one
    of them (a function of another cell counts to the line that called it), else the innermost."""
    in_cell = [frame for frame in frames if frame.file == cell]
    return in_cell[-1] if in_cell else frames[-1] if frames else None


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank: ``since`` is when its state began, ``ended`` when its process was gone (seconds, None: it
    lives).

    ``line`` is the line that it is writing, or the last one that was not empty; ``detail`` says how it failed or was
    stopped ("KeyError: 'hieght' (line 8)", "exit code 7", "SIGSEGV"), and ``echo`` says it of one that has lost a peer,
    once a peer is known to have ended; ``result`` is its value as short text.
    ``stop`` and ``stop_why`` are the last way in which it was asked to end, and the reason for the first; both empty
    while nobody asked. ``position`` is where it was last seen, in the same call since ``called``; ``longest_wait`` the
    longest time (seconds) that it has spent in a collective that did end. ``alive`` is its last sign of life; ``cpu``
    the processors that it uses (1.0 is one), ``cpu_seconds`` so far; ``memory`` and ``device_memory`` are bytes (-1: no
    device), with the peaks so far; None until there are two readings, or one; ``load`` is the device's.
    ``memory_history`` is the memory's course over as many ``readings``. ``debug_port`` is where a debugger can attach
    to it. ``moments`` are those at which a phase of the run was over for it.
    """

    rank: int
    since: float
    pid: int | None = None
    state: State = "starting"
    ended: float | None = None
    line: str = ""
    detail: str = ""
    echo: str = ""
    result: str = ""
    stop: str = ""
    stop_why: str = ""
    position: Position = Position()
    called: float = 0.0
    longest_wait: float = 0.0
    alive: float | None = None
    cpu: float | None = None
    cpu_seconds: float = 0.0
    memory: int | None = None
    peak_memory: int | None = None
    device_memory: int = -1
    peak_device_memory: int = -1
    load: Load = Load()
    memory_history: tuple[int, ...] = ()
    readings: int = 0
    debug_port: int | None = None
    moments: Moments = Moments()

    def spot(self, cell: str | None) -> Frame | None:
        """The line that is worth showing, of those where it was last seen."""
        return spot(self.position.frames, cell)


@dataclass(frozen=True)
class Run:
    """A run of a cell or a function: its ranks, how they were started and ``why`` so, and what was noted on it.
    ``cell`` is the file name of the running cell, if it is one, and ``source`` its lines; ``names`` are what IPython
    calls the notebook's cells ('Cell In[5]'), by file name. ``kept`` ranks stay when they have run it; they may have
    been there before it (not ``newly_started``). ``banner`` is to stand above all. ``packed`` is when all was there
    that the ranks need to start. ``hosts`` are the names of the ranks' machines, and ``logs`` their logs, if there are
    several. ``collectives`` are what ranks have told of theirs, while they stand still."""

    ranks: tuple[RankStatus, ...]
    method: str
    why: str
    started: float
    ended: float | None
    notes: tuple[str, ...]
    log_dir: str
    cell: str | None = None
    source: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    kept: bool = False
    newly_started: bool = True
    banner: str = ""
    packed: float = 0.0
    hosts: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    collectives: Mapping[int, Collectives] = field(default_factory=dict)

    @staticmethod
    def new(
        nprocs: int,
        method: str,
        why: str,
        log_dir: str,
        now: float,
        cell: str | None = None,
        source: tuple[str, ...] = (),
        names: Mapping[str, str] | None = None,
    ) -> Run:
        """A run of ``nprocs`` ranks that were just asked for, at ``now`` seconds."""
        ranks = tuple(RankStatus(rank, now) for rank in range(nprocs))
        return Run(ranks, method, why, now, None, (), log_dir, cell, source, names or {})

    def of_kept(self, asked: Collection[int] | None) -> Run:
        """This run as one of kept ranks; those that live already do not start again, and run it if they are ``asked``
        to."""
        ranks = self.ranks
        if asked is not None:
            states: tuple[State, State] = ("idle", "running")
            ranks = tuple(RankStatus(rank.rank, rank.since, state=states[rank.rank in asked]) for rank in ranks)
        return replace(self, ranks=ranks, kept=True, newly_started=asked is None)

    def text(self, frame: Frame, elsewhere: Source) -> str:
        """The text of a line, of this cell or ``elsewhere``."""
        if frame.file != self.cell:
            return elsewhere(frame)
        return self.source[frame.line - 1].strip() if frame.line <= len(self.source) else ""

    def host(self, rank: int) -> str:
        """The name of its machine, if there are several; else ''."""
        return self.hosts[rank] if self.hosts else ""

    @property
    def over(self) -> bool:
        """Whether every rank's process has ended, or, of kept ranks, what it ran."""
        return all(rank.ended is not None or (self.kept and rank.state in FINAL) for rank in self.ranks)

    @property
    def quiet_success(self) -> bool:
        """Have ranks that were there before run it to a good end? Then what they print and their values are enough."""
        well = all(rank.state in ("done", "idle") and not rank.stop for rank in self.ranks)
        return well and not self.newly_started and not self.notes

    @property
    def phases(self) -> dict[str, float]:
        """How long the parts of the run took, in seconds (_state/phases.py)."""
        return phases(self.started, self.packed, [rank.moments for rank in self.ranks])

    @property
    def counts(self) -> dict[State, int]:
        """How many ranks are in each state that occurs."""
        counts: dict[State, int] = {}
        for rank in self.ranks:
            counts[rank.state] = counts.get(rank.state, 0) + 1
        return counts


def reduce(run: Run, events: Sequence[Event], now: float) -> Run:
    """The run after ``events``, which were received at ``now`` seconds; those of an unknown rank change nothing."""
    ranks = list(run.ranks)
    known = [event for event in events if 0 <= event.rank < len(ranks)]
    if not known:
        return run
    failed = {rank.rank for rank in ranks if rank.state == "failed"}
    for event in known:
        number = event.rank
        ranks[number] = _fold(ranks[number], event, now, peer_failed=len(failed) > (number in failed))
        if ranks[number].state == "failed":
            failed.add(number)
    run = replace(run, ranks=_with_echoes(ranks), notes=(*run.notes, *_dropped(run, known)))
    return replace(run, ended=max(rank.ended or now for rank in ranks)) if run.ended is None and run.over else run


def _dropped(run: Run, events: Sequence[Event]) -> list[str]:
    """A note about each rank of which the first message could not be read."""
    notes: dict[str, str] = {}
    for event in events:
        if isinstance(event, Dropped):
            begin = f"A message of rank {event.rank} could not be read"
            notes.setdefault(begin, f"{begin}, and nobody knows what it said: {event.reason}.")
    return [note for begin, note in notes.items() if not any(known.startswith(begin) for known in run.notes)]


def _with_echoes(ranks: Sequence[RankStatus]) -> tuple[RankStatus, ...]:
    """The ranks, with those marked that have failed because of another one's end: who has lost a peer, if one has ended
    (as in nbspawn/errors.py)."""
    if any(rank.echo for rank in ranks) and any(
        not rank.echo and (rank.ended is not None or rank.state in ("failed", "killed", "interrupted"))
        for rank in ranks
    ):
        return tuple(replace(rank, detail=rank.echo) if rank.echo else rank for rank in ranks)
    return tuple(ranks)


def answered(run: Run, rank: int, now: float) -> Run:
    """The run after the kernel replied to the rank's ``InputRequest``, at ``now`` seconds.

    The reply is a command and no event, and a rank that computes after ``input()`` may be silent for hours.
    """
    return replace(
        run,
        ranks=tuple(
            replace(one, state="running", since=now) if one.rank == rank and one.state == "waiting for input" else one
            for one in run.ranks
        ),
    )


def _fold(rank: RankStatus, event: Event, now: float, peer_failed: bool) -> RankStatus:
    match event:
        case Started() if rank.ended is None:
            rank = replace(rank, pid=event.pid, moments=Moments(event.time))  # its first reading may have come before
            return rank if rank.stop else replace(rank, state="running", since=event.time)
        case Sampled() if rank.state in ("running", "waiting"):
            return _sampled(rank, event)
        case Measured():
            return _measured(rank, event)
        case Listening():
            return replace(rank, debug_port=event.port)
        case InputRequest() if rank.state in ("starting", "running", "waiting"):
            return replace(rank, state="waiting for input", since=now)
        case Stopped() if rank.state in ("running", "waiting", "paused"):
            state: State = "paused" if event.graphical else "debugging"
            return replace(rank, state=state, since=event.time, position=Position((event.frame,)))
        case Resumed() if rank.state in ("debugging", "paused"):
            return replace(rank, state="running", since=event.time)
        case Printed() if rank.state != "debugging":  # what the debugger shows is not where the rank is
            seen = (line for line in (event.current, *reversed(event.lines)) if line.strip())
            return _changed(rank, line=next(seen, rank.line)[:_LINE_LIMIT])
        case Stopping() if rank.ended is None:
            why = rank.stop_why or ("a peer failed" if peer_failed else "stop")
            rank = replace(rank, stop=event.how, stop_why=why)
            # A rank with an outcome is only hurried out: what it has done stays true.
            return rank if rank.state in FINAL else replace(rank, state="stopping", since=event.time, detail=why)
        case Returned():
            moments = rank.moments._replace(ready=event.ready, run=event.time, received=now)
            result = event.value.repr
            return replace(rank, state="done", since=event.time, detail="", result=result, moments=moments)
        case Raised() | Leaving():
            ending = Ending.of(event)
            state = "interrupted" if ending.requested(bool(rank.stop)) else "failed"
            echo = ending.echo if state == "failed" else ""
            return replace(rank, state=state, since=event.time, detail=ending.detail, echo=echo)
        case Exited() if rank.ended is None:
            return _exited(rank, event)
    return rank


def _changed(rank: RankStatus, **changes: Any) -> RankStatus:
    """What dataclasses.replace does, in a fifth of the time: thousands of ranks each change a few times a second."""
    changed = object.__new__(RankStatus)
    vars(changed).update(vars(rank), **changes)
    return changed


def _sampled(rank: RankStatus, event: Sampled) -> RankStatus:
    longest = rank.longest_wait
    if rank.state == "waiting" and event.since != rank.called:
        longest = max(longest, event.since - rank.called)
    state: State = "waiting" if event.position.collective or event.position.device else "running"
    since = rank.since if state == rank.state else event.since
    return _changed(rank, state=state, since=since, position=event.position, called=event.since, longest_wait=longest)


def _measured(rank: RankStatus, event: Measured) -> RankStatus:
    passed = event.time - rank.alive if rank.alive is not None else 0.0
    return _changed(
        rank,
        alive=event.time,
        cpu=(event.cpu - rank.cpu_seconds) / passed if passed > 0 else rank.cpu,
        cpu_seconds=event.cpu,
        memory=event.memory,
        peak_memory=event.peak_memory,
        device_memory=event.device_memory,
        peak_device_memory=event.peak_device_memory,
        load=event.load,
        memory_history=extended(rank.memory_history, rank.readings, event.memory),
        readings=rank.readings + 1,
    )


def _exited(rank: RankStatus, event: Exited) -> RankStatus:
    rank = replace(rank, ended=event.time, moments=rank.moments._replace(gone=event.time))
    if rank.state == "done" and event.code and not rank.stop:
        # Its value is safe, yet a crash on the way out (a destructor, an atexit hook) should not be hidden.
        return replace(rank, detail=f"{exit_code(event.code)} after it had returned")
    if rank.state in FINAL:
        return rank
    state, detail = _unreported(rank, event)
    return replace(rank, state=state, since=event.time, detail=detail)


def _unreported(rank: RankStatus, event: Exited) -> tuple[State, str]:
    """How a rank ended that has not reported its end."""
    if not rank.stop:
        return "failed", Ending.of(event).detail
    # torch's wrapper swallows KeyboardInterrupt and leaves with 0; a plain interpreter dies of SIGINT itself.
    if rank.stop == "interrupt" and event.code in (0, -signal.SIGINT):
        return "interrupted", rank.stop_why
    return "killed", wording.stopped(event.code, rank.stop, rank.stop_why)
