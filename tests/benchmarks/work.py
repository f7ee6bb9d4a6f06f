"""What ranks do in compare.py: a notebook cell there, and a module for the tools that take no functions of cells.

A rank tells a moment (CLOCK_MONOTONIC seconds) or a number by a file of its own in ``folder``: that takes microseconds,
and goes with every tool.
"""

import os
import sys
import time


def stamp(folder, what, value=None):
    value = time.monotonic() if value is None else value
    with open(f"{folder}/new-{os.getpid()}", "w") as file:
        file.write(repr(value))
    os.rename(file.name, f"{folder}/{what}-{os.getpid()}")  # whole, or not there


def ranked(fn, *args):
    """For tools that pass no rank."""
    return fn(int(os.environ["RANK"]), *args)


def wait_for_all(folder, what, ranks):
    """Wait until all have told that."""
    end = time.monotonic() + 120
    while sum(name.startswith(f"{what}-") for name in os.listdir(folder)) < ranks:
        if time.monotonic() > end:
            raise TimeoutError(f"not all ranks came to {what!r}")
        time.sleep(0.005)


def pss():
    """This process's share of memory, in bytes: what n processes share counts an n-th in each."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024


# ------------------------------------------------------------- what is measured


def start(rank, folder):
    stamp(folder, "first")


def make_group(rank, ranks, port):
    """``port`` is 0 where the tool makes the group, or tells the environment where ranks meet."""
    import torch.distributed as dist

    if not dist.is_initialized():
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": ranks} if port else {}
        dist.init_process_group("gloo", **where)


def meet(rank, folder, ranks, port):
    import torch
    import torch.distributed as dist

    make_group(rank, ranks, port)
    dist.all_reduce(torch.ones(1))
    stamp(folder, "ready")
    dist.barrier()
    dist.destroy_process_group()


def live(rank, folder, ranks):
    """Be there, all at the same time, and say what that takes."""
    stamp(folder, "first")
    wait_for_all(folder, "first", ranks)
    stamp(folder, "pss", pss())
    wait_for_all(folder, "pss", ranks)


def touched(data):
    """Something of every page."""
    if isinstance(data, list):
        return sum(len(one) for one in data)
    if hasattr(data, "parameters"):
        return sum(float(parameter.detach().view(-1)[::1024].sum()) for parameter in data.parameters())
    return float(data[::1024].sum())


def have(rank, folder, ranks, data):
    touched(data)
    stamp(folder, "have")
    wait_for_all(folder, "have", ranks)
    stamp(folder, "pss", pss())
    wait_for_all(folder, "pss", ranks)


def give(rank, folder, count):
    import torch

    value = torch.full((count,), float(rank))
    stamp(folder, "made")
    return value


LINE = "{}: rank {} prints a line of the length that a line of a log often has, with its number\n"


def flood(rank, folder, lines):
    stamp(folder, "first")
    for number in range(lines):
        sys.stdout.write(LINE.format(number, rank))
    sys.stdout.flush()
    stamp(folder, "printed")


def write(rank, folder, lines):
    """The same into a file, each line at once."""
    stamp(folder, "first")
    with open(f"{folder}/text.{rank}", "w", buffering=1) as file:
        for number in range(lines):
            file.write(LINE.format(number, rank))
    stamp(folder, "printed")


def fail(rank, folder):
    """Rank 1 raises while its peers are busy."""
    if rank == 1:
        time.sleep(0.5)
        stamp(folder, "raised")
        raise ValueError("the benchmark's own")
    time.sleep(10)


def train(rank, folder, ranks, port, steps, together):
    """A small model on the CPU; with ``together`` six small collectives a step."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_num_threads(1)
    make_group(rank, ranks, port)
    width = 64 if together else 512
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(256, 64), torch.randint(10, (256,))
    for number in range(-steps // 10, steps):
        if number == 0:
            dist.barrier()
            began, used = time.monotonic(), time.process_time()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if together:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    stamp(folder, "seconds", time.monotonic() - began)
    stamp(folder, "processor", time.process_time() - used)
    dist.barrier()
    dist.destroy_process_group()


def step(rank, folder, ranks, port):
    """What a first training cell does, with as little to compute as can be. The model stays, as a cell's would: torch
    2.13 hangs now and then, under every tool, when a model goes after its group."""
    global model
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    make_group(rank, ranks, port)
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.randn(20, 10)).square().mean().backward()
    optimizer.step()
    stamp(folder, "stepped")
    dist.destroy_process_group()


def step_transformers(rank, folder, ranks, port):
    global model
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import BertConfig, BertForSequenceClassification

    make_group(rank, ranks, port)
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = DistributedDataParallel(BertForSequenceClassification(config))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(input_ids=torch.randint(100, (4, 12)), labels=torch.randint(2, (4,))).loss.backward()
    optimizer.step()
    stamp(folder, "stepped")
    dist.destroy_process_group()


def step_lightning(rank, folder, ranks):
    """Lightning makes the group, and finds the other ranks by itself."""
    import lightning
    import torch

    class Tiny(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(10, 10)

        def training_step(self, batch):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=ranks,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.randn(64, 10), batch_size=8))
    stamp(folder, "stepped")
