"""What is wrong with the ranks' collectives, by what torch's flight recorder has of each: pure.

    for sentence in findings(snapshot, reports): ...

All ranks of a process group have to make the same calls in the same order. The recorder counts a group's calls, so
those with the same number belong together, whatever the ranks call them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbspawn._protocol.collectives import ROOTED, UNKNOWN, Call, Collectives, GroupCalls, Transfer
from nbspawn._state.run import FINAL, Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.whereabouts import Doing, doing, line_of
from nbspawn._state.wording import name_ranks

STILL = 1.0
"""Seconds that a rank has waited, at least: ranks answer one after another, and in a run that goes well some are always
ahead of others."""

_FIRST = 30.0
"""Seconds for which a group's first call on GPUs is in order: it connects them."""

_SENTENCES = 5
_PARTS = 6  # of one sentence

Reports = Mapping[int, Collectives]
"""By the run's rank; a rank that has not answered, or is in no group, is not in it."""


@dataclass(frozen=True)
class Group:
    """A process group: its ``members`` are ranks of the run in the order of the group, ``calls`` what each of those
    that have answered has called, by the calls' numbers."""

    label: str
    members: tuple[int, ...]
    calls: Mapping[int, Mapping[int, Call]]

    def last(self, rank: int) -> int:
        """The number of the rank's last call; 0 if it has made none."""
        return max(self.calls[rank], default=0)

    def at(self, number: int) -> dict[int, Call]:
        """The calls with this number, by rank."""
        return {rank: calls[number] for rank, calls in self.calls.items() if number in calls}


class Gap(NamedTuple):
    """Ranks are in a call (``inside``) that others have not reached, as far as is known (``missing``)."""

    group: Group
    number: int
    call: Call
    inside: tuple[int, ...]
    passed: tuple[int, ...]
    missing: tuple[int, ...]


def findings(
    snapshot: Snapshot, reports: Reports, failed: Collection[int] = (), aborted: Collection[int] = ()
) -> list[str]:
    """A sentence for each thing that is wrong; none if nothing is, as far as the recorder tells. ``failed``: the ranks
    that have raised in a collective; which one is not always known. ``aborted``: those of them that a library ended."""
    found = []
    gaps = []
    for group in groups(snapshot.run, reports):
        if mismatch := _mismatch(snapshot.run, group):
            found.append(mismatch)
        elif gap := _gap(group, failed):
            if any(stands_still(snapshot, rank, group.calls[rank][gap.number].age) for rank in gap.inside):
                gaps.append(gap)
        elif unable := _unable(snapshot, group):
            found.append(unable)
    crossed = _crossed(gaps)
    if crossed is not None:
        found.append(_crossing(snapshot.run, *crossed))
        gaps = [gap for gap in gaps if gap not in crossed]
    waits = _waits(snapshot.run, {rank: one for rank, one in reports.items() if rank not in failed}, gaps)
    found += [_missing(snapshot, waits, gap, failed) for gap in gaps]
    said = {rank for gap in gaps for rank in gap.missing}
    found += _transfers(snapshot, reports, waits, {*said, *aborted})
    found += _refused(snapshot.run, reports, aborted)
    if not found:
        found += [_same_root(snapshot.run, group, failed) for group in groups(snapshot.run, reports)]
        found = list(filter(None, found))
    more = len(found) - _SENTENCES
    return [*found[:_SENTENCES], f"The same of {more} more."] if more > 0 else found


def mismatches(run: Run, reports: Reports) -> list[str]:
    """The calls that did not match, of ranks that have ended well: nothing has failed."""
    found = list(filter(None, (_mismatch(run, group) for group in groups(run, reports))))[:_SENTENCES]
    return [*found, "No rank has failed, but the values that they got are wrong."] if found else []


def stands_still(snapshot: Snapshot, rank: int, age: float = math.inf) -> bool:
    """Has it waited for so long, or ended? ``age``: of the call that it tells of, which may be a later one than that
    in which it was seen last."""
    status = snapshot.run.ranks[rank]
    waits = status.state == "waiting" and min(snapshot.now - status.called, age) >= STILL
    return waits or status.state in FINAL or bool(status.stop)


