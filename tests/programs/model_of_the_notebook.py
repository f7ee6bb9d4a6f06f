# %% in the notebook
"""A model and data that the notebook has made: ranks train a copy, send it to each other, and save it as a whole."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.tensor([i / 16]), torch.tensor([(i / 16) ** 2])


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


torch.manual_seed(27)
data, model = Squares(), Curve()

# %%
dist.init_process_group("gloo")
rank = dist.get_rank()
trained = DistributedDataParallel(copy.deepcopy(model))
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
torch.manual_seed(28 + rank)
for x, y in DataLoader(data, batch_size=4, shuffle=True, num_workers=1):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(trained(x), y)
    loss.backward()
    optimizer.step()
    print(f"rank {rank} loss {loss.item()!r}")
torch.save(trained.module, f"curve-{rank}.pt")
sent = [trained.module if rank == 0 else None]
dist.broadcast_object_list(sent)

# %%
loaded = torch.load(f"curve-{rank}.pt", weights_only=False)
print(f"rank {rank} loads {loaded(torch.ones(1)).item()!r}, gets {sent[0](torch.ones(1)).item()!r}")
dist.destroy_process_group()
