"""A pool's promises that need no process: ranks that may still work are given nothing else, and why they ended."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

import nbspawn
from nbspawn._accelerators.accelerator import Load
from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.gauges import Reading
from nbspawn._session.pool import Pool
from nbspawn._session.started import StartedRanks
from nbspawn.errors import Failure


def nothing(rank: int) -> None:
    """For ranks to run."""


def pool_of(engine: FakeEngine) -> Pool:
    pool = Pool(LaunchOptions(nprocs=engine.nprocs, keep=True))
    pool._ranks = StartedRanks(engine)
    return pool


def test_ranks_that_may_still_work_get_no_other_command() -> None:
    """Whatever has failed in what watched them: their next value would be the old command's."""
    engine = FakeEngine(2)
    pool = pool_of(engine)
    pool._acquire("the old command")
    pool._release()
    assert any(what == "dispose" for _, what in engine.did), engine.did
    assert pool.ended == "the old command was abandoned while they worked on it"
    with pytest.raises(nbspawn.StartError, match="was abandoned"):
        pool.run(FunctionJob(nothing))


def test_the_reason_of_an_end_is_the_first_failure_in_time() -> None:
    """Not the first that became known, which may be a peer's echo of it."""
    engine = FakeEngine(2)
    engine.failures = [
        Failure(1, 5.0, "RuntimeError", "Connection closed by peer", lost_peer=True),
        Failure(0, 4.0, code=7),
    ]
    engine._ended = {0: None, 1: None}  # type: ignore[dict-item]
    pool = pool_of(engine)
    pool._end(0.0)
    assert pool.ended == "rank 0: process 0 terminated with exit code 7"


def test_a_rank_that_has_not_reported_yet_uses_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(2)
    monkeypatch.setattr(engine, "usage", lambda: [Reading(0.0, 0.0, 0, 0, 0, 0), Reading(1.0, 0.1, 5, 6, 7, 8)])
    assert pool_of(engine).memory() == [(0, -1, Load()), (5, 7, Load())]
