"""A comparison over ranks as plain text: one sentence if all are equal, else the first entries that differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nbspawn._protocol.value_digests import Entry
from nbspawn._render.text import cell, clip, size
from nbspawn._state.agreement import Agreement, Closer, Differing, Group
from nbspawn._state.wording import name_ranks

_ENTRIES = 10  # that differ, shown
_GROUPS = 4  # of one entry, shown
_NAMES = 3  # of entries that are not compared
_WIDTH = 100  # of a path, of an expression


def text(expression: str, found: Agreement, nprocs: int, rtol: float, atol: float) -> str:
    """The lines of it, of bounded length; there are ``nprocs`` ranks, compared or not."""
    if len(found.ranks) < nprocs:
        ranks = _lower(found.ranks)
    else:
        ranks = "both ranks" if nprocs == 2 else f"all {nprocs} ranks"
    limits = [f"{name} {value:g}" for name, value in (("rtol", rtol), ("atol", atol)) if value]
    within = f" within {', '.join(limits)}" if limits else ""
    lines = [_heading(clip(" ".join(expression.split()), _WIDTH), found, ranks, within)]
    for one in found.differing[:_ENTRIES]:
        lines += _entry(one)
    if (more := len(found.differing) - _ENTRIES) > 0:
        lines.append(f"  and {more:,} more {'entry differs' if more == 1 else 'entries differ'}.")
    return "\n".join([*lines, *_notes(found)])


def _heading(expression: str, found: Agreement, ranks: str, within: str) -> str:
    if found.within and found.count > 1:
        within += f" ({found.within:,} of them not exactly)"
    if not found.count:
        return f"{expression}: nothing in it is compared by its contents."
    if found.count == 1:
        return f"{expression} {'differs between the ranks' if found.differing else f'is equal in {ranks}'}{within}."
    bytes_ = f", {size(found.nbytes)}," if found.nbytes >= 1e6 else ""
    if not found.differing:
        return f"{expression}: {found.count:,} entries{bytes_} are equal in {ranks}{within}."
    count = len({one.path for one in found.differing})
    verb = "differs" if count == 1 else "differ"
    return f"{expression}: {count:,} of {found.count:,} entries{bytes_} {verb} between the ranks{within}."


def _count(count: int) -> str:
    return f"{count:,} entr{'y' if count == 1 else 'ies'}"


def _entry(one: Differing) -> list[str]:
    first, *others = one.groups
    path = clip(one.path, _WIDTH)
    if not one.of_one_kind:
        return [f"  {path or 'It'}: {_each(one.groups, lambda entry: entry.kind)}"]
    entry = first.entry
    assert entry is not None
    what = f"{entry.kind}, part {one.part}" if one.part else entry.kind
    what = f"{path} ({what})" if path else what
    if len({group.entry.text for group in one.groups if group.entry and group.entry.text}) == len(one.groups):
        return [f"  {what}: {_each(one.groups, lambda entry: entry.text)}{_by(one, entry)}"]
    lines = [f"  {what}: {_agreeing(one.groups)}"]
    for group in others[: _GROUPS - 1]:
        closer = one.closer.get(group.ranks[0])
        if closer is not None and group.entry is not None:
            lines.append(f"    {_lower(group.ranks)}: {_how(closer, entry)}{_figures(entry, group.entry)}")
    return lines


def _agreeing(groups: Sequence[Group]) -> str:
    """'ranks 0 and 2-3 agree, rank 1 differs'."""
    if len(groups[0].ranks) == 1:
        differ = "differ" if len(groups) == 2 else "all differ"
        return f"{_lower([rank for group in groups for rank in group.ranks])} {differ}"
    parts = [f"{_lower(groups[0].ranks)} agree"]
    for group in groups[1:_GROUPS]:
        parts.append(f"{_lower(group.ranks)} {'differs' if len(group.ranks) == 1 else 'agree on another value'}")
    if (more := len(groups) - _GROUPS) > 0:
        parts.append(f"{more} more values in other ranks")
    return ", ".join(parts)


def _each(groups: Sequence[Group], what: Callable[[Entry], str]) -> str:
    """'float32[8] in ranks 0-2, bfloat16[8] in rank 3'."""
    parts = [
        f"{clip(cell(what(group.entry)), _WIDTH)} in {_lower(group.ranks)}"
        if group.entry
        else f"missing in {_lower(group.ranks)}"
        for group in groups[:_GROUPS]
    ]
    if (more := len(groups) - _GROUPS) > 0:
        parts.append(f"{more} more in other ranks")
    return ", ".join(parts)


def _by(one: Differing, entry: Entry) -> str:
    known = [closer for closer in one.closer.values() if closer.largest is not None]
    if not known or not entry.dtype.startswith("float"):
        return ""
    return _largest(max(known, key=lambda closer: closer.largest or 0.0))


def _how(closer: Closer, entry: Entry) -> str:
    values = closer.values or ("", "")
    here = f"first at {list(closer.index)}: {_number(values[1], values[0])}, not {_number(values[0], values[1])}"
    return f"{closer.count:,} of {math.prod(entry.shape):,} elements differ{_largest(closer)}, {here}"


def _largest(closer: Closer) -> str:
    if closer.largest is None:
        return ""
    return f", largest difference {closer.largest:.3g} (relative {closer.relative:.3g})"


def _figures(first: Entry, other: Entry) -> str:
    """How many NaN and infinities there are, where that differs."""
    if first.statistics is None or other.statistics is None or first.statistics[2:] == other.statistics[2:]:
        return ""
    parts = []
    for name, mine, theirs in zip(("NaN", "inf"), other.statistics[2:], first.statistics[2:], strict=True):
        if mine or theirs:
            parts.append(f"{mine:,} {name} (not {theirs:,})")
    return f"; {', '.join(parts)}"


def _number(value: object, other: object) -> str:
    """A number in as few digits as tell it from the other."""
    if not isinstance(value, (float, complex)):
        return str(value)
    texts = (f"{value:.{digits}g}" for digits in (6, 9, 17) if f"{value:.{digits}g}" != f"{other:.{digits}g}")
    return next(texts, str(value))


def _notes(found: Agreement) -> list[str]:
    lines = []
    for parts, count in sorted(found.sharded.items()):
        verb = "is" if count == 1 else "are"
        lines.append(
            f"{_count(count)} {verb} sharded in {parts} parts: each part is compared among the ranks that hold it."
        )
    if found.alone:
        own = f"{_count(found.alone)} {'is' if found.alone == 1 else 'are'} sharded so that each rank has another part"
        lines.append(f"{own}: shape, dtype and placement agree, and there is nothing else to compare.")
    for why, paths in list(found.skipped.items())[:_ENTRIES]:
        named = ", ".join(clip(path, _WIDTH) or "the value" for path in paths[:_NAMES])
        more = f" and {len(paths) - _NAMES:,} more" if len(paths) > _NAMES else ""
        lines.append(f"Not compared: {named}{more} ({why}).")
    if found.cut:
        lines.append(f"Only the first {found.cut:,} entries of each rank are compared.")
    return lines


def _lower(ranks: Sequence[int]) -> str:
    """'rank 1' within a sentence."""
    text = name_ranks(ranks)
    return text[0].lower() + text[1:]
