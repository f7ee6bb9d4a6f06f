"""NCCL's process groups over fake GPUs: numbers, groups, and the ways in which a collective does not end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import nbspawn

pytestmark = pytest.mark.usefixtures("nothing_left")


def run(function: Any, nprocs: int = 2, backend: str | None = "nccl", timeout: float | None = None, **env: str) -> Any:
    return nbspawn.spawn(function, nprocs=nprocs, backend=backend, timeout=timeout, grace_period=1, env=env)


def cuda(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cuda")


# ---------------------------------------------------------------- numbers

REDUCED = {
    dist.ReduceOp.SUM: [5.0, 10.0],
    dist.ReduceOp.PRODUCT: [4.0, 24.0],
    dist.ReduceOp.MAX: [4.0, 6.0],
    dist.ReduceOp.MIN: [1.0, 4.0],
    dist.ReduceOp.AVG: [2.5, 5.0],
}
TYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8


def reductions(rank: int) -> list[str]:
    wrong = []
    torch.cuda.set_device(rank)
    for dtype in TYPES:
        for operation, expected in REDUCED.items():
            tensor = cuda(*[(1.0, 4.0), (4.0, 6.0)][rank], dtype=dtype)
            dist.all_reduce(tensor, operation)
            if tensor.tolist() != cuda(*expected, dtype=dtype).tolist():
                wrong.append(f"{dtype} {operation}: {tensor}")
    tensor = cuda(rank + 1.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    wrong += [f"scaled: {tensor}"] * (tensor.item() != 1.5)
    return wrong


def test_reductions() -> None:
    assert list(run(reductions)) == [[], []]


def collectives(rank: int) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    size, found = dist.get_world_size(), {}
    own = cuda(rank, rank + 10.0)
    reduced = own.clone()
    dist.reduce(reduced, 1)
    found["reduce"] = reduced.tolist() if rank == 1 else None
    sent = own.clone()
    dist.broadcast(sent, 2)
    found["broadcast"] = sent.tolist()
    parts = [torch.empty(2, device="cuda") for _ in range(size)]
    dist.all_gather(parts, own)
    found["all_gather"] = [part.tolist() for part in parts]
    scattered = torch.empty(2, device="cuda")
    dist.reduce_scatter(scattered, [cuda(i, rank) for i in range(size)])
    found["reduce_scatter"] = scattered.tolist()
    exchanged = torch.empty(size, device="cuda")
    dist.all_to_all_single(exchanged, torch.arange(size, device="cuda") + 10.0 * rank)
    found["all_to_all"] = exchanged.tolist()
    uneven = [torch.empty(peer + 1, device="cuda") for peer in range(size)]
    dist.all_to_all(uneven, [torch.full((rank + 1,), float(rank), device="cuda") for _ in range(size)])
    found["all_to_all, uneven"] = [part.tolist() for part in uneven]
    gathered = [torch.empty(2, device="cuda") for _ in range(size)] if rank == 0 else None
    dist.gather(own, gathered)
    found["gather"] = [part.tolist() for part in gathered] if gathered else None
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "3")
    results = run(collectives, nprocs=3)
    every = [[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]]
    for rank, found in enumerate(results):
        assert found == {
            "reduce": [3.0, 33.0] if rank == 1 else None,
            "broadcast": [2.0, 12.0],
            "all_gather": every,
            "reduce_scatter": [3.0 * rank, 3.0],
            "all_to_all": [rank, 10.0 + rank, 20.0 + rank],
            "all_to_all, uneven": [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]],
            "gather": every if rank == 0 else None,
            "objects": [{"rank": peer} for peer in range(3)],
        }


def point_to_point(rank: int) -> list[Any]:
    torch.cuda.set_device(rank)
    size = dist.get_world_size()
    received = torch.empty(2, device="cuda")
    pair = [
        dist.P2POp(dist.isend, cuda(rank, rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    ping = cuda(7.0) if rank == 0 else torch.empty(1, device="cuda")
    if rank == 0:
        dist.send(ping, 1)
        dist.recv(ping, 1)
    elif rank == 1:
        dist.recv(ping, 0)
        dist.send(ping + 1, 0)
    return [received.tolist(), ping.item() if rank < 2 else None]


def test_point_to_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "3")
    assert list(run(point_to_point, nprocs=3)) == [[[2.0, 2.0], 8.0], [[0.0, 0.0], 7.0], [[1.0, 1.0], None]]


def groups(rank: int) -> list[Any]:
    """With communicators of their own, and several calls as one."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = cuda(rank)
    dist.all_reduce(own, group=pairs[rank // 2])
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner"))
    meshed = cuda(rank)
    dist.all_reduce(meshed, group=mesh["outer"].get_group())
    several = [cuda(rank), cuda(rank, 1.0)]
    with dist._coalescing_manager(device=device):
        for tensor in several:
            dist.all_reduce(tensor)
    return [own.item(), meshed.item(), [tensor.tolist() for tensor in several]]


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "4")
    several = [[6.0], [6.0, 4.0]]
    assert list(run(groups, nprocs=4)) == [[1, 2, several], [1, 4, several], [5, 2, several], [5, 4, several]]


def split(rank: int) -> float:
    """The communicator of a group is made from the default group's."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    tensor = torch.full((1,), float(rank), device=torch.device("cuda", rank))
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    return tensor.item()


def test_split_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "4")
    assert list(run(split, nprocs=4, backend=None)) == [2.0, 4.0, 2.0, 4.0]


def beside_a_long_kernel(rank: int) -> list[Any]:
    """A collective is in order with its stream, and the host need not wait for it."""
    torch.cuda.set_device(rank)
    tensor = cuda(rank + 1.0)
    dist.all_reduce(tensor)
    tensor.fill_(rank + 1.0)
    if rank == 0:
        torch.cuda._sleep(10**9)
    work = dist.all_reduce(tensor, async_op=True)
    pending = not work.is_completed()
    work.wait()
    return [pending, tensor.item()]


def test_a_collective_waits_for_the_kernels_before_it() -> None:
    assert list(run(beside_a_long_kernel)) == [[True, 3.0], [True, 3.0]]


# ---------------------------------------------------------------- what does not end


def another_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank, device="cuda"))
    torch.cuda.synchronize()


def nothing_wrong(rank: int) -> str:
    tensor = cuda(1.0)
    dist.all_reduce(tensor)
    tensor.item()
    return "done"


@pytest.mark.parametrize("program, env", [(another_shape, {}), (nothing_wrong, {"FAKE_NCCL_P2P": "hang"})])
def test_a_collective_that_never_ends(program: Any, env: dict[str, str]) -> None:
    with pytest.raises(nbspawn.RunTimeoutError):
        run(program, timeout=3, **env)


def aborted(rank: int) -> float:
    """Rank 1 does not join. The abort of another thread gives the GPU back to rank 0."""
    torch.cuda.set_device(rank)
    tensor = cuda(1.0)
    dist.all_reduce(tensor)
    tensor.item()
    if rank == 0:
        dist.all_reduce(tensor)
    start = time.monotonic()
    threading.Timer(1, dist.group.WORLD._get_backend(torch.device("cuda")).abort).start()
    tensor.item()
    return time.monotonic() - start


def test_abort_ends_what_waits() -> None:
    waited, not_waited = run(aborted)
    assert waited >= 0.9 and not_waited < waited


def test_an_abort_that_hangs() -> None:
    with pytest.raises(nbspawn.RunTimeoutError):
        run(aborted, timeout=4, FAKE_NCCL_ABORT="hang")


def failing(rank: int) -> None:
    """The watchdog finds the communicator's error, and ends the process or raises it."""
    torch.cuda.set_device(rank)
    for number in range(4):
        dist.all_reduce(cuda(1.0))
        torch.cuda.synchronize()
        print("number", number, flush=True)


def test_a_failing_collective(capfd: pytest.CaptureFixture[str]) -> None:
    """torch waits for its dump four times as long as it is told to, by default a minute."""
    with pytest.raises(nbspawn.RankExitedError):
        run(failing, FAKE_NCCL_FAIL_AT="3", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="100")
    shown = capfd.readouterr()
    assert "number 1" in shown.out and "number 2" not in shown.out
    assert "the fake NCCL was told to fail" in shown.out + shown.err
