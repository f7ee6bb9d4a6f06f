"""Where the time of a run goes, as ``--timings`` tells it."""

from __future__ import annotations

from nbspawn._state.phases import NAMES, Moments, phases


def test_each_phase_lasts_until_the_last_rank_has_done_with_it() -> None:
    ranks = [Moments(1.5, 1.6, 2.0, 2.1, 2.2), Moments(1.4, 1.9, 1.95, 2.3, 2.31)]
    found = phases(1.0, 1.25, ranks)
    assert tuple(found) == NAMES
    assert [round(seconds, 2) for seconds in found.values()] == [0.25, 0.25, 0.4, 0.1, 0.3, 0.01]
    assert round(sum(found.values()), 6) == 1.31, "together they are the whole"


def test_what_did_not_happen_is_left_out() -> None:
    kept = [Moments(), Moments(0.0, 1.1, 1.2, 1.3, 0.0)]
    assert list(phases(1.0, 1.05, kept)) == ["payload", "rendezvous", "run", "results"]


def test_phases_that_overlap_are_never_negative() -> None:
    """A rank may be up, and even at its end, before the kernel's start of the last one has returned."""
    assert phases(1.0, 1.5, [Moments(1.4, 1.4, 1.45, 1.6, 1.7)])["start"] == 0.0
