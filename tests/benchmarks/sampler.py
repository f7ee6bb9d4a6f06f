"""What the sampler costs a training loop: two ranks train with it and without it, in turn, in one run.

    python tests/benchmarks/sampler.py [--rounds N] [--seconds S]

Two loops: one that computes (a small MLP, forward, backward, step), one of many small collectives (all_reduce of 10
numbers). A rank counts its steps for ``--seconds``; its rate with the sampler is compared with the rate of the turn
before, without. The second table is what the sampler's own thread used of a processor, which is free of the noise of
a shared machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import nbspawn
from nbspawn.rank import main, sampler

RANKS = 2


def compute(rank: int, seconds: float) -> tuple[float, float]:
    """Steps a second, and the sampler's share of a processor."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return _rate(step, seconds)


def communicate(rank: int, seconds: float) -> tuple[float, float]:
    """The same, of a loop of collectives; both ranks make as many."""
    x = torch.ones(10)
    _rate(lambda: dist.all_reduce(x), 0.0)
    began, used, steps = time.perf_counter(), _sampler_seconds(), 0
    go_on = torch.ones(1)
    while go_on.item():
        for _ in range(100):
            dist.all_reduce(x)
            x.mul_(0.5)
        steps += 100
        go_on[0] = float(time.perf_counter() - began < seconds)
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    took = time.perf_counter() - began
    return steps / took, (_sampler_seconds() - used) / took


def _rate(step: Any, seconds: float) -> tuple[float, float]:
    for _ in range(20):
        step()
    began, used, steps = time.perf_counter(), _sampler_seconds(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
    took = max(time.perf_counter() - began, 1e-9)
    return steps / took, (_sampler_seconds() - used) / took


def _sampler_seconds() -> float:
    for thread in threading.enumerate():
        if thread.name == "nbspawn-sampler" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def run() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    features = main.FEATURES
    without = tuple(feature for feature in features if feature is not sampler.sampling)
    print(f"{RANKS} ranks, {len(os.sched_getaffinity(0))} cores, {given.rounds} rounds of {given.seconds:g} s")
    for loop, backend in ((compute, None), (communicate, "gloo")):
        ratios, shares, rates = [], [], []
        for _ in range(given.rounds):
            turn = []
            for chosen in (without, features):
                main.FEATURES = chosen  # under fork the ranks have it by inheritance
                turn.append(
                    list(nbspawn.spawn(loop, (given.seconds,), RANKS, start_method="fork", backend=backend, threads=1))
                )
            bare, sampled = (statistics.mean(rate for rate, _ in results) for results in turn)
            ratios.append(sampled / bare)
            rates.append(bare)
            shares += [share for _, share in turn[1]]
        ordered = sorted(ratios)
        print(
            f"{loop.__name__:12} {statistics.median(rates):6.0f} steps/s without, with {statistics.median(ratios):.4f}x"
            f" (p10-p90 {ordered[len(ordered) // 10]:.3f}-{ordered[-1 - len(ordered) // 10]:.3f});"
            f" the sampler's thread: {statistics.median(shares):.3%} of a processor"
        )


if __name__ == "__main__":
    run()
