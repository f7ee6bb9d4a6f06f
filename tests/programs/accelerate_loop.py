"""A training loop with accelerate's Accelerator."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
set_seed(17)
x = torch.randn(64, 6)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.print(f"rank {rank} of {accelerator.num_processes}, {accelerator.distributed_type}")
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    print(f"rank {rank} loss {loss.item()!r}")

# %%
losses = []
with torch.no_grad():
    for x, y in loader:
        losses.append(accelerator.gather_for_metrics(nn.functional.mse_loss(model(x), y, reduction="none")))
print(f"rank {rank} evaluates {torch.cat(losses).numel()} losses, {torch.cat(losses).mean().item()!r}")
accelerator.wait_for_everyone()
