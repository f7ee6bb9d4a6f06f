"""Data-parallel training on scikit-learn's digits, with shards of the data, dropout and AdamW."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def say(text):
    print(text + "\n", end="", flush=True)  # in one piece: torchrun's ranks write unbuffered into one pipe


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
    for step, (x, y) in zip(range(6), DataLoader(data, batch_size=32, sampler=sampler), strict=False):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        everywhere = loss.detach().double()
        dist.all_reduce(everywhere)
        say(f"rank {me} step {step} loss {loss.item()!r} of all {everywhere.item() / ranks!r}")
    norm = torch.cat([p.detach().double().flatten() for p in model.parameters()]).norm().item()
    threads = os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
    say(f"rank {me} of {ranks} ends with norm {norm!r} threads {threads}")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # as in script_with_options
