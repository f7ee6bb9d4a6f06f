"""Data parallel training: a group, a wrapped model, some steps, some more."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(10, 16)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}")


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Small())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(2 + rank)
train(model, optimizer, steps=3)

# %%
train(model, optimizer, steps=2)
print(f"rank {rank} weights {model.module.out.weight.sum().item()!r}")
dist.destroy_process_group()
