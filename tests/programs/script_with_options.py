"""A script with options, as torch's examples have them: argparse, ``record``, a main function."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


def options():
    parser = argparse.ArgumentParser(description="trains a line")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


@record
def main(args):
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(26 + dist.get_rank())
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        x = torch.randn(8, 1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), 2 * x + 1)
        loss.backward()
        optimizer.step()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} step {step} loss {loss.item()!r}")


if __name__ == "__main__":
    main(options())
    dist.destroy_process_group()  # not in main(): torch 2.13 may hang when a model outlives its group
