"""What ranks report of a value, put together: which entries are equal in all of them, and who differs where. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nbspawn._protocol.value_digests import Entries, Entry


class Group(NamedTuple):
    """Ranks in which an entry is the same; ``entry`` is None for those that do not have it."""

    ranks: tuple[int, ...]
    entry: Entry | None


@dataclass
class Closer:
    """How the elements of one group differ from those of the first."""

    count: int = 0
    """Elements that differ."""
    largest: float | None = None
    """The largest difference, of those that are numbers in both."""
    relative: float | None = None
    """The same, relative to the first group's."""
    index: tuple[int, ...] = ()
    """Of the first element that differs."""
    values: tuple[object, object] | None = None
    """That element in the first group, and in this one."""
    close: bool = True
    """Do they count as equal?"""


@dataclass
class Differing:
    """An entry that is not the same in all ranks: ``groups`` are the largest first. ``part`` is that of a tensor that
    is sharded."""

    path: str
    groups: tuple[Group, ...]
    part: str = ""
    closer: dict[int, Closer] = field(default_factory=dict)
    """By the first rank of a group: how it differs from the first, where that was looked at."""

    @property
    def of_one_kind(self) -> bool:
        """Do only the contents differ?"""
        return len({group.entry and group.entry.kind for group in self.groups}) == 1

    @property
    def comparable(self) -> tuple[Entry, ...]:
        """An entry for each group, if these are numbers of one type and shape, of which the differences can be told."""
        entries = [group.entry for group in self.groups if group.entry is not None and group.entry.dtype]
        alike = len({(entry.kind, entry.shape) for entry in entries}) == 1 and len(entries) == len(self.groups)
        return tuple(entries) if alike else ()


@dataclass
class Agreement:
    """How the ranks agree on all entries of a value."""

    ranks: tuple[int, ...]
    cut: int = 0
    """Of how many entries in each rank, if there are more, which are not compared; else 0."""
    count: int = 0
    """How many entries were compared."""
    nbytes: int = 0
    """Their bytes, of each in one rank."""
    differing: list[Differing] = field(default_factory=list)
    within: int = 0
    """How many entries are not equal, but close."""
    sharded: dict[int, int] = field(default_factory=dict)
    """How many of the entries are in so many parts."""
    alone: int = 0
    """How many entries were not compared because each rank has another part of them."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """The paths of the others whose contents were not compared, by the reason."""


def compare(reports: Mapping[int, Entries]) -> Agreement:
    """The agreement of these ranks, which are in order."""
    by_rank = {rank: {entry.path: entry for entry in report.entries} for rank, report in reports.items()}
    paths = dict.fromkeys(path for entries in by_rank.values() for path in entries)
    found = {path: {rank: entries.get(path) for rank, entries in by_rank.items()} for path in paths}
    kinds = {path: _groups(holders, lambda entry: entry.kind) for path, holders in found.items()}
    within = _within([list(entries) for entries in by_rank.values()], {path for path in paths if len(kinds[path]) > 1})
    cut = max(report.cut * len(report.entries) for report in reports.values())
    whole = Agreement(tuple(reports), cut)
    for path, holders in found.items():
        if path in within:
            continue  # what it is in differs already
        some = [entry for entry in holders.values() if entry is not None]
        why = next((entry.skipped for entry in some if entry.skipped), "")
        if len(kinds[path]) > 1 and all(entry.kind for entry in some):
            if len(some) == len(holders) or not cut:
                whole.count += 1
                whole.differing.append(Differing(path, kinds[path]))
        elif why:
            whole.skipped.setdefault(why, []).append(path)
        elif some[0].leaf:
            _compare_parts(whole, path, holders, some[0])
    return whole


def _compare_parts(whole: Agreement, path: str, holders: Mapping[int, Entry | None], one: Entry) -> None:
    held: dict[str, dict[int, Entry | None]] = {}
    for rank, entry in holders.items():
        held.setdefault(entry.part if entry is not None else "", {})[rank] = entry
    if all(len(ranks) == 1 for ranks in held.values()):
        whole.alone += 1
        return
    whole.count += 1
    whole.nbytes += one.nbytes
    if one.parts > 1:
        whole.sharded[one.parts] = whole.sharded.get(one.parts, 0) + 1
    for part, ranks in held.items():
        groups = _groups(ranks, lambda entry: (entry.digests, entry.shape))
        if len(groups) > 1:
            whole.differing.append(Differing(path, groups, part))


def _within(orders: Sequence[Sequence[str]], apart: Collection[str]) -> set[str]:
    """The paths that lead into what is at one of the paths ``apart``; what contains something precedes it."""
    found = set()
    for paths in orders:
        above: str | None = None
        for path in paths:
            if above is not None and path.startswith(above) and path[len(above)] in ".[":
                found.add(path)
            elif path in apart:
                above = path
    return found


def _groups(found: Mapping[int, Entry | None], key: Callable[[Entry], object]) -> tuple[Group, ...]:
    groups: dict[object, list[int]] = {}
    for rank, entry in found.items():
        groups.setdefault(None if entry is None else key(entry), []).append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (found[ranks[0]] is None, -len(ranks), ranks[0]))
    return tuple(Group(tuple(ranks), found[ranks[0]]) for ranks in ordered)