def groups(run: Run, reports: Reports) -> list[Group]:
    """The groups of which any rank tells; the default group first. None if the ranks are not one program: they have
    made groups each for itself, or with processes of other runs."""
    to_run = _to_run(reports)
    ranks_of_all = {rank for report in reports.values() for group in report.groups for rank in group.ranks}
    if len(to_run) < len(reports) or not ranks_of_all <= set(range(len(run.ranks))):
        return []
    calls: dict[GroupCalls, dict[int, dict[int, Call]]] = {}
    for rank, report in sorted(reports.items()):
        for group in report.groups:
            calls.setdefault(group._replace(calls=()), {})[rank] = {call.number: call for call in group.calls}
    return [
        Group(_label(group), tuple(to_run.get(rank, rank) for rank in group.ranks), by_rank)
        for group, by_rank in calls.items()
    ]


def _label(group: GroupCalls) -> str:
    of_backend = group.backend and f" ({group.backend})"
    if group.description == "default_pg":
        return f"the default group{of_backend}"
    called = group.description if group.description not in ("", "undefined") else group.name
    return f"group {called}{of_backend} ({_ranks(group.ranks)})"


def alike(calls: Mapping[int, Call]) -> list[tuple[Call, list[int]]]:
    """Calls that belong together, by what has to be the same in all ranks: each kind with its ranks."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    differ = len({call.root for call in calls.values()} - {UNKNOWN}) > 1
    # all_gather may get tensors of different sizes, if all ranks have the same list to receive them in.
    uneven = len({call.outputs for call in calls.values()}) == 1
    for rank, call in calls.items():
        kinds.setdefault((*_signature(call, uneven), call.root if differ else UNKNOWN), []).append(rank)
    return [(calls[ranks[0]], ranks) for ranks in kinds.values()]


def _signature(call: Call, uneven: bool) -> tuple[Any, ...]:
    kind = call.operation.rpartition(":")[2]
    # Each pair of ranks may exchange another number of elements.
    if "all_to_all" in kind or "alltoall" in kind or ("gather" in kind and uneven):
        return call.name, kind, frozenset(tensor.partition("[")[0] for tensor in call.inputs)
    # Of scatter only the source has an input.
    source_only = "scatter" in kind and "reduce" not in kind
    return call.name, kind, tuple(map(_amount, call.outputs if source_only else call.inputs))


def _amount(tensor: str) -> tuple[str, int]:
    """Dtype and number of elements: their shape is the rank's own affair."""
    dtype, _, shape = tensor.rstrip("]").partition("[")
    return dtype, math.prod(int(size) for size in shape.split(", ") if size)


# ---------------------------------------------------------------- a mismatch


def _mismatch(run: Run, group: Group) -> str:
    for number in sorted({number for calls in group.calls.values() for number in calls}):
        kinds = alike(group.at(number))
        if len(kinds) > 1:
            names = {call.name for call, _ in kinds}
            if len(names) == 1 and len({_signature(call, False) for call, _ in kinds}) == 1:
                return _other_roots(run, group, number, kinds)
            parts = []
            for call, ranks in kinds:
                verb = "calls" if len(ranks) == 1 else "call"
                parts.append(f"{_ranks(ranks)} {verb} {described(run, call)}")
            if (more := len(parts) - _PARTS) > 0:
                parts[_PARTS:] = [f"{more} more differ"]
            rule = "pass the same shape and dtype" if len(names) == 1 else "make the same calls in the same order"
            return f"Collective {number} of {group.label}: {', '.join(parts)}. All its ranks have to {rule}."
    return ""


def _other_roots(run: Run, group: Group, number: int, kinds: Sequence[tuple[Call, list[int]]]) -> str:
    role, call = ROOTED[kinds[0][0].name], kinds[0][0]
    parts = [f"{_ranks(ranks)} with {role}={one.root}" for one, ranks in kinds if one.root != UNKNOWN]
    if (more := len(parts) - _PARTS) > 0:
        parts[_PARTS:] = [f"{more} more differ"]
    called = f"Collective {number} of {group.label}, {described(run, call)}: called by {', '.join(parts)}."
    return f"{called} All its ranks have to name the same {role}."


# ---------------------------------------------------------------- ranks that have not reached a call


