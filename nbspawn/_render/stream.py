"""The lines of all ranks as one bounded text under the cell.

A notebook keeps what is printed into it, a Jupyter server drops everything that comes too fast, and users do print
in loops over a dataset: so there is a budget, counted in bytes, for the whole run. What is beyond it is not lost (the
log files have it) but only counted here, and the last lines of each rank are kept for the end, more of them
for a rank that failed: the reason why it failed is usually among those.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from nbspawn._protocol.messages import Printed
from nbspawn._render import bars
from nbspawn._state.wording import few_ranges

# Characters of one line that are shown, and that are kept of a line for the end.
_SHOWN = 10_000
_KEPT = 1_000
# Lines of a rank that are shown at the end, and of a rank that failed.
_LAST = 10
_LAST_FAILED = 40
# Bytes beyond the budget, shared by the ranks, for what is shown at the end.
_END_BUDGET = 36_000
# Of how many ranks lines are shown at the end; those that failed come first.
_END_RANKS = 32
# Columns of one mark: more rank numbers are unreadable.
_MARK_LIMIT = 24

_INDENTS = (" ", "\t")
_BELONGS = ("\n ", "\n\t", ":\n")
"""One of these is where a line belongs to the one before it. A flood of other lines is searched for them at once."""

_PARTIAL_ESCAPE = re.compile(r"\x1b[^A-Za-z]*\Z")


class MergedStream:
    """Merges the printed lines of ``nprocs`` ranks; every line begins with the mark of its rank, ``[2]``.

    ``log_path_of`` gives the path of a rank's log; ``budget`` is in bytes of UTF-8.
    """

    def __init__(self, nprocs: int, log_path_of: Callable[[int], str], budget: int = 200_000) -> None:
        self._log_path_of = log_path_of
        self._budget = budget
        self._left = budget
        self._over = False
        self._width = len(f"[0-{nprocs - 1}]" if nprocs > 1 else "[0]")
        self._cut: dict[int, _Cut] = {}
        self._wholes: dict[int, int] = {}
        self._groups: dict[int, dict[str | int, list[int]]] = {}
        self._keys: dict[int, Sequence[str | int]] = {}
        self._next: dict[str | int, set[int]] = {}

    @property
    def over_budget(self) -> bool:
        """Was something left out, so that the logs hold more than was shown?"""
        return self._over

    def feed(self, batch: Sequence[Printed], blocks: bool = False) -> str:
        """The text to print for what came in one poll.

        The order of each rank's lines is kept. A line that several ranks have at the same position of the batch, or
        that is the next of others, is shown once, ``[0,2-3] line``, after everything that comes before it in any of
        them; so are finished progress bars with the same counts. ``blocks``: only where all that they have is the same,
        so that what a debugger shows is not cut into pieces.
        """
        return self.feed_part(batch, batch, blocks)[0]

    def feed_part(
        self, part: Sequence[Printed], batch: Sequence[Printed], blocks: bool = False
    ) -> tuple[str, list[Printed]]:
        """The text for this part of the batch, which is the first lines of some ranks, for what others have of these
        lines, and for what comes before them; and what is left of the batch."""
        ends: dict[int, int] = {}
        for event in part:
            ends[event.rank] = ends.get(event.rank, 0) + len(event.lines)
        lines: dict[int, list[str]] = {}
        for event in sorted(batch, key=lambda event: event.rank):
            lines.setdefault(event.rank, []).extend(event.lines)
        first_with: dict[tuple[str, ...], int] = {}
        self._wholes = {rank: first_with.setdefault(tuple(own), rank) for rank, own in lines.items()} if blocks else {}
        self._groups = {}
        self._keys = {rank: _keys(own) for rank, own in lines.items()}
        self._next = {}
        for rank, keys in self._keys.items():
            if keys:
                self._next.setdefault(keys[0], set()).add(rank)
        shown = dict.fromkeys(lines, 0)  # how many lines of each rank are done with
        text: list[str] = []
        for rank in lines:
            self._show(rank, ends.get(rank, 0), lines, shown, text)
        rest = {rank: own[shown[rank] :] for rank, own in lines.items() if shown[rank] < len(own)}
        if not self._over:
            return "".join(text), [Printed(rank, tuple(own), "") for rank, own in rest.items()]
        for rank, own in rest.items():
            self._cut.setdefault(rank, _Cut()).add(own)
        return "".join(text), []

    def finish(self, failed: Collection[int]) -> str:
        """What to print when all is over: the last lines of every rank whose lines did not fit any more."""
        first = sorted(self._cut, key=lambda rank: (rank not in failed, rank))[:_END_RANKS]
        weights = {rank: 4 if rank in failed else 1 for rank in sorted(first)}
        text: list[str] = []
        for rank, weight in weights.items():
            cut = self._cut[rank]
            share = _END_BUDGET * weight // sum(weights.values())
            last = cut.last_lines(_LAST_FAILED if rank in failed else _LAST, share)
            count = "1 line" if cut.lines == 1 else f"{cut.lines:,} lines"
            text.append(f"{self._mark([rank])}… {count} ({_size(cut.bytes)}) left out, the last {len(last)}:\n")
            text += [self._line([rank], line) for line in last]
        if others := self._cut.keys() - weights.keys():
            left_out = sum(self._cut[rank].lines for rank in others)
            text.append(f"{self._mark(sorted(others))}… {left_out:,} lines left out, which only the logs have\n")
        self._cut.clear()
        return "".join(text)

    def _show(self, rank: int, end: int, lines: dict[int, list[str]], shown: dict[int, int], text: list[str]) -> None:
        """Show the lines of ``rank`` up to the position ``end``, and what other ranks have before those they share."""
        while shown[rank] < end and not self._over:
            here = shown[rank]
            same = self._same(rank, here, lines)
            for other in same:
                self._show(other, here, lines, shown, text)
            if shown[rank] > here:
                continue  # it was the next of one of these
            group = [other for other in same if shown[other] == here]
            if not self._wholes:
                group = sorted({*group, *self._next.get(self._keys[rank][here], ())})
            self._spend(group, bars.merged([lines[other][shown[other]] for other in group]), shown, text)

    def _same(self, rank: int, here: int, lines: Mapping[int, list[str]]) -> list[int]:
        """The ranks that have the same line at this position as ``rank``, itself included."""
        if here not in self._groups:
            groups = self._groups[here] = {}
            for other, own in lines.items():
                if here < len(own):
                    groups.setdefault(self._wholes.get(other, self._keys[other][here]), []).append(other)
        return self._groups[here][self._wholes.get(rank, self._keys[rank][here])]

    def _spend(self, group: list[int], line: str, shown: dict[int, int], text: list[str]) -> None:
        if self._over:
            return
        if len(line) > _SHOWN:
            line = f"{_clip(line, _SHOWN)} ({len(line) - _SHOWN:,} more characters in {self._log_path_of(group[0])})"
        marked = self._line(group, line)
        self._left -= len(marked.encode())
        if self._left < 0:
            self._over = True
            directory = os.path.dirname(self._log_path_of(group[0]))
            text.append(
                f"… output is over {_size(self._budget)}: the rest is in {directory}; "
                "the last lines of each rank follow at the end\n"
            )
            return
        text.append(marked)
        for rank in group:
            keys = self._keys[rank]
            self._next[keys[shown[rank]]].discard(rank)
            shown[rank] += 1
            if shown[rank] < len(keys):
                self._next.setdefault(keys[shown[rank]], set()).add(rank)

    def _line(self, ranks: list[int], line: str) -> str:
        return f"{self._mark(ranks)}{line}".rstrip(" ") + "\n"

    def _mark(self, ranks: list[int]) -> str:
        return f"[{few_ranges(ranks, _MARK_LIMIT)}]".ljust(self._width) + " "


def _keys(lines: list[str]) -> Sequence[str | int]:
    """The keys of a rank's lines, of which equal ones may be merged: a line that belongs to the one before it (it is
    indented, or that ends with a colon) only where these are equal, too, so that no tensor loses its heading."""
    text = "\n".join(lines)
    keys = bars.keys(lines, text)
    if not any(sign in text for sign in _BELONGS):
        return keys
    found: list[str | int] = []
    before = ""
    for line, key in zip(lines, keys, strict=True):
        belongs = found and (line[:1] in _INDENTS or before[-1:] == ":")
        found.append(hash((found[-1], key)) if belongs else key)
        before = line
    return found


class _Cut:
    """What was left out of one rank's output: counts, and the last lines."""

    def __init__(self) -> None:
        self.lines = 0
        self.bytes = 0
        self._last: deque[str] = deque(maxlen=_LAST_FAILED)

    def add(self, lines: list[str]) -> None:
        self.lines += len(lines)
        self.bytes += len("\n".join(lines).encode()) + 1
        self._last += [_clip(line, _KEPT) for line in lines[-_LAST_FAILED:]]

    def last_lines(self, count: int, limit: int) -> list[str]:
        """At most ``count`` lines (at least one), clipped and chosen so that they stay near ``limit`` bytes."""
        longest = max(80, limit // 4)
        chosen: list[str] = []
        for line in list(self._last)[-count:][::-1]:
            line = _clip(line, longest)
            limit -= len(line.encode()) + 10  # for the mark
            if limit < 0 and chosen:
                break
            chosen.append(line)
        return chosen[::-1]


def _clip(line: str, length: int) -> str:
    """The first ``length`` characters and …, with no half of an escape sequence and no colour left open."""
    if len(line) <= length:
        return line
    clipped = _PARTIAL_ESCAPE.sub("", line[:length])
    return clipped + ("\x1b[0m…" if "\x1b" in clipped else "…")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB" if count >= 1e3 else f"{count} bytes"
