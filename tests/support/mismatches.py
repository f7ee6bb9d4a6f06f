"""Programs whose ranks make different collective calls. A comment such as ``# A`` names a line."""

from __future__ import annotations

import ctypes
import inspect
import re
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbspawn._rank.report import recorder

LONG = 60.0  # seconds: a rank that sleeps this long is expected to be stopped


def line(program: Callable[..., object], name: str) -> str:
    """'mismatches.py, line 31', where the comment names a line of the program."""
    lines, first = inspect.getsourcelines(program)
    number = next(number for number, text in enumerate(lines) if text.rstrip().endswith(f"# {name}"))
    return f"mismatches.py, line {first + number}"


def filled(program: Callable[..., object], text: str) -> str:
    """The text with lines in place of ``<A>``."""
    return re.sub(r"<(\w)>", lambda match: line(program, match[1]), text)


def another_collective(rank: int) -> None:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        dist.all_gather([torch.ones(4)] * 3, torch.ones(4))  # A
    else:
        dist.all_reduce(torch.ones(10, 10))  # B


def another_shape(rank: int) -> None:
    dist.barrier()
    dist.all_reduce(torch.ones(4, 2 + (rank == 2)))  # A
    time.sleep(LONG)


def another_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 0 else torch.float32))  # A
    time.sleep(LONG)


def one_call_behind(rank: int) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(5))  # A
        if rank == 1 and step == 1:
            time.sleep(LONG)  # B


def slow_to_report_its_error(rank: int) -> None:
    """Rank 2 has gone. gloo marks the others' calls as ended; of rank 1 nothing else is known yet."""
    if rank == 1:
        recorder._settled_entries = lambda: time.sleep(LONG)
    if rank != 2:
        dist.all_gather([torch.ones(2)] * 3, torch.ones(2))  # A


def never_called(rank: int) -> None:
    if rank == 0:
        dist.all_gather_object([None] * 3, {"loss": 1.0})  # A
    else:
        time.sleep(LONG)  # B


def returned_early(rank: int) -> None:
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.ones(2))  # A


def other_order_of_groups(rank: int) -> None:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(2), group=one)  # A
        dist.broadcast(torch.ones(3), 0, group=other)
    elif rank == 1:
        dist.broadcast(torch.ones(3), 0, group=other)  # B
        dist.all_reduce(torch.ones(2), group=one)
    time.sleep(LONG)


def in_another_group(rank: int) -> None:
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(2), group=pair)  # A
    else:
        dist.barrier()  # B


def send_without_receive(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 2)  # A
    elif rank == 2:
        time.sleep(LONG)  # B


def receive_without_send(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4, dtype=torch.int64), 1)  # A
    elif rank == 1:
        dist.recv(torch.ones(4, dtype=torch.int64), 0)  # B


def other_tags(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=3)  # A
    elif rank == 1:
        dist.recv(torch.ones(4), 0, tag=4)  # B


def uneven_batches(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(2 if rank == 0 else 3):
        model(torch.ones(1, 4)).sum().backward()  # A
    dist.barrier()  # B


def source_goes_ahead(rank: int) -> None:
    if rank == 2:
        time.sleep(LONG)  # B
    dist.broadcast(torch.ones(6), 0)  # A
    time.sleep(LONG)


def in_a_part(rank: int) -> None:
    part = dist.new_group([1, 2], group_desc="experts")
    if rank == 1:
        dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * 2, group=part)  # A
    elif rank == 2:
        dist.all_gather([torch.ones(2)] * 2, torch.ones(2), group=part)  # B
    time.sleep(LONG)


def holds_the_lock(rank: int) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(int(LONG))
    dist.barrier()  # A


def makes_its_group_again(rank: int) -> None:
    for _ in range(5):
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(0.2)
    dist.barrier()
    time.sleep(LONG)


def does_all_right(rank: int) -> None:
    """Calls whose tensors differ from rank to rank, as they may."""
    dist.scatter(torch.ones(2), [torch.ones(2)] * 3 if rank == 0 else None, 0)
    dist.gather(torch.ones(2), [torch.ones(2)] * 3 if rank == 0 else None, 0)
    dist.reduce(torch.ones(2), 0)
    counts = [1, 2, 3]
    received = torch.ones(3 * counts[rank])
    dist.all_to_all_single(received, torch.ones(6), [counts[rank]] * 3, counts)
    with suppress(RuntimeError):  # gloo does not have it in torch 2.8 and 2.9
        dist.all_to_all([torch.ones(2)] * 3, [torch.ones(2)] * 3)
    dist.all_gather_object([None] * 3, "x" * rank)
    dist.broadcast_object_list([1, 2] if rank == 1 else [None, None], 1)
    dist.monitored_barrier()
    if rank < 2:
        send, receive = (dist.P2POp(call, torch.ones(3), 1 - rank) for call in (dist.isend, dist.irecv))
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    DistributedDataParallel(torch.nn.Linear(4, 2))(torch.ones(1, 4)).sum().backward()
    handle = dist.all_reduce(torch.ones(2), async_op=True)
    time.sleep(LONG)
    handle.wait()
