"""A feed-forward block whose layers are split over the ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
rank = mesh.get_rank()
torch.manual_seed(12)
model = parallelize_module(Block(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(16, 8)
for step in range(2):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item()!r}")

# %%
print(f"rank {rank} placed {model.up.weight.placements} {tuple(model.up.weight.to_local().shape)}")
print(f"rank {rank} whole {model.up.weight.full_tensor().sum().item()!r}")
dist.destroy_process_group()
