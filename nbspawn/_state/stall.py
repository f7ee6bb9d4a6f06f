"""The stall rule: why nothing moves, in one plain sentence. Pure; the clock is passed in.

Ranks that wait in a collective wait for those that have not arrived. That is normal while it is short, or as long as
waits of this run have been before: a rank that saves a checkpoint holds its peers up at every epoch. After that it is
shown who waits where, and where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbspawn._state.run import FINAL, RankStatus, Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.wording import name_ranks, on_host

PATIENCE = 5.0  # seconds
_LONGER = 2.0  # times the longest wait that this run has seen end
SILENCE = 3.0  # seconds without a sign of life that are worth showing; a rank gives two a second

_BETWEEN_TWO = {"send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv"}
_GUESSED = {"backward", "wait"}  # waits for other ranks, or computes on a device (_rank/sampler.py)


def stall(snapshot: Snapshot) -> str:
    """The sentence, or '' if there is nothing to say."""
    run, now = snapshot.run, snapshot.now
    if any(
        rank.stop or rank.state in ("failed", "killed", "interrupted", "waiting for input", "debugging")
        for rank in run.ranks
    ):
        return ""  # the run is ending, or waits for the user
    waiting = [rank for rank in run.ranks if rank.state == "waiting"]
    others = [rank for rank in run.ranks if rank.state != "waiting"]
    patience = max([PATIENCE, *(_LONGER * rank.longest_wait for rank in run.ranks)])
    longest = max((now - rank.called for rank in waiting), default=0.0)
    if longest < patience:
        return ""
    if others:
        return " ".join([_waiting(snapshot, waiting), *_elsewhere(snapshot, others)])
    calls = {rank.position.call for rank in waiting}
    if (
        len(calls) > 1
        and not calls <= _BETWEEN_TWO
        and not calls & _GUESSED
        and min(now - rank.called for rank in waiting) >= PATIENCE
    ):
        where = _waiting(snapshot, waiting)
        return f"The ranks have diverged. {where} All ranks have to make the same calls in the same order."
    return ""


def silent(rank: RankStatus, now: float) -> float:
    """Seconds since the rank's last sign of life, if it should have given one; else 0."""
    if rank.alive is None or rank.state in FINAL:
        return 0.0
    return now - rank.alive if now - rank.alive >= SILENCE else 0.0


def _waiting(snapshot: Snapshot, waiting: Sequence[RankStatus]) -> str:
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for rank in waiting:
        groups.setdefault((rank.position.call, _line(snapshot.run, rank)), []).append(rank)
    sentences = []
    for (call, line), ranks in groups.items():
        have = "has" if len(ranks) == 1 else "have"
        seconds = max(snapshot.now - rank.called for rank in ranks)
        where = f"{call} ({line})" if line else call
        sentences.append(f"{name_ranks(rank.rank for rank in ranks)} {have} waited {seconds:.0f} s in {where}.")
    return " ".join(sentences)


def _elsewhere(snapshot: Snapshot, others: Sequence[RankStatus]) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in others:
        groups.setdefault(_doing(snapshot, rank), []).append(rank.rank)
    plural = {"is": "are", "has": "have"}
    sentences = []
    for (verb, rest), ranks in groups.items():
        who = name_ranks(ranks) + on_host(map(snapshot.run.host, ranks))
        sentences.append(f"{who} {verb if len(ranks) == 1 else plural[verb]} {rest}.")
    return sentences


def _doing(snapshot: Snapshot, rank: RankStatus) -> tuple[str, str]:
    if rank.state == "done":
        return "has", "returned"
    if rank.state == "starting":
        return "is", "starting"
    spot, line = rank.spot(snapshot.run.cell), _line(snapshot.run, rank)
    text = snapshot.text(spot) if spot is not None else ""
    where = f"{line}: {text}" if text else line
    if quiet := silent(rank, snapshot.now):
        return "has", f"given no sign of life for {quiet:.0f} s" + (f", last seen at {where}" if where else "")
    return "is", f"at {where}" if where else "not in the cell's code"


def _line(run: Run, rank: RankStatus) -> str:
    spot = rank.spot(run.cell)
    return f"line {spot.line}" if spot is not None else ""
