"""A model in two stages, one in each rank, that hand micro-batches on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(13)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
part = model[:2] if rank == 0 else model[2:]
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
x, y = torch.randn(16, 8), torch.randn(16, 4)


def step(number):
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        losses = []
        schedule.step(target=y, losses=losses)
        print(f"rank {rank} step {number} losses {[loss.item() for loss in losses]}")
    optimizer.step()
    print(f"rank {rank} step {number} gradient {next(part.parameters()).grad.norm().item()!r}")


step(0)

# %%
step(1)
dist.destroy_process_group()
