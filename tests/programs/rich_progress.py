"""rich's bar over the steps, and a table at the end."""

import os

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

rank = int(os.environ["RANK"])
torch.manual_seed(23 + rank)
weights = torch.zeros(4, requires_grad=True)
losses = []
for _step in track(range(4), description=f"bar {rank}"):
    loss = (torch.randn(8, 4) @ weights - 1).square().mean()
    (gradient,) = torch.autograd.grad(loss, weights)
    weights.data -= 0.1 * gradient
    losses.append(loss.item())
print(f"rank {rank} losses {losses}")

# %%
table = Table("step", "loss")
for step, loss in enumerate(losses):
    table.add_row(str(step), f"{loss:.3f}")
Console().print(table)
print(f"rank {rank} best {min(losses)!r}")
