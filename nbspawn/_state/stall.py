"""The stall rule: why nothing moves, in one plain sentence. Pure; the clock is passed in.

Ranks that wait in a collective, or for a GPU that is in one, wait for those that have not arrived. That is normal while
it is short, or as long as waits of this run have been before: a rank that saves a checkpoint holds its peers up at
every epoch. After that it is shown who waits where, and where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbspawn._state.collectives import findings
from nbspawn._state.run import RankStatus
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.whereabouts import Doing, doing, line_of
from nbspawn._state.wording import name_ranks, on_host

PATIENCE = 5.0  # seconds
_STILL = 15.0  # seconds
_NOTHING = 0.03  # of a processor: the rank's own sampler takes about 1 %
_HARDLY = 0.1  # of a processor
_LONGER = 2.0  # times the longest wait that this run has seen end

_SILENT = 5.0  # seconds without a sign of life: native code holds Python's lock
_STUCK = 10.0  # seconds in one call

_BETWEEN_TWO = {"send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv"}
_GUESSED = {"backward", "wait"}  # waits for other ranks, or computes on a device (_rank/report/sampler.py)


def overdue(snapshot: Snapshot) -> bool:
    """Do ranks wait for others for longer than is normal?"""
    run = snapshot.run
    if any(
        rank.stop or rank.state in ("failed", "killed", "interrupted", "waiting for input", "debugging", "paused")
        for rank in run.ranks
    ):
        return False  # the run is ending, or waits for the user
    longest = max((snapshot.now - rank.called for rank in run.ranks if rank.state == "waiting"), default=0.0)
    return longest >= max([PATIENCE, *(_LONGER * rank.longest_wait for rank in run.ranks)])


def stuck(snapshot: Snapshot) -> list[int]:
    """The ranks that have stood still for so long that what they do in native code is worth halting them."""
    return [
        rank.rank
        for rank in snapshot.run.ranks
        if (rank.state == "waiting" or (rank.state == "running" and (rank.cpu or 0.0) < _HARDLY))
        and (snapshot.now - rank.called >= _STUCK or (rank.alive and snapshot.now - rank.alive >= _SILENT))
    ]


def stall(snapshot: Snapshot) -> str:
    """What is wrong, or '' if there is nothing to say: exactly where torch's recorder has been asked, and tells."""
    if not overdue(snapshot):
        return _without_threads(snapshot)
    run = snapshot.run
    waiting = [rank for rank in run.ranks if rank.state == "waiting"]
    others = [rank for rank in run.ranks if rank.state != "waiting"]
    on_device = [rank for rank in waiting if rank.position.device]
    if exact := findings(snapshot, run.collectives):
        in_calls = [rank for rank in waiting if not rank.position.device]
        heads = [*([f"{_have_waited(snapshot, in_calls)}."] if in_calls else []), *_waiting(snapshot, on_device)]
        return " ".join([*heads, *exact])
    if run.collectives and len(on_device) == len(waiting):
        return ""  # all have made the same calls: the devices compute
    if others:
        return " ".join([*_waiting(snapshot, waiting), *_elsewhere(snapshot, others)])
    calls = {rank.position.call for rank in waiting}
    if (
        len(calls) > 1
        and not calls <= _BETWEEN_TWO
        and not calls & _GUESSED
        and not on_device
        and min(snapshot.now - rank.called for rank in waiting) >= PATIENCE
    ):
        where = " ".join(_waiting(snapshot, waiting))
        return f"The ranks have diverged. {where} All ranks have to make the same calls in the same order."
    return ""


def _without_threads(snapshot: Snapshot) -> str:
    """A sentence on forked ranks that compute nothing: a library may wait in them for threads that fork has not
    copied."""
    run = snapshot.run
    still = [
        rank
        for rank in run.ranks
        if run.method == "fork"
        and rank.state == "running"
        and not rank.stop
        and rank.position.frames
        and snapshot.now - rank.called >= _STILL
        and rank.cpu is not None
        and rank.cpu < _NOTHING
        and "sleep" not in snapshot.text(rank.position.frames[-1])
    ]
    if not still:
        return ""
    place = " and ".join(dict.fromkeys(line_of(run, rank.position.frames) for rank in still))
    seconds = max(snapshot.now - rank.called for rank in still)
    have = "has" if len(still) == 1 else "have"
    return (
        f"{name_ranks(rank.rank for rank in still)} {have} computed nothing for {seconds:.0f} s at {place}. A library "
        "may wait there for threads of the notebook, which forked ranks do not have: -m forkserver does without fork."
    )


def _waiting(snapshot: Snapshot, waiting: Sequence[RankStatus]) -> list[str]:
    groups: dict[tuple[str, bool], list[RankStatus]] = {}
    for rank in waiting:
        groups.setdefault((_place(snapshot, rank), rank.position.device), []).append(rank)
    sentences = []
    for (place, device), ranks in groups.items():
        their = " for its GPU" if len(ranks) == 1 else " for their GPUs"
        sentences.append(f"{_have_waited(snapshot, ranks)} {place}{their * device}.")
    return sentences


def _place(snapshot: Snapshot, rank: RankStatus) -> str:
    """'in all_reduce (line 3)', or of a wait for the device 'at line 3 (loss.item())'."""
    call, line = rank.position.call, line_of(snapshot.run, rank.position.frames)
    if not rank.position.device:
        return f"in {call}{line and f' ({line})'}"
    frame = rank.spot(snapshot.run.cell)
    text = snapshot.text(frame) if frame is not None else ""
    return f"at {line}{text and f' ({text})'}" if line else "after the last line"


def _have_waited(snapshot: Snapshot, ranks: Sequence[RankStatus]) -> str:
    """'Ranks 0-2 have waited 14 s'."""
    seconds = max(snapshot.now - rank.called for rank in ranks)
    return f"{name_ranks(rank.rank for rank in ranks)} {'has' if len(ranks) == 1 else 'have'} waited {seconds:.0f} s"


def _elsewhere(snapshot: Snapshot, others: Sequence[RankStatus]) -> list[str]:
    groups: dict[Doing, list[int]] = {}
    for rank in others:
        groups.setdefault(doing(snapshot, rank), []).append(rank.rank)
    sentences = []
    for what, ranks in groups.items():
        who = name_ranks(ranks) + on_host(map(snapshot.run.host, ranks))
        sentences.append(f"{who} {what.of(len(ranks))}.")
    return sentences
