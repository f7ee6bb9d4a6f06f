"""The wording that the table of a run and the errors share. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from nbspawn._protocol.failure import exit_code


def name_ranks(ranks: Iterable[int]) -> str:
    """'Rank 3', 'Ranks 0 and 3', 'Ranks 0-6 and 9', '32 ranks (0, 2, 4, 6, …)'."""
    ranks = list(ranks)
    parts = ranges(ranks).split(",")
    if len(parts) > 6:
        return f"{len(ranks)} ranks ({', '.join(parts[:4])}, …)"
    return f"Rank {listed(parts)}" if len(ranks) == 1 else f"Ranks {listed(parts)}"


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]


def ranges(ranks: Iterable[int]) -> str:
    """Rank numbers, short: ``ranges([3, 0, 2])`` is ``"0,2-3"``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def few_ranges(ranks: Iterable[int], width: int) -> str:
    """The ranks as ``ranges`` writes them, in at most ``width`` columns: if necessary the first ones and how many they
    are: '8,10,… (24)'."""
    ranks = sorted(ranks)
    whole = ranges(ranks)
    if len(whole) <= width:
        return whole
    many = f",… ({len(ranks)})"
    fits = whole.rfind(",", 0, width - len(many) + 1)
    return (whole[:fits] if fits > 0 else str(ranks[0])) + many


def on_host(hosts: Iterable[str]) -> str:
    """' (host2)', if these are the names of one of several machines; '' for several, and where there is one."""
    names = set(hosts)
    name = names.pop() if len(names) == 1 else ""
    return f" ({name})" if name else ""


def stopped(code: int | None, how: str, why: str) -> str:
    """How a rank ended that was asked to by the signal ``how``: 'SIGTERM by nbspawn (stop)'."""
    if code in (-signal.SIGTERM, -signal.SIGKILL):
        return f"{exit_code(code)} by nbspawn ({why})"
    return f"{'ended' if code is None else exit_code(code)} after {how} by nbspawn ({why})"