def _gap(group: Group, failed: Collection[int]) -> Gap | None:
    """The first call that some ranks wait in for others. A call of which a rank has learnt an error later, as in
    ``wait()``, seems to have ended well: who has ``failed`` has not passed one that others have not reached."""
    for number in sorted({number for calls in group.calls.values() for number in calls}):
        at = group.at(number)
        inside = tuple(rank for rank, call in at.items() if call.pending) or tuple(sorted(at.keys() & set(failed)))
        missing = tuple(rank for rank in group.members if rank not in group.calls or group.last(rank) < number)
        if missing and inside:
            passed = tuple(rank for rank, call in at.items() if not call.pending and rank not in failed)
            return Gap(group, number, at[inside[0]], inside, passed, missing)
    return None


def _unable(snapshot: Snapshot, group: Group) -> str:
    """A sentence on a first call that all ranks are in, and none leaves: NCCL may not get through from one GPU to
    another."""
    at = group.at(1)
    if len(at) < len(group.members) or not all(
        call.pending and call.age >= _FIRST and call.operation.startswith("nccl:") for call in at.values()
    ):
        return ""
    call = described(snapshot.run, at[group.members[0]])
    return (
        f"Collective 1 of {group.label}, {call}: all its ranks have called it, and it has not ended for "
        f"{min(call.age for call in at.values()):.0f} s. Unless the GPUs compute for so long before it, NCCL cannot "
        "communicate between them: try --env NCCL_P2P_DISABLE=1; with --env NCCL_DEBUG=INFO it tells what it does."
    )


def _missing(snapshot: Snapshot, waits: Mapping[int, Doing], gap: Gap, failed: Collection[int]) -> str:
    number, group = gap.number, gap.group
    inside = "is" if len(gap.inside) == 1 else "are"
    parts = [f"{_ranks(gap.inside)} {inside} in it"]
    if gap.passed:
        parts.append(f"{_ranks(gap.passed)} {'has' if len(gap.passed) == 1 else 'have'} passed it")
    groups: dict[tuple[str, Doing], list[int]] = {}
    for rank in gap.missing:
        what = waits.get(rank) or doing(snapshot, snapshot.run.ranks[rank])
        behind = "" if rank in failed else _behind(group, rank)  # torch may have refused this very call
        groups.setdefault((behind, what), []).append(rank)
    for (behind, what), ranks in groups.items():
        have = "has" if len(ranks) == 1 else "have"
        parts.append(f"{_ranks(ranks)} {behind and f'{have} {behind} and '}{what.of(len(ranks))}")
    if (more := len(parts) - _PARTS) > 0:
        parts[_PARTS:] = [f"and {more} more"]
    return f"Collective {number} of {group.label}, {described(snapshot.run, gap.call)}: {', '.join(parts)}."


def _behind(group: Group, rank: int) -> str:
    """'not reached it (last call: 16, broadcast)'; '' of one that has not answered: it may have passed the call."""
    if rank not in group.calls:
        return ""
    number = group.last(rank)
    last = f"last call: {number}, {group.calls[rank][number].name}" if number else "no call recorded"
    return f"not reached it ({last})"


def _waits(run: Run, reports: Reports, gaps: Sequence[Gap]) -> dict[int, Doing]:
    """What ranks wait in, if that is known exactly."""
    found: dict[int, Doing] = {}
    for gap in gaps:
        # Of several async calls a rank waits in the first one.
        call = f"in collective {gap.number} of {gap.group.label}, {described(run, gap.call)}"
        for rank in gap.inside:
            found.setdefault(rank, Doing(("waits", call)))
    for rank, report in reports.items():
        if (transfer := report.transfer) is not None:
            found[rank] = Doing(("waits", f"in {_between(run, rank, transfer, _to_run(reports))}"))
    return found


def _crossed(gaps: Sequence[Gap]) -> tuple[Gap, Gap] | None:
    """Two calls whose ranks wait for each other."""
    for number, one in enumerate(gaps):
        for other in gaps[number + 1 :]:
            if set(one.inside) & set(other.missing) and set(other.inside) & set(one.missing):
                return one, other
    return None


