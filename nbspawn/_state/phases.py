"""How long the parts of a run took, each until the last rank had done with it: what ``--timings`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Moments(NamedTuple):
    """The moments of one rank, CLOCK_MONOTONIC seconds, 0 if it has not come to that: it was ``up``; it was ``ready``
    for the cell, the process group of ``--backend`` made; the cell had ``run``; its last message was ``received`` in
    the kernel; its process was ``gone``."""

    up: float = 0.0
    ready: float = 0.0
    run: float = 0.0
    received: float = 0.0
    gone: float = 0.0


NAMES = ("payload", "start", "rendezvous", "run", "results", "teardown")


def phases(started: float, packed: float, ranks: Sequence[Moments]) -> dict[str, float]:
    """Seconds by name: from the moment at which the last rank had done with one phase to that of the next.

    ``started`` is when the kernel began with the run, ``packed`` when all was there that the ranks need to start. A
    phase that did not happen is left out: ranks that stay neither start nor end. A run begins with loading the payload,
    the rest of which is written while ranks start.
    """
    found: dict[str, float] = {}
    before = started
    for name, moment in zip(NAMES, (packed, *map(max, zip(*ranks, strict=True))), strict=True):
        if moment:
            found[name] = max(0.0, moment - before)
            before = max(before, moment)
    return found
