"""Which rank the user talks to: the queue of prompts, and the ranks on their way to one.

Ranks ask in any number and at any time: ``input()``, and the debuggers of those that have stopped. The user answers
one at a time. At a debugger's prompt four commands are for the notebook, not for pdb: ``ranks`` lists where each rank
is, ``rank 2`` switches to another rank that has stopped, ``all n`` gives a command to every one of them, and ``diff
loss`` compares a value over them (_session/debugger_diff.py).

Pure but for its own memory; the clock is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from nbspawn._protocol.messages import (
    Event,
    Exited,
    InputReply,
    InputRequest,
    Leaving,
    Raised,
    Resumed,
    Returned,
    Stopped,
)
from nbspawn._state.run import FINAL, Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.wording import name_ranks, ranges

# Seconds for other ranks to come to their breakpoints, or to report that they wait (three looks of
# _rank/report/sampler.py): no table is drawn while the user is being asked.
_GATHER = 0.3
_START = 5.0  # seconds, as long as some have not even started
_COMES_BACK = 10.0  # seconds in which a rank that makes one step keeps its turn
_BREAK = 1.0  # seconds in which a rank stops for the debugger, unless it is in native code

_COMMANDS = re.compile(r"ranks|rank\s+(?P<rank>\d+)|(?P<all>all)(?:\s+(?P<command>.*))?\s*")


@dataclass
class PromptQueue:
    """The questions that wait for an answer."""

    pending: dict[int, InputRequest] = field(default_factory=dict)
    """By rank, in the order in which they came."""
    _focus: int | None = None
    _came_at: float = 0.0
    _coming_back: dict[int, float] = field(default_factory=dict)
    """By rank, until when it is waited for."""
    _notice: str = ""
    _all: bool = False
    _paused: set[int] = field(default_factory=set)
    """The ranks that a graphical debugger has stopped."""

    @property
    def open(self) -> bool:
        """Is the user being asked, or about to be?"""
        return bool(self.pending or self._coming_back or self._paused)

    def fold(self, event: Event, now: float) -> None:
        """Take note of what a rank does."""
        if isinstance(event, InputRequest):
            self.pending[event.rank] = event
            self._coming_back.pop(event.rank, None)
            self._came_at = now
        elif isinstance(event, Stopped) and event.graphical:
            self._paused.add(event.rank)
        elif isinstance(event, Stopped):
            self._coming_back[event.rank] = now + _COMES_BACK  # it shows where it is, then asks
        elif isinstance(event, Resumed) and not event.soon:
            self._coming_back.pop(event.rank, None)
            self._paused.discard(event.rank)
        elif isinstance(event, (Returned, Raised, Leaving, Exited)):
            self.pending.pop(event.rank, None)
            self._coming_back.pop(event.rank, None)
            self._paused.discard(event.rank)

    def due(self, run: Run, now: float) -> InputRequest | None:
        """The question to put to the user at ``now`` seconds, if it is time for one."""
        for rank, until in list(self._coming_back.items()):
            if now > until or run.ranks[rank].state in FINAL:
                del self._coming_back[rank]
        waiting = [rank for rank in self._coming_back if run.ranks[rank].state == "waiting"]
        if not self.pending or len(waiting) < len(self._coming_back):
            return None
        if waiting and now - self._came_at < _GATHER:
            return None  # whom they wait for may just have come, out of the same collective
        for rank in waiting:
            del self._coming_back[rank]
        if self._focus not in self.pending:
            first = next(iter(self.pending))
            states = run.counts
            gather = _START if "starting" in states else _GATHER if "running" in states else 0.0
            if run.ranks[first].state == "debugging" and now - self._came_at < gather:
                return None
            self._focus = first
        return self.pending[self._focus]

    def stopped(self, run: Run) -> list[int]:
        """The ranks at a debugger's prompt."""
        return sorted(rank for rank in self.pending if run.ranks[rank].state == "debugging")

    def question(self, request: InputRequest, run: Run) -> tuple[str, str]:
        """A notice to show first ('' for nothing new), and the prompt."""
        prompt = f"[{request.rank}] {request.prompt}"
        if run.ranks[request.rank].state != "debugging":
            return "", prompt
        others = [rank for rank in self.pending if rank != request.rank and run.ranks[rank].state == "debugging"]
        sentences = []
        if others:
            verb = "has stopped" if len(others) == 1 else "have stopped"
            switch = f"`rank {min(others)}` switches to that rank"
            sentences.append(f"{name_ranks(sorted(others))} {verb} too: {switch}, `all n` steps all.")
        # Not those that only miss a peer: the user holds its peers up.
        if failed := [rank.rank for rank in run.ranks if rank.state == "failed" and not rank.echo]:
            details = "; ".join(sorted({run.ranks[rank].detail for rank in failed}))
            sentences.append(f"{name_ranks(failed)} {'has' if len(failed) == 1 else 'have'} failed: {details}.")
        before, self._notice = self._notice, " ".join(sentences)
        return self._notice if self._notice != before else "", prompt

    def answers(
        self, request: InputRequest, reply: InputReply, snapshot: Snapshot
    ) -> tuple[dict[int, InputReply], str]:
        """The reply for each rank that gets one, and what to show the user."""
        run, now = snapshot.run, snapshot.now
        debugging = [rank for rank in self.pending if run.ranks[rank].state == "debugging"]
        if reply.kind != "text" or request.rank not in debugging:
            return self._send([request.rank], reply, now, debugging), ""
        command = _COMMANDS.fullmatch(reply.text.strip())
        if command is None:
            self._all = self._all and not reply.text.strip()  # an empty line repeats the last command
            return self._send(debugging if self._all else [request.rank], reply, now, debugging), ""
        if command["command"]:
            self._all = True
            return self._send(debugging, replace(reply, text=command["command"]), now, debugging), ""
        if command["rank"] is None:
            if command["all"]:
                return {}, "`all` needs a command of the debugger: `all n`, `all p loss`."
            return {}, "\n".join(_where(snapshot, rank) for rank in range(len(run.ranks)))
        rank = int(command["rank"])
        if rank in debugging:
            self._focus, self._all = rank, False
            return {}, _where(snapshot, rank)
        if rank >= len(run.ranks):
            return {}, f"there is no rank {rank}: the last is {len(run.ranks) - 1}."
        stopped = ranges(debugging)
        return {}, f"{_where(snapshot, rank)}: the debugger has not stopped it. Stopped: {stopped}."

    def _send(self, ranks: list[int], reply: InputReply, now: float, debugging: list[int]) -> dict[int, InputReply]:
        found = {}
        for rank in ranks:
            found[rank] = replace(reply, number=self.pending.pop(rank).number)
            if rank in debugging:
                self._coming_back[rank] = now + _COMES_BACK
        return found


