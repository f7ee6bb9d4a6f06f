"""Comparing a state dict over ranks: ``Session.diff``, and what a user writes without it, in the same ranks.

    python tests/benchmarks/diff.py [--ranks 4] [--mb 1000] [--rounds 3] [--json PATH]

The state dict has 100 tensors, equal in all ranks. The other ways are collectives of gloo, a tensor at a time:
all_reduce of the least and of the greatest value of each element, which have to be the same; and all_gather with
torch.equal. Both say whether the ranks agree, and nothing else. Below: how fast one core reads a tensor with each of
hashlib's digests, as _rank/compare/digests.py does, and without any.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable

import samples
import torch

import nbspawn
from nbspawn._rank.compare import digests

MAKE = """
import torch, torch.distributed as dist
state = {{f"layers.{{i}}.weight": torch.arange({count}.0).mul_(i + 1).sin_() for i in range(100)}}
last = rank == world_size - 1
changed = {{name: tensor.clone() if last and name == "layers.50.weight" else tensor for name, tensor in state.items()}}
if last: changed["layers.50.weight"][1234] += 1
scaled = {{name: tensor * 1.001 if last else tensor for name, tensor in state.items()}}

def reduced():
    equal = True
    for tensor in state.values():
        least, greatest = tensor.clone(), tensor.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        equal = equal and torch.equal(least, greatest)
    return equal

def gathered():
    equal = True
    for tensor in state.values():
        all_of_it = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(all_of_it, tensor)
        equal = equal and all(torch.equal(one, tensor) for one in all_of_it)
    return equal
"""


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ways(task: samples.Task, ranks: int, megabytes: int, rounds: int) -> None:
    """Seconds of each, in turns."""
    task.quantity("seconds", "state dict in 100 tensors, compared over all ranks", "s", "diff, all equal")
    with nbspawn.Session(ranks, backend="gloo") as session:
        session.execute(MAKE.format(count=megabytes * 10_000 // 4))

        def agree(code: str) -> None:
            assert list(session.execute(code)) == [True] * ranks

        def differs(name: str, expected: bool) -> None:
            assert bool(session.diff(name)) == expected

        for _ in range(rounds):
            for name, work in (
                ("diff, all equal", lambda: differs("state", False)),
                ("all_reduce of least and greatest", lambda: agree("reduced()")),
                ("all_gather and torch.equal", lambda: agree("gathered()")),
                ("diff, one element differs", lambda: differs("changed", True)),
                ("diff, all elements differ", lambda: differs("scaled", True)),
            ):
                task.add("seconds", name, timed(work))


def hashes(task: samples.Task) -> None:
    """Bytes a second of one core."""
    task.quantity("rate", "one core, with that digest", "B/s")
    torch.set_num_threads(1)
    tensor = torch.randn(64_000_000)
    made = digests._digest
    for name in ("none", "md5", "sha1", "sha256", "blake2b"):

        def digest(data: bytes, name: str = name) -> bytes:
            return b"" if name == "none" else hashlib.new(name, data).digest()

        digests._digest = digest
        for _ in range(3):
            task.add("rate", name, tensor.nbytes / timed(digests.Numbers(tensor).digests))
    digests._digest = made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    samples.add_option(parser)
    given = parser.parse_args()
    record = samples.Record("diff", given.json)
    with record.measuring("diff", ranks=given.ranks, mb=given.mb) as found:
        ways(found, given.ranks, given.mb, given.rounds)
    with record.measuring("digests") as found:
        hashes(found)
