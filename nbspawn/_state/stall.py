"""The stall rule: why nothing moves, in one plain sentence. Pure; the clock is passed in.

Ranks that wait in a collective wait for those that have not arrived. That is normal while it is short, or as long as
waits of this run have been before: a rank that saves a checkpoint holds its peers up at every epoch. After that it is
shown who waits where, and where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbspawn._state.collectives import findings
from nbspawn._state.run import RankStatus
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.whereabouts import Doing, doing, line_of
from nbspawn._state.wording import name_ranks, on_host

PATIENCE = 5.0  # seconds
_LONGER = 2.0  # times the longest wait that this run has seen end

_BETWEEN_TWO = {"send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv"}
_GUESSED = {"backward", "wait"}  # waits for other ranks, or computes on a device (_rank/sampler.py)


def overdue(snapshot: Snapshot) -> bool:
    """Do ranks wait for others for longer than is normal?"""
    run = snapshot.run
    if any(
        rank.stop or rank.state in ("failed", "killed", "interrupted", "waiting for input", "debugging")
        for rank in run.ranks
    ):
        return False  # the run is ending, or waits for the user
    longest = max((snapshot.now - rank.called for rank in run.ranks if rank.state == "waiting"), default=0.0)
    return longest >= max([PATIENCE, *(_LONGER * rank.longest_wait for rank in run.ranks)])


def stall(snapshot: Snapshot) -> str:
    """What is wrong, or '' if there is nothing to say: exactly where torch's recorder has been asked, and tells."""
    if not overdue(snapshot):
        return ""
    run = snapshot.run
    waiting = [rank for rank in run.ranks if rank.state == "waiting"]
    others = [rank for rank in run.ranks if rank.state != "waiting"]
    if exact := findings(snapshot, run.collectives):
        seconds = max(snapshot.now - rank.called for rank in waiting)
        have = "has" if len(waiting) == 1 else "have"
        return " ".join([f"{name_ranks(rank.rank for rank in waiting)} {have} waited {seconds:.0f} s.", *exact])
    if others:
        return " ".join([_waiting(snapshot, waiting), *_elsewhere(snapshot, others)])
    calls = {rank.position.call for rank in waiting}
    if (
        len(calls) > 1
        and not calls <= _BETWEEN_TWO
        and not calls & _GUESSED
        and min(snapshot.now - rank.called for rank in waiting) >= PATIENCE
    ):
        where = _waiting(snapshot, waiting)
        return f"The ranks have diverged. {where} All ranks have to make the same calls in the same order."
    return ""


def _waiting(snapshot: Snapshot, waiting: Sequence[RankStatus]) -> str:
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for rank in waiting:
        groups.setdefault((rank.position.call, line_of(snapshot.run, rank.position.frames)), []).append(rank)
    sentences = []
    for (call, line), ranks in groups.items():
        have = "has" if len(ranks) == 1 else "have"
        seconds = max(snapshot.now - rank.called for rank in ranks)
        where = f"{call} ({line})" if line else call
        sentences.append(f"{name_ranks(rank.rank for rank in ranks)} {have} waited {seconds:.0f} s in {where}.")
    return " ".join(sentences)


def _elsewhere(snapshot: Snapshot, others: Sequence[RankStatus]) -> list[str]:
    groups: dict[Doing, list[int]] = {}
    for rank in others:
        groups.setdefault(doing(snapshot, rank), []).append(rank.rank)
    sentences = []
    for what, ranks in groups.items():
        who = name_ranks(ranks) + on_host(map(snapshot.run.host, ranks))
        sentences.append(f"{who} {what.of(len(ranks))}.")
    return sentences
