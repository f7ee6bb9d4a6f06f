"""Training on two fake GPUs gives the losses of the same on the CPU, in ranks and in a notebook's cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kernels import Kernel, ok
from methods import PATIENCE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nbspawn

Parallel = Callable[[nn.Module, torch.device], nn.Module]


def data_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(rank: int, parallel: Parallel, kind: str) -> list[float]:
    device = torch.device(kind, rank if kind == "cuda" else None)
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model = parallel(nn.Sequential(*layers).to(device), device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    found = []
    for _ in range(4):
        loss = model(torch.randn(4, 6, 16).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def on_both(rank: int) -> list[list[list[float]]]:
    """Over gloo and over NCCL."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    found = [[losses(rank, parallel, kind) for kind in ("cpu", "cuda")] for parallel in (data_parallel, sharded)]
    dist.destroy_process_group()
    return found


def test_training(nothing_left: None) -> None:
    results = nbspawn.spawn(on_both, nprocs=2)
    for found in results:
        for on_cpu, on_gpu in found:
            assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
    assert results[0] != results[1]


# ---------------------------------------------------------------- in a notebook


def test_a_cell_for_each_gpu(kernel: Kernel) -> None:
    cell = """%%spawn gpu -b nccl
import torch, torch.distributed as dist
t = torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(t)
str(device), dist.get_backend(), t.tolist()"""
    reply = ok(kernel.execute(cell))
    assert reply.result == "[0] ('cuda:0', 'nccl', [3.0, 3.0, 3.0])\n[1] ('cuda:1', 'nccl', [3.0, 3.0, 3.0])"
    assert kernel.value("__import__('sys').modules['torch'].cuda.is_initialized()") is False


def test_what_names_a_gpu_in_the_notebook_names_the_ranks_own(kernel: Kernel) -> None:
    """Also a generator; and the CPU, in ranks that are to use no GPU."""
    ok(kernel.execute("import torch\nplace = torch.device('cuda:0')\nx = torch.ones(2, device=place)"))
    ok(kernel.execute("noise = torch.Generator(place).manual_seed(3)"))
    cell = "\nstr(place), str(x.device), str(torch.rand(1, generator=noise, device=place).device), x.tolist()"
    reply = ok(kernel.execute(f"%%spawn 2{cell}"))
    assert reply.result == "".join(f"[{n}] ('cuda:{n}', 'cuda:{n}', 'cuda:{n}', [1.0, 1.0])\n" for n in (0, 1))[:-1]
    ranks = "%%spawn cpu\nstr(place), str(x.device), str(device), torch.cuda.is_initialized()"
    assert ok(kernel.execute(ranks)).result == "[0-1] ('cpu', 'cpu', 'cpu', False)"
    kernel.restart()
    ok(kernel.execute("%load_ext nbspawn"))


def test_stop_and_kept_ranks(kernel: Kernel) -> None:
    """Between collectives: a rank that waits in one for a rank that Stop has reached cannot be interrupted."""
    start = "%%spawn gpu -b nccl --keep\nimport torch, torch.distributed as dist\nt = torch.ones(1, device=device)"
    ok(kernel.execute(start))
    try:
        cell = kernel.submit("%%ranks\ndist.all_reduce(t)\nprint(t.item())\nwhile True:\n    t.mul_(1).item()")
        both = "both ranks are in the loop"
        cell.read_until(lambda: all(cell.reply.of(rank) == ["2.0"] for rank in range(2)), both, PATIENCE)
        kernel.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        assert ok(kernel.execute("%%ranks\nt.fill_(1)\ndist.all_reduce(t)\nt.item()")).result == "[0-1] 2.0"
    finally:
        kernel.execute("%ranks stop")
        kernel.assert_no_rank()


ACCELERATE = """%%spawn gpu -b nccl
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer = torch.nn.Linear(4, 1), None
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
loss = model(torch.full((2, 4), rank + 1.0, device=accelerator.device)).mean()
accelerator.backward(loss)
optimizer.step()
str(accelerator.device), [round(w, 3) for w in accelerator.unwrap_model(model).weight[0].tolist()]"""


def test_accelerate(kernel: Kernel) -> None:
    """The gradients 1 and 2 are averaged."""
    reply = ok(kernel.execute(ACCELERATE))
    assert reply.result == "[0] ('cuda:0', [0.85, 0.85, 0.85, 0.85])\n[1] ('cuda:1', [0.85, 0.85, 0.85, 0.85])"


TRAINER = """%%spawn 2
import os, torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        out = self.layers(x)
        return {{"loss": (out - labels).square().mean(), "logits": out}}

torch.manual_seed(0)
model, x = Model(), torch.randn(32, 4)
data = [{{"x": one, "labels": one.sum().view(1)}} for one in x]
options = dict(per_device_train_batch_size=4, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)
arguments = TrainingArguments(
    "{folder}", max_steps=4, learning_rate=0.05, use_cpu={on_cpu}, ddp_backend="{backend}", **options)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
arguments.device.type, [step["loss"] for step in trainer.state.log_history if "loss" in step]"""


def test_transformers_trainer(kernel: Kernel, tmp_path: Path) -> None:
    losses = {}
    for kind, on_cpu, backend in (("cpu", True, "gloo"), ("cuda", False, "nccl")):
        cell = TRAINER.format(folder=tmp_path, on_cpu=on_cpu, backend=backend).replace("%%spawn 2", "%%spawn 2 -o out")
        ok(kernel.execute(cell, timeout=120))
        ranks = kernel.value("list(out)")
        losses[kind] = ranks[0][1]
        assert [rank[0] for rank in ranks] == [kind] * 2
    assert len(losses["cpu"]) == 4 and losses["cuda"] == pytest.approx(losses["cpu"], abs=2e-4)