class BreakRequests:
    """The ranks that the user wants to stop in the debugger, until each of them has stopped."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()
        self._asked_at: dict[int, float] = {}

    def add(self, ranks: Iterable[int]) -> None:
        """The user wants these."""
        self._wanted.update(ranks)

    def fold(self, event: Event) -> None:
        """Take note of ranks that have stopped."""
        if isinstance(event, Stopped):
            self._asked_at.pop(event.rank, None)

    def take_ready(self, run: Run, now: float) -> list[int]:
        """The ranks that are to be asked now; one that is at a prompt is asked when it has left that."""
        ready = [rank for rank in self._wanted if run.ranks[rank].state not in ("debugging", "paused")]
        self._wanted.difference_update(ready)
        self._asked_at.update(dict.fromkeys(ready, now))
        return ready

    def take_late(self, now: float) -> list[int]:
        """The ranks that were asked a second ago and have not stopped, each of them once."""
        late = [rank for rank, since in self._asked_at.items() if now - since >= _BREAK]
        for rank in late:
            del self._asked_at[rank]
        return late


def late_text(snapshot: Snapshot, ranks: Sequence[int]) -> str:
    """Where those of the ``ranks`` are that have not stopped, since they are in native code; '' if all have."""
    run = snapshot.run
    late = [rank for rank in ranks if run.ranks[rank].state not in ("debugging", "paused", "waiting for input", *FINAL)]
    lines = [_where(snapshot, rank) for rank in late]
    if lines:
        lines.append(f"{name_ranks(late)} will stop at the next line of Python, when that call returns.")
    return "\n".join(lines)


def _where(snapshot: Snapshot, rank: int) -> str:
    status = snapshot.run.ranks[rank]
    text = f"[{rank}] {status.state}"
    if status.state in FINAL:
        return f"{text}: {status.detail}" if status.detail else text
    frame = next(reversed(status.position.frames), None)
    return f"{text}, line {frame.line}: {snapshot.text(frame)}" if frame is not None else text
