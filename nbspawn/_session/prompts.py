"""Whose turn it is at the person's one prompt, and what they may say there to several ranks at once.

Ranks ask in any number and at any time: ``input()``, and the debuggers of those that have stopped. The person answers
one at a time. At a debugger's prompt three words are for the notebook, not for pdb: ``ranks`` lists who stands where,
``rank 2`` turns to another rank that has stopped, ``all n`` gives a command to every one of them.

Pure but for its own memory; the clock is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from nbspawn._state.run import ECHO, FINAL, Run, Source, name_ranks, ranges

# Seconds for other ranks to come to their breakpoints, or to tell that they wait (three looks of _rank/sampler.py): no
# table is drawn while the person is being asked.
_GATHER = 0.3
_START = 5.0  # seconds, as long as some have not even started
_COMES_BACK = 10.0  # seconds in which a rank that makes one step keeps its turn

_WORDS = re.compile(r"(?P<word>ranks|rank\s+(?P<rank>\d+)|all(?:\s+(?P<command>.*))?)\s*")


@dataclass
class Turns:
    """The questions that wait for an answer."""

    pending: dict[int, InputRequest] = field(default_factory=dict)
    """By rank, in the order in which they came."""
    _focus: int | None = None
    _came: float = 0.0
    _coming_back: dict[int, float] = field(default_factory=dict)
    _told: str = ""
    _all: bool = False

    @property
    def open(self) -> bool:
        """Is the person being asked, or about to be?"""
        return bool(self.pending or self._coming_back)

    def fold(self, event: Event, now: float) -> None:
        """Take note of what a rank has said."""
        if isinstance(event, InputRequest):
            self.pending[event.rank] = event
            self._coming_back.pop(event.rank, None)
            self._came = now
        elif isinstance(event, Stopped):
            self._coming_back[event.rank] = now + _COMES_BACK  # it shows where it is, then asks
        elif isinstance(event, Resumed) and not event.soon:
            self._coming_back.pop(event.rank, None)
        elif isinstance(event, (Returned, Raised, Leaving, Exited)):
            self.pending.pop(event.rank, None)
            self._coming_back.pop(event.rank, None)

    def due(self, run: Run, now: float) -> InputRequest | None:
        """The question to put to the person at ``now`` seconds, if it is time for one."""
        for rank, until in list(self._coming_back.items()):
            if now > until or run.ranks[rank].state in FINAL:
                del self._coming_back[rank]
        waiting = [rank for rank in self._coming_back if run.ranks[rank].state == "waiting"]
        if not self.pending or len(waiting) < len(self._coming_back):
            return None
        if waiting and now - self._came < _GATHER:
            return None  # whom they wait for may just have come, out of the same collective
        for rank in waiting:
            del self._coming_back[rank]
        if self._focus not in self.pending:
            first = next(iter(self.pending))
            states = run.counts
            gather = _START if "starting" in states else _GATHER if "running" in states else 0.0
            if run.ranks[first].state == "debugging" and now - self._came < gather:
                return None
            self._focus = first
        return self.pending[self._focus]

    def question(self, request: InputRequest, run: Run) -> tuple[str, str]:
        """What to tell the person first ('' for nothing new), and the prompt."""
        prompt = f"[{request.rank}] {request.prompt}"
        if run.ranks[request.rank].state != "debugging":
            return "", prompt
        others = [rank for rank in self.pending if rank != request.rank and run.ranks[rank].state == "debugging"]
        told = []
        if others:
            verb = "has stopped" if len(others) == 1 else "have stopped"
            told.append(
                f"{name_ranks(sorted(others))} {verb} too: `rank {min(others)}` turns there, `all n` steps all."
            )
        # Not those that only miss a peer: the person holds its peers up.
        if failed := [rank.rank for rank in run.ranks if rank.state == "failed" and ECHO not in rank.detail]:
            details = "; ".join(sorted({run.ranks[rank].detail for rank in failed}))
            told.append(f"{name_ranks(failed)} {'has' if len(failed) == 1 else 'have'} failed: {details}.")
        news = " ".join(told)
        self._told, news = news, news if news != self._told else ""
        return news, prompt

    def answers(
        self, request: InputRequest, reply: InputReply, run: Run, now: float, source: Source
    ) -> tuple[dict[int, InputReply], str]:
        """What to send to whom, and what to tell the person."""
        debugging = [rank for rank in self.pending if run.ranks[rank].state == "debugging"]
        if reply.kind != "text" or request.rank not in debugging:
            return self._send([request.rank], reply, now, debugging), ""
        word = _WORDS.fullmatch(reply.text.strip())
        if word is None:
            self._all = self._all and not reply.text.strip()  # an empty line says the last command again
            return self._send(debugging if self._all else [request.rank], reply, now, debugging), ""
        if word["command"]:
            self._all = True
            return self._send(debugging, replace(reply, text=word["command"]), now, debugging), ""
        if word["rank"] is None:
            if word["word"].startswith("all"):
                return {}, "all what? `all n`, `all p loss`: any command of the debugger."
            return {}, "\n".join(_where(run, rank, source) for rank in range(len(run.ranks)))
        rank = int(word["rank"])
        if rank in debugging:
            self._focus, self._all = rank, False
            return {}, _where(run, rank, source)
        if rank >= len(run.ranks):
            return {}, f"there is no rank {rank}: the last is {len(run.ranks) - 1}."
        stopped = ranges(debugging)
        return {}, f"{_where(run, rank, source)}: the debugger has not stopped it. Stopped: {stopped}."

    def _send(self, ranks: list[int], reply: InputReply, now: float, debugging: list[int]) -> dict[int, InputReply]:
        for rank in ranks:
            del self.pending[rank]
            if rank in debugging:
                self._coming_back[rank] = now + _COMES_BACK
        return dict.fromkeys(ranks, reply)


def not_yet(run: Run, ranks: Sequence[int], source: Source) -> str:
    """Of ranks that the person wants to debug, and that are in native code; '' if all others have stopped."""
    late = [rank for rank in ranks if run.ranks[rank].state not in ("debugging", "waiting for input", *FINAL)]
    told = [_where(run, rank, source) for rank in late]
    if told:
        told.append(f"{name_ranks(late)} will stop at the next line of Python, when that call returns.")
    return "\n".join(told)


def _where(run: Run, rank: int, source: Source) -> str:
    status = run.ranks[rank]
    told = f"[{rank}] {status.state}"
    if status.state in FINAL:
        return f"{told}: {status.detail}" if status.detail else told
    frame = next(reversed(status.position.frames), None)
    return f"{told}, line {frame.line}: {run.text(frame, source)}" if frame is not None else told
