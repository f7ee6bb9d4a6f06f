"""Data parallel training that one rank saves and all ranks take up again; with functions, as scripts have them."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = "checkpoint.pt"


def setup():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loader():
    made = torch.Generator().manual_seed(4)
    x = torch.randn(64, 8, generator=made)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=5), num_workers=1)


def epoch(model, optimizer, number):
    batches = loader()
    batches.sampler.set_epoch(number)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} epoch {number} loss {loss.item()!r}")


def save(model, optimizer):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, PATH)
    dist.barrier()  # nobody reads before it is written


def resume(model, optimizer):
    saved = torch.load(PATH, map_location="cpu", weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    dist.barrier()  # nobody removes it before it is read
    if dist.get_rank() == 0:
        os.remove(PATH)


if __name__ == "__main__":
    model, optimizer = setup()
    epoch(model, optimizer, 0)
    save(model, optimizer)
    epoch(model, optimizer, 1)

# %%
if __name__ == "__main__":
    resume(model, optimizer)
    epoch(model, optimizer, 1)
    dist.destroy_process_group()
