"""What a GPU's memory costs the host on its way to ranks and back, and what a user reads where a GPU has no room."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch
from kernels import Kernel, ok

import nbspawn
from nbspawn._payload.packing import Value, load, pack
from nbspawn._protocol import shared_memory, wire
from nbspawn._protocol.messages import Returned

MB = 1 << 20
PIECES = 3 * 16  # MB: at most three threads write 240 MB, each of them 16 MB at a time


def extra(pid: int, work: Callable[[], Any]) -> int:
    """MB that the process has for itself meanwhile, at most: without files in memory, and fake GPUs are such."""
    process, over = psutil.Process(pid), threading.Event()

    def private() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    most = before = private()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, private())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return (most - before) // MB


MODEL = "[torch.full((20 << 20,), number, dtype=torch.uint8, device='cuda:0') for number in range(12)]"


def test_a_model_of_the_notebook_is_copied_to_the_host_once(own_kernel: Kernel) -> None:
    """Into the file that ranks map."""
    ok(own_kernel.execute(f"import torch\nmodel = {MODEL}\nwarm = model[0][:2].clone()"))
    ok(own_kernel.execute("%%spawn 2\nwarm.tolist()"))
    replies = []
    cell = "%%spawn 2\nmodel[0].device, [part.sum().item() // part.nbytes for part in model] == [*range(12)]"
    cost = extra(own_kernel.pid, lambda: replies.append(own_kernel.execute(cell)))
    found = [f"[{rank}] (device(type='cuda', index={rank}), True)" for rank in range(2)]
    assert ok(replies[0]).result == "\n".join(found)
    assert cost < PIECES + 30


def cost_of_a_result(rank: int) -> int:
    held = eval(MODEL)
    fds: list[int] = []

    def send() -> None:
        wire.encode_event(Returned(0, 0.0, Value.of(held).result, 0), 1, fds)

    send()
    found = extra(os.getpid(), send)
    shared_memory.close(fds)
    return found


def test_so_is_a_result() -> None:
    assert nbspawn.spawn(cost_of_a_result, nprocs=1)[0] < 16 + 30


# ---------------------------------------------------------------- what travels


class Marked(torch.Tensor):
    """A class of the user's."""


def all_kinds() -> dict[str, torch.Tensor]:
    base = torch.arange(200_000, dtype=torch.float32, device="cuda:1")
    return {
        "base": base,
        "view": base[100:300].view(20, 10).t(),
        "strided": base[::2],
        "bits": base.view(torch.int32),
        "small": torch.arange(5, device="cuda:0"),
        "empty": torch.empty(0, 5, device="cuda:0"),
        "bf16": torch.arange(100_000, device="cuda:0").bfloat16(),
        "uint16": torch.arange(50_000).to(torch.uint16).cuda(0),
        "parameter": torch.nn.Parameter(torch.ones(300, 300, device="cuda:0")),
        "marked": torch.arange(100_000, device="cuda:0").as_subclass(Marked),
        "coo": torch.eye(90_000, 2).to_sparse().cuda(0),
        "conj": torch.ones(50_000, dtype=torch.complex64, device="cuda:0").conj(),
    }


def told(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """Of each all that must stay, but for its device."""
    found: dict[str, object] = {}
    for name, tensor in tensors.items():
        values = tensor.detach().cpu()
        values = values.to_dense() if values.is_sparse else values.resolve_conj()
        strides = () if tensor.is_sparse else tensor.stride()
        found[name] = type(tensor), tensor.dtype, strides, tensor.requires_grad, tensor.is_conj(), values.tolist()
    return found


def sent_and_returned(rank: int) -> dict[str, torch.Tensor]:
    sent = all_kinds()
    with pack(sent) as packed:
        there = load(packed.fds, packed.sizes)
    assert told(there) == told(sent)
    assert {str(tensor.device) for tensor in there.values()} == {f"cuda:{rank}"}
    there["base"][100] = -1.0
    assert there["view"][0, 0] == there["strided"][50] == -1.0, "what they share they share there, too"
    assert sent["base"][100] == 100.0
    return sent


def test_tensors_of_all_kinds() -> None:
    first, second = nbspawn.spawn(sent_and_returned, nprocs=2)
    assert {str(tensor.device) for tensor in first.values()} == {"cpu"}
    base = torch.arange(200_000, dtype=torch.float32)
    assert torch.equal(first["view"], base[100:300].view(20, 10).t()) and torch.equal(first["strided"], base[::2])
    assert told(first) == told(second)


def on_a_stream(rank: int) -> list[float]:
    held = torch.zeros(1_000_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)
        held.fill_(7.0)
        packed = pack(held)
    with packed:
        there = load(packed.fds, packed.sizes)
    return [there.min().item(), there.max().item()]


def test_what_a_stream_still_computes_is_waited_for() -> None:
    assert list(nbspawn.spawn(on_a_stream, nprocs=1)) == [[7.0, 7.0]]


# ---------------------------------------------------------------- no room

NO_ROOM = "import torch\nbig = torch.empty(500 << 20, dtype=torch.uint8, device='cuda:0')"


def test_an_error_for_want_of_memory_says_what_the_notebook_holds(own_kernel: Kernel) -> None:
    for cell in (
        "import os, torch\nos.environ['FAKE_GPU_MEMORY_MB'] = '1024'",
        "%%spawn 1 --keep --name eval\nimport torch\nheld = torch.ones(10 << 20, device='cuda:1')",
        "model = torch.ones(100 << 20, device='cuda:0')\nbatch = torch.ones(40, 1 << 18, device='cuda:0')",
        "row = batch[0]\nmodel",
    ):
        ok(own_kernel.execute(cell))
    others = "Other ranks @eval hold 42 MB of GPU memory: `%ranks stop @eval` ends them."
    reply = own_kernel.execute(f"%%spawn 2\nif rank == 1:\n    raise SystemExit\n{NO_ROOM}")
    assert reply.ename == "RankRaisedError", str(reply)
    _, kernels, of_others, *_ = reply.traceback.splitlines()
    assert of_others == others
    advice = ["%reset -f out", "%xdel model", "%xdel batch", "%xdel row", "torch.cuda.empty_cache()"]
    head = r"The notebook's kernel itself holds 46\d MB of cuda:0 \(model 419 MB, batch 42 MB\)\. "
    assert re.match(head, kernels) and re.findall("`(.*?)`", kernels) == advice, kernels
    ok(own_kernel.execute("\n".join(advice)))
    assert own_kernel.value("torch.cuda.memory_reserved(0)") == 0, "the advice is right"
    reply = own_kernel.execute(f"%%spawn 1\n{NO_ROOM}\nagain = big.clone()\nagain.add_(big.clone())")
    assert reply.traceback.splitlines()[1] == others and "kernel itself" not in reply.traceback, str(reply)
