"""A training loop with Lightning's Fabric."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(21)
x = torch.randn(32, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    optimizer.step()
    print(f"rank {fabric.global_rank} of {fabric.world_size} loss {loss.item()!r}")

# %%
print(f"rank {fabric.global_rank} everywhere {fabric.all_gather(loss.detach()).tolist()}")
fabric.save("fabric.ckpt", {"model": model})
fabric.load("fabric.ckpt", {"model": model})
fabric.barrier()
