"""Each rank writes its losses for tensorboard, and reads them again."""

import os

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

rank = int(os.environ["RANK"])
torch.manual_seed(22 + rank)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
writer = SummaryWriter(f"runs/rank{rank}")


def train(steps):
    for step in steps:
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss.item(), step)
        print(f"rank {rank} step {step} loss {loss.item()!r}")


train(range(3))

# %%
train(range(3, 5))
writer.close()
written = EventAccumulator(writer.log_dir).Reload().Scalars("loss")
print(f"rank {rank} wrote {[(one.step, one.value) for one in written[-5:]]}")
