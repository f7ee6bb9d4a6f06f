"""tqdm's bar for notebooks over the steps."""

import os

import torch
from tqdm.notebook import tqdm

rank = int(os.environ["RANK"])
torch.manual_seed(24 + rank)
weights = torch.zeros(4, requires_grad=True)


def train(steps):
    for _step in (bar := tqdm(range(steps), desc=f"bar {rank}")):
        loss = (torch.randn(8, 4) @ weights - 1).square().mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        weights.data -= 0.1 * gradient
        bar.set_postfix(loss=loss.item())
    print(f"rank {rank} loss {loss.item()!r}")


train(5)

# %%
train(7)
