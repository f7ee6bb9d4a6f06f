"""torch_xla for real, on its CPU device: from kernels, under both start methods (.ci/colab-env, .ci/kaggle-env)."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import ExecutedKernel, Kernel, Reply, lives, ok, prepare, wait_until

pytest.importorskip("torch_xla")

TRAIN = """%%spawn 4 -b xla -m {method} -o losses
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
x = torch.randn(64, 8)
x, y = x.to(device), x.sum(1, keepdim=True).to(device)
found = []
for step in range(5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        gradient = parameter.grad.cpu()
        dist.all_reduce(gradient)
        parameter.grad = (gradient / world_size).to(device)
    xm.optimizer_step(optimizer)
    torch_xla.sync()
    found.append(loss.item())
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(f"{{rank}} on {{device}}, {{dist.get_backend()}} {{dist.get_rank()}} of {{dist.get_world_size()}}")
found, weights
"""

INITIALISED = "__import__('torch_xla')._XLAC._xla_runtime_is_initialized()"


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which torch_xla is imported, as notebooks do in their first cell."""
    with ExecutedKernel(tmp_path_factory.mktemp("kernel"), PJRT_DEVICE="CPU") as kernel:
        prepare(kernel, "torch_xla")
        ok(kernel.execute("import torch_xla"))
        yield kernel


@pytest.fixture(scope="module")
def kernel_with_a_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with ExecutedKernel(tmp_path_factory.mktemp("kernel"), PJRT_DEVICE="CPU") as kernel:
        prepare(kernel, "torch_xla")
        ok(kernel.execute("import torch, torch_xla"))
        ok(kernel.execute("mine = torch.ones(3, device='xla') * 2\nmine.sum().item()"))
        yield kernel


@pytest.fixture
def used_kernel(kernel_with_a_device: Kernel) -> Iterator[Kernel]:
    """One that has used its XLA device, in its fifth cell."""
    yield kernel_with_a_device
    kernel_with_a_device.assert_no_rank()


def notes(reply: Reply) -> str:
    """What the view says below its table."""
    return " ".join(reply.table["text/plain"].split())


# ---------------------------------------------------------------- it works


def test_training(kernel: Kernel, method: str) -> None:
    """Twice: torch_xla's own launcher works once."""
    for _ in range(2):
        reply = ok(kernel.execute(TRAIN.format(method=method)))
        for rank in range(4):
            assert reply.of(rank)[-1] == f"{rank} on xla:0, gloo {rank} of 4", "torch 2.9 itself prints a line before"
        losses = kernel.value("[found for found, weights in losses]")
        assert all(found[-1] < found[0] for found in losses)
        assert kernel.value("[bool((weights == losses[0][1]).all()) for found, weights in losses]") == [True] * 4
        assert kernel.value("{str(weights.device) for found, weights in losses}") == {"cpu"}
        assert kernel.value(INITIALISED) is False, "and so the kernel can start ranks again"


def test_ranks_find_what_torch_xla_says(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn xla -b xla -m {method}\n" + (
        "import torch\nimport torch.distributed as dist\nimport torch_xla.runtime as xr\n"
        "total = torch.ones(2, device=device)\ndist.all_reduce(total)\n"
        "(rank, world_size) == (xr.global_ordinal(), xr.world_size()), dist.get_backend(), total.tolist(), device"
    )
    reply = ok(kernel.execute(cell))
    assert "(True, 'xla', [1.0, 1.0], device(type='xla', index=0))" in reply.result
    assert "collectives" not in notes(reply)


def test_a_function(kernel: Kernel, method: str) -> None:
    reply = ok(
        kernel.execute(
            "def where(rank):\n"
            "    import torch\n"
            "    return str(torch.ones(1, device='xla').device), rank\n"
            f"import nbspawn\nnbspawn.spawn(where, nprocs=2, backend='xla', start_method={method!r})"
        )
    )
    assert reply.result == "[0] ('xla:0', 0)\n[1] ('xla:0', 1)"


def test_without_a_backend_the_cell_makes_the_group(kernel: Kernel, method: str) -> None:
    """As torch_xla's documentation has it."""
    cell = f"%%spawn xla -m {method}\n" + (
        "import torch\nimport torch.distributed as dist\nimport torch_xla.distributed.xla_backend\n"
        "dist.init_process_group('xla', init_method='xla://')\n"
        "total = torch.ones(2, device=device)\ndist.all_reduce(total)\n"
        "dist.get_backend(), total.tolist()"
    )
    assert "('xla', [1.0, 1.0])" in ok(kernel.execute(cell)).result


def test_kept_ranks(kernel: Kernel) -> None:
    ok(kernel.execute("%%spawn 2 -b xla --keep\nimport torch\nx = torch.full((2,), float(rank), device=device)"))
    assert ok(kernel.execute("%%ranks\nx += 1\nx.tolist()")).result == "[0] [1.0, 1.0]\n[1] [2.0, 2.0]"
    ok(kernel.execute("%ranks stop"))


def test_the_view_warns_that_ranks_are_alone(kernel: Kernel) -> None:
    reply = ok(kernel.execute("%%spawn 2 -b xla\nimport torch_xla.runtime as xr\nxr.world_size()"))
    assert reply.result == "[0-1] 1"
    assert "XLA's CPU device has no collectives between processes" in notes(reply)
    assert "the process group is gloo's" in notes(reply)


def test_the_group_does_not_return_a_ranks_own_value_as_a_sum(kernel: Kernel) -> None:
    reply = kernel.execute(
        "%%spawn 2 -b xla\nimport torch, torch.distributed as dist\ndist.all_reduce(torch.ones(2).to(device))"
    )
    assert reply.ename == "RankRaisedError" and "move the tensor to the CPU" in reply.evalue, str(reply)


def test_a_hosts_stale_variables(kernel: Kernel, method: str) -> None:
    """Kaggle sets the first; the others are left by a use of the device in the kernel's process."""
    stale = {
        "TPU_PROCESS_ADDRESSES": "local",
        "CLOUD_TPU_TASK_ID": "7",
        "TPU_VISIBLE_CHIPS": "0",
        "PJRT_LOCAL_PROCESS_RANK": "3",
    }
    ok(kernel.execute(f"import os\nos.environ.update({stale!r})"))
    try:
        found = f"[os.environ.get(name) for name in {list(stale)!r}]"
        reply = ok(kernel.execute(f"%%spawn 2 -b xla -m {method}\nimport os\n{found}"))
        assert reply.result == "[0] [None, None, None, '0']\n[1] [None, None, None, '1']"
    finally:
        ok(kernel.execute(f"for name in {list(stale)!r}:\n    del os.environ[name]"))


def test_stop_leaves_nothing(kernel: Kernel, method: str) -> None:
    cell = kernel.submit(
        f"%%spawn 4 -b xla -m {method}\nimport os, torch, torch_xla\nprint('pid', os.getpid())\n"
        "x = torch.ones(64, 64, device=device)\nwhile True:\n    x = (x @ x).tanh()\n    torch_xla.sync()"
    ).until("pid", 4)
    pids = [int(line.split()[1]) for rank in range(4) for line in cell.reply.of(rank) if line.startswith("pid")]
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", str(reply)
    assert len(pids) == 4
    wait_until(lambda: not any(map(lives, pids)), "the ranks end")


# ---------------------------------------------------------------- start methods, and what is refused


def test_fork_is_refused_by_the_name_of_the_cell(used_kernel: Kernel) -> None:
    reply = used_kernel.execute("%%spawn 2 -b xla -m fork\nrank")
    assert reply.ename == "StartError"
    assert "the XLA runtime is initialised in this kernel; it hangs in a forked rank (since cell 5 ran)" in reply.evalue
    assert "-m forkserver" in reply.evalue


def test_the_fork_server_serves_a_kernel_that_has_used_its_device(used_kernel: Kernel) -> None:
    """By itself; and the kernel's XLA tensors travel."""
    reply = ok(used_kernel.execute("%%spawn 2 -b xla\n(mine + rank).sum().item(), mine.device"))
    assert "fork server" in reply.table["text/plain"]
    assert reply.result == "[0] (6.0, device(type='xla', index=0))\n[1] (9.0, device(type='xla', index=0))"
    assert used_kernel.execute("mine.device").result == "device(type='xla', index=0)"


def test_what_can_only_be_forked_is_refused_where_fork_is_unsafe(used_kernel: Kernel) -> None:
    ok(used_kernel.execute("import threading\nlock = threading.Lock()"))
    reply = used_kernel.execute("%%spawn 2 -b xla\nwith lock:\n    print(rank)")
    assert reply.ename == "PayloadError"
    assert "lock" in reply.evalue and "the XLA runtime is initialised" in reply.evalue


def test_a_kernel_that_holds_the_tpu(used_kernel: Kernel, tmp_path: Path) -> None:
    """No other process can use the chips then, however it was started."""
    chip = tmp_path / "pci" / "0000"
    chip.mkdir(parents=True)
    (chip / "vendor").write_text("0x1ae0\n")
    (chip / "device").write_text("0x0063\n")
    ok(
        used_kernel.execute(
            "from pathlib import Path\nfrom nbspawn._accelerators import tpu\n"
            f"own, tpu._PCI = tpu._PCI, Path({str(chip.parent)!r})"
        )
    )
    held = used_kernel.execute("%%spawn xla --env PJRT_DEVICE=TPU\nrank")
    ok(used_kernel.execute("tpu._PCI = own"))
    assert held.ename == "StartError"
    assert "this kernel holds the TPU (since cell 5 ran)" in held.evalue and "restart the kernel" in held.evalue


def test_several_devices_in_each_process(kernel: Kernel, method: str) -> None:
    """As TPU v2 and v3 have."""
    reply = kernel.execute(f"%%spawn 2 -b xla -m {method} --env CPU_NUM_DEVICES=2\nrank")
    assert reply.status == "error"
    assert "each process has 2 XLA devices here" in reply.evalue and "torch_xla.launch" in reply.evalue


def test_ordinals_in_another_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A TPU need not number its chips as the processes are. There is none here: torch_xla's answers are given."""
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    from nbspawn._rank.group import device

    answers: dict[Any, dict[str, Any]] = {
        pjrt: {"initialize_multiprocess": lambda rank, ranks: None},
        runtime: {
            "addressable_device_count": lambda: 1,
            "_init_world_size_ordinal": lambda: None,
            "device_type": lambda: "TPU",
            "world_size": lambda: 4,
            "global_ordinal": lambda: 2,
        },
    }
    for module, functions in answers.items():
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)
    for name in ("RANK", "ROLE_RANK", "TPU_WORKER_ID"):
        monkeypatch.setenv(name, "1")
    launch = types.SimpleNamespace(world_size=4, accelerator="xla")
    info: Any = types.SimpleNamespace(rank=1, ordinal=1, launch=launch)
    with device.ready(info, channel=None):
        pass
    assert (info.ordinal, os.environ["RANK"]) == (2, "2")
    assert "`rank`, is 2 here; 1 is the local rank" in capsys.readouterr().out
    launch.world_size = 8
    with pytest.raises(RuntimeError, match="torch_xla counts 4 TPU devices, and there are 8 ranks"):
        device.ready(info, channel=None).__enter__()
