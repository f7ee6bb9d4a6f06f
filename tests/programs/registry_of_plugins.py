# %% in the notebook
"""Plugins that register themselves, Enums with attributes, cached functions: what configurations are made of."""

import enum
import functools
import os
import pickle
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

Steps = typing.NewType("Steps", int)


@functools.lru_cache(maxsize=8)
def clipped(size):
    return min(0.1, 0.1 / size)


class Schedule(enum.Enum):
    CONSTANT = ("constant", 1.0)
    HALVED = ("halved", 0.5)

    def __init__(self, label, factor):
        self.label, self.factor = label, factor


class Optimizer:
    known = {}

    def __init_subclass__(cls, /, name, **kwargs):
        super().__init_subclass__(**kwargs)
        Optimizer.known[name] = cls

    def step(self, value, gradient):
        return value - self.rate(gradient) * gradient


class Plain(Optimizer, name="plain"):
    def rate(self, gradient):
        return 0.1


class Clipped(Optimizer, name="clipped"):
    def rate(self, gradient):
        return clipped(abs(gradient))


@dataclass
class Run:
    optimizer: str
    schedule: Schedule = Schedule.HALVED
    steps: Steps = Steps(3)
    seen: list = field(default_factory=list)


runs = [Run("plain"), Run("clipped", Schedule.CONSTANT)]

# %%
rank = int(os.environ["RANK"])


def descend(run):
    value, run.seen = 4.0 + rank, []
    for _ in range(run.steps):
        value = Optimizer.known[run.optimizer]().step(value, 2 * value) * run.schedule.factor
        run.seen.append(round(value, 6))
    return value


with ThreadPoolExecutor(2) as pool:
    ended = list(pool.map(descend, runs))
print(f"rank {rank} ended {[round(value, 6) for value in ended]} known {sorted(Optimizer.known)}")

# %%
copies = pickle.loads(pickle.dumps(runs))
same = [copy.schedule is run.schedule and type(copy) is Run for copy, run in zip(copies, runs, strict=True)]
print(f"rank {rank} copies {same} {copies[0].schedule.label} {[len(copy.seen) for copy in copies]}")
