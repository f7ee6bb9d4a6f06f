"""The lanes of a timeline: one for each rank; of many ranks, one for those that did the same at the same time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbspawn._state.timeline import Activity, Bin, Timeline

MAX_LANES = 16
_WINDOWS = 12  # in which ranks are compared, at most
_WINDOW = 10.0  # seconds, at least: in fewer samples, ranks that do the same look different
_ALIKE = 0.25  # of their time may differ between ranks that share a lane


@dataclass(frozen=True)
class Lane:
    """What these ranks did: their ``bins``, as those of a timeline, added up."""

    ranks: tuple[int, ...]
    bins: Sequence[Bin]


def lanes(timeline: Timeline, apart: Sequence[int] = ()) -> list[Lane]:
    """The lanes of all ranks, in the order of their first. Of more than ``MAX_LANES`` ranks those share a lane that did
    the same; a rank that is ``apart``, or did what no other did, has its own."""
    ranks = range(len(timeline.bins))
    if len(ranks) <= MAX_LANES:
        return [Lane((rank,), timeline.bins[rank]) for rank in ranks]
    alone = list(apart)[: MAX_LANES // 2]
    groups: list[tuple[_Shares, list[int]]] = []
    length = max(map(len, timeline.bins))
    windows = max(1, min(_WINDOWS, length, int(length * timeline.width / _WINDOW)))
    for rank in ranks:
        if rank in alone:
            continue
        shares = _shares(timeline.bins[rank], length, windows)
        distances = [_distance(shares, first) for first, _ in groups]
        nearest = min(range(len(groups)), key=distances.__getitem__, default=None)
        if nearest is None or (distances[nearest] > _ALIKE and len(groups) + len(alone) < MAX_LANES):
            groups.append((shares, [rank]))
        else:
            groups[nearest][1].append(rank)
    found = [[rank] for rank in alone] + [ranks for _, ranks in groups]
    return [Lane(tuple(ranks), _sum([timeline.bins[rank] for rank in ranks])) for ranks in sorted(found)]


_Shares = Sequence[dict[Activity, float]]


def _shares(bins: Sequence[Bin], length: int, windows: int) -> _Shares:
    """The shares by window: the share of each activity in the rank's time. ``length`` is the number of bins of all
    windows."""
    merged = [Bin() for _ in range(windows)]
    for index, one in enumerate(bins):
        merged[index * windows // length].merge(one)
    found = []
    for window in merged:
        total = sum(window.seconds.values())
        found.append({activity: seconds / total for activity, seconds in window.seconds.items()})
    return found


def _distance(one: _Shares, other: _Shares) -> float:
    """The part of their time in which two ranks did not do the same, 0 to 1."""
    differences = [
        sum(abs(mine.get(activity, 0.0) - its.get(activity, 0.0)) for activity in mine.keys() | its.keys()) / 2
        for mine, its in zip(one, other, strict=True)
    ]
    return sum(differences) / len(differences)


def _sum(all_bins: Sequence[Sequence[Bin]]) -> Sequence[Bin]:
    if len(all_bins) == 1:
        return all_bins[0]
    total = [Bin() for _ in range(max(map(len, all_bins)))]
    for bins in all_bins:
        for index, one in enumerate(bins):
            total[index].merge(one)
    return total
