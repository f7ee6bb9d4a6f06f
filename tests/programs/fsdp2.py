"""Fully sharded data parallel training of a small transformer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(10)
model = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(11 + rank)
for step in range(2):
    loss = model(torch.randn(4, 6, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step} loss {loss.item()!r}")

# %%
model.eval()
with torch.no_grad():
    print(f"rank {rank} afterwards {model(torch.ones(1, 6, 16)).sum().item()!r}")
shard = next(model.parameters())
print(f"rank {rank} holds {tuple(shard.to_local().shape)} of {tuple(shard.shape)}")
dist.destroy_process_group()
