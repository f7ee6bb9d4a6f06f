"""Hundreds of nodes: simulated agents say what two real ones have said (support/simulated.py)."""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from leftovers import gone
from nodes import Processes
from simulated import MARK, Recording, Simulation

import nbspawn
from nbspawn._engine.cluster import agents
from nbspawn._engine.cluster.nodes import Nodes
from nbspawn._engine.jobs import CellJob
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.messages import RunCell
from nbspawn._render import html, text
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import StreamView, snapshot
from nbspawn._state.run import Run

pytestmark = pytest.mark.extended

NODES, EACH = 128, 2

TRAINS = f"""import time, torch, torch.distributed as dist
for step in range(3):
    if rank == 0: time.sleep(0.7)
    dist.all_reduce(torch.ones(1))
    print("step", step)
print("this is {MARK}")
local_rank"""


class Watching(StreamView):
    """Keeps the states in which all ranks but the first wait for it, and what is printed."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.waiting: list[tuple[Run, float]] = []
        super().__init__(self.written.append)

    def show(self, run: Run, events: Sequence[Any]) -> None:
        super().show(run, events)
        states = [rank.state for rank in run.ranks]
        if states == ["running", *["waiting"] * (len(states) - 1)]:
            self.waiting.append((run, time.monotonic()))


def run(starter: Any, nprocs: int, view: StreamView) -> list[Any]:
    options = LaunchOptions(nprocs=nprocs, on=starter, backend="gloo")
    job = CellJob(RunCell(TRAINS, "<trains>"), {})
    return list(Pool(options).run(job, CommandOptions(view=view)))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, workplace: str) -> Iterator[Path]:
    """Of two agents with two ranks each."""
    made, received = Recording(), Nodes._received

    def noted(self: Nodes, link: Any, message: object) -> None:
        made.note(link.node, message)
        received(self, link, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nodes, "_received", noted)
        assert run(Processes(2), 2 * EACH, Watching()) == [0, 1, 0, 1]
    agents.release()
    path = tmp_path_factory.mktemp("recording") / "recording"
    path.write_bytes(pickle.dumps(made))
    yield path


@pytest.mark.usefixtures("nothing_left")
def test_a_run_on_128_nodes(recording: Path) -> None:
    starter, view = Simulation(NODES, recording), Watching()
    try:
        assert run(starter, NODES * EACH, view) == [0, 1] * NODES
        pid = starter.pid
    finally:
        agents.release()
    assert gone([pid])
    printed = "".join(view.written)
    assert all(f"this is {MARK[:-4]}{node:04}\n" in printed for node in range(NODES))
    assert printed.count("step 2") < NODES, "what all print is shown together"

    assert view.waiting
    seen = snapshot(*view.waiting[-1])
    first, others = text.rows(seen)[-1], text.rows(seen)[0]
    assert (first.label, first.node, first.state) == ("0", "host0", "running")
    assert (others.label, others.node, others.state) == ("1-255", "128 nodes", "waiting")
    table = text.table(seen).splitlines()
    assert table[0].startswith("256 ranks · 128 nodes: host0, host1, host2, host3, …")
    assert table[1].split()[:3] == ["rank", "node", "state"] and len(table) == 4
    assert "128 nodes" in html.table(seen)


@pytest.mark.usefixtures("nothing_left")
def test_the_simulation_that_is_killed_is_many_lost_nodes(recording: Path) -> None:
    class Killing(Watching):
        def show(self, run: Run, events: Sequence[Any]) -> None:
            super().show(run, events)
            if self.waiting and starter.pid:
                os.kill(starter.pid, 9)
                starter.pid = 0

    starter = Simulation(NODES, recording)
    try:
        with pytest.raises(nbspawn.RankExitedError) as caught:
            run(starter, NODES * EACH, Killing())
    finally:
        agents.release()
    assert re.match(r"rank (\d+) of 256 \((host\d+)\): its node \2 was lost", str(caught.value))
    assert len(caught.value.others) == NODES * EACH - 1
    assert len(str(caught.value).splitlines()) < 20
