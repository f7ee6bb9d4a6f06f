"""The same training text gives the same digits under torchrun and in a ``%%spawn`` cell, however its ranks start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from kernels import Kernel

from nbspawn._engine.launch import default_threads

RANKS = 4
STEPS = 6

TRAINING = f'''
"""Data-parallel training on scikit-learn's digits, as a script or as a cell."""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def say(text):
    print(text + "\\n", end="", flush=True)  # in one piece: torchrun's ranks write unbuffered into one pipe


def main():
    dist.init_process_group("gloo")
    me, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data, ranks, me, seed=21)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(22 + me)
    for step, (x, y) in zip(range({STEPS}), DataLoader(data, batch_size=32, sampler=sampler)):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        everywhere = loss.detach().double()
        dist.all_reduce(everywhere)
        say(f"rank {{me}} step {{step}} loss {{loss.item()!r}} of all {{everywhere.item() / ranks!r}}")
    norm = torch.cat([p.detach().double().flatten() for p in model.parameters()]).norm().item()
    threads = os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
    say(f"rank {{me}} of {{ranks}} ends with norm {{norm!r}} threads {{threads}}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the script's ranks print, sorted. torchrun's own default is one thread; on a machine with many cores
    ``%%spawn`` gives more, and so both get that."""
    script = tmp_path_factory.mktemp("torchrun") / "train.py"
    # An interpreter that ends normally may abort: threads of torch that free tensors then want its lock
    # (https://github.com/pytorch/pytorch/pull/179291). Ranks of %%spawn end as this does.
    script.write_text(TRAINING + "    os._exit(0)\n")
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", script],
        env={**os.environ, "OMP_NUM_THREADS": str(default_threads(RANKS)), "GLOO_SOCKET_IFNAME": "lo"},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    printed = sorted(ran.stdout.splitlines())
    assert len(printed) == RANKS * (STEPS + 1), ran.stdout
    return printed


@pytest.mark.parametrize("start_method", ["forkserver"])
def test_losses_are_those_of_torchrun(kernel: Kernel, under_torchrun: list[str], start_method: str) -> None:
    reply = kernel.execute(f"%%spawn {RANKS} -m {start_method}\n{TRAINING}", timeout=120)
    assert reply.status == "ok", str(reply)
    assert sorted(line for rank in range(RANKS) for line in reply.of(rank)) == under_torchrun


def test_ranks_differ_and_learn(under_torchrun: list[str]) -> None:
    """The comparison above is worth something: losses differ by rank and by step, and fall."""
    steps = [line.split() for line in under_torchrun if " step " in line]
    assert len({words[5] for words in steps}) == len(steps)
    mean = {int(words[3]): float(words[-1]) for words in steps}
    assert mean[STEPS - 1] < mean[0]