def _crossing(run: Run, one: Gap, other: Gap) -> str:
    parts = [
        f"{_ranks(gap.inside)} wait{'s' * (len(gap.inside) == 1)} in collective {gap.number} of {gap.group.label}, "
        f"{described(run, gap.call)}"
        for gap in (one, other)
    ]
    return f"The ranks use two groups in different orders, and wait for each other: {parts[0]}; {parts[1]}."


# ---------------------------------------------------------------- sends and receives


def _transfers(
    snapshot: Snapshot, reports: Reports, waits: Mapping[int, Doing], said: Collection[int]
) -> Iterator[str]:
    to_run = _to_run(reports)
    for rank, report in sorted(reports.items()):
        transfer = report.transfer
        if rank in said or transfer is None or transfer.peer not in to_run:
            continue
        seen_in_it = snapshot.run.ranks[rank].position.frames[-1:] == transfer.frames[-1:]
        if not stands_still(snapshot, rank, math.inf if seen_in_it else transfer.age):
            continue
        peer = to_run[transfer.peer]
        other = reports[peer].transfer
        here = _between(snapshot.run, rank, transfer, to_run)
        if other is not None and other.name != transfer.name and other.peer in (-1, report.rank):
            if other.tag == transfer.tag or other.peer < 0:
                continue  # they match
            if transfer.name == "send":
                there = _between(snapshot.run, peer, other, to_run)
                yield f"Rank {rank} waits in {here}, rank {peer} in {there}: the tags differ."
            continue
        what = waits.get(peer) or doing(snapshot, snapshot.run.ranks[peer])
        does_not = "receive from it" if transfer.name == "send" else "send to it"
        yield f"Rank {rank} waits in {here}, but rank {peer} does not {does_not}: it {what.of(1)}."


def _refused(run: Run, reports: Reports, aborted: Collection[int]) -> Iterator[str]:
    """gloo ends a process that is sent more than it expects."""
    to_run = _to_run(reports)
    for rank in sorted(aborted):
        if (transfer := reports[rank].transfer) is not None:
            here = _between(run, rank, transfer, to_run)
            yield f"Rank {rank} was ended in {here}. Both ranks have to pass the same size and dtype."


def _same_root(run: Run, group: Group, failed: Collection[int]) -> str:
    """A sentence on a call that all ranks have made, and in which some have lost a peer: which root the others named,
    nobody knows any more."""
    for rank in sorted(set(failed) & group.calls.keys()):
        number = group.last(rank)
        call = group.calls[rank].get(number)
        if call is None or call.root == UNKNOWN or len(group.at(number)) < len(group.members):
            continue
        what = f"Collective {number} of {group.label}, {described(run, call)}"
        role = ROOTED[call.name]
        return (
            f"{what}: all ranks have called it, rank {rank} with {role}={call.root}. All have to name the same {role}."
        )
    return ""


def _between(run: Run, rank: int, transfer: Transfer, to_run: Mapping[int, int]) -> str:
    """'send of float32[4] to rank 1 (line 5)'."""
    direction = "to" if transfer.name == "send" else "from"
    peer = "any rank" if transfer.peer < 0 else f"rank {to_run.get(transfer.peer, transfer.peer)}"
    tag = f" with tag {transfer.tag}" if transfer.tag else ""
    line = line_of(run, transfer.frames)
    return f"{transfer.name} of {transfer.tensor} {direction} {peer}{tag}{line and f' ({line})'}"


# ---------------------------------------------------------------- wording


def described(run: Run, call: Call) -> str:
    """'all_reduce float32[1024, 10] (line 12)'."""
    tensors, line = tensors_of(call), line_of(run, call.frames)
    return f"{call.name}{tensors and f' {tensors}'}{line and f' ({line})'}"


def tensors_of(call: Call) -> str:
    """'float32[1024, 10]'; '' if it takes none."""
    return ", ".join(call.inputs or call.outputs)


def _ranks(ranks: Iterable[int]) -> str:
    """'ranks 0 and 2-3', in a sentence."""
    named = name_ranks(ranks)
    return named[0].lower() + named[1:]


def _to_run(reports: Reports) -> dict[int, int]:
    """The run's numbers by torch's numbers of ranks."""
    return {report.rank: rank for rank, report in reports.items()}
