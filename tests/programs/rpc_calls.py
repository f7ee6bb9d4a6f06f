"""Remote calls: a function, an object that lives in another rank, gradients that go through both."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer


def scaled(x, by):
    return x * by


class Server:
    """Holds a layer for others."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]


def train(server, steps):
    torch.manual_seed(7)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameters(), lr=0.1)
    for step in range(steps):
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(server.rpc_sync().forward(x), y)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"rank {rank} step {step} loss {loss.item()!r}")


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    print(f"rank {rank} adds {rpc.rpc_sync('worker1', torch.add, args=(torch.ones(2), 3)).tolist()}")
    asked = [rpc.rpc_async("worker1", scaled, args=(torch.ones(2), by)) for by in range(3)]
    print(f"rank {rank} scales {[one.wait().tolist() for one in asked]}")
    server = rpc.remote("worker1", Server, args=(6,))
    train(server, steps=2)

# %%
if rank == 0:
    train(server, steps=2)
    del server
rpc.shutdown()
print(f"rank {rank} has shut down")
