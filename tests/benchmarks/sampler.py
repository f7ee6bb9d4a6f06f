"""What the sampler costs a training loop: two ranks train with it and without it, in turns of half a second.

    python tests/benchmarks/sampler.py [--pairs N] [--often K]

Two loops: a small MLP that each rank trains alone (forward, backward, step), and one whose gradients are averaged by
all_reduce, so that a rank that is held up holds up both. Both ranks make the same number of steps with the sampler and
without, in alternating order, and the ratio of the two times is taken pair by pair. On a shared machine such ratios
scatter by some percent, and the sampler costs some tenths of one: so it looks, and reports, ``--often`` times as often
as in a run that has lasted for a while (10 by default), and what that costs is divided by ``--often``. (Waking up,
which is most of a look, gets cheaper per look: caches stay warm. Hence the last column too: what the sampler's own
thread uses of a processor when it looks as often as usual.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import nbspawn
from nbspawn.rank import main, sampler

RANKS = 2
TURN = 0.5  # seconds

_where: list[Any] = []


@contextmanager
def _remember(info: Any, channel: Any) -> Iterator[None]:
    """In the sampler's place among the features: whoever is to be sampled begins it."""
    _where[:] = info, channel
    yield


def _training(rank: int, together: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(256, 64), torch.randint(10, (256,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if together:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()

    return step


LOOPS = {"alone": False, "together": True}


def rank_main(rank: int, loop: str, pairs: int, often: int) -> tuple[list[float], float]:
    """For each pair of turns the time with the sampler over the time without; and the share of a processor that its
    thread uses when it looks as often as usual."""
    vars(sampler)["_YOUNG"] = 0.0  # as in a run that has lasted for a while
    step = _training(rank, LOOPS[loop])
    steps = torch.tensor([max(1, int(TURN / _time(step, 200) * 200))])
    dist.broadcast(steps, 0)
    count = int(steps.item())
    share = _share(step, count)
    vars(sampler).update(_INTERVAL=sampler._INTERVAL / often, _SPACING=sampler._SPACING / often)
    ratios = []
    for pair in range(pairs):
        took = {}
        for sampled in (False, True) if pair % 2 else (True, False):
            with sampler.sampling(*_where) if sampled else nullcontext():
                dist.barrier()
                took[sampled] = _time(step, count)
        ratios.append(took[True] / took[False])
    return ratios, share


def _time(step: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


def _share(step: Callable[[], None], count: int) -> float:
    """Over eight turns."""
    with sampler.sampling(*_where):
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "nbspawn-sampler")
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        used = time.clock_gettime(clock)
        took = _time(step, 8 * count)
        return (time.clock_gettime(clock) - used) / took


def run() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--often", type=int, default=10)
    given = parser.parse_args()
    features = tuple(_remember if feature is sampler.sampling else feature for feature in main.FEATURES)
    main.FEATURES = features  # under fork the ranks have it by inheritance
    print(f"{RANKS} ranks, {len(os.sched_getaffinity(0))} cores, {given.pairs} pairs of turns of {TURN:g} s each")
    for loop in LOOPS:
        arguments = (loop, given.pairs, given.often)
        told = list(nbspawn.spawn(rank_main, arguments, RANKS, start_method="fork", backend="gloo", threads=1))
        ratios = sorted(ratio for ratios, _ in told for ratio in ratios)
        slower = statistics.median(ratios) - 1
        lower, _, upper = statistics.quantiles(ratios, n=4)
        error = 0.93 * (upper - lower) / len(ratios) ** 0.5  # of a median, by the middle half: a few turns are far off
        print(
            f"{loop:8} {given.often} times as often: {slower:+.2%} (standard error {error:.2%}),"
            f" hence {slower / given.often:+.3%} ({error / given.often:.3%}) as it is;"
            f" its thread: {statistics.mean(share for _, share in told):.2%} of a processor"
        )


if __name__ == "__main__":
    run()
