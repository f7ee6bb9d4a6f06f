"""One fake GPU for one rank: that it is like a real one in what the other tests, and nbspawn, depend on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import nbspawn

pytestmark = pytest.mark.usefixtures("nothing_left")

ONE_SECOND = 10**9  # cycles of torch.cuda._sleep
A_WHILE = 10 * ONE_SECOND  # a rank waits for it at its end


def run(function: Any, *args: Any, nprocs: int = 1, **env: str) -> Any:
    return nbspawn.spawn(function, args, nprocs=nprocs, env=env)


def test_importing_torch_does_not_initialise_cuda() -> None:
    assert not torch.cuda.is_initialized()
    assert torch.cuda._device_count_nvml() == 2


# ---------------------------------------------------------------- numbers


class Model(nn.Module):
    """One of most kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.convolution = nn.Sequential(nn.Conv1d(16, 8, 3, groups=2), nn.BatchNorm1d(8), nn.GELU(), nn.MaxPool1d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.RMSNorm(12), nn.Linear(12, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(self.encoder(self.embedding(tokens)).mT))


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def losses(name: str, device: str, ahead: bool = False) -> list[float]:
    """``ahead``: the kernels are queued behind a long one."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    tokens, classes = torch.randint(11, (8, 6)).to(device), torch.randint(5, (8,)).to(device)
    found = []
    if ahead:
        torch.cuda._sleep(3 * ONE_SECOND)
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(tokens), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert not ahead or not torch.cuda.current_stream().query(), "the host has not run ahead"
    return [loss.item() for loss in found]


def everywhere(rank: int) -> dict[str, list[list[float]]]:
    kinds = ("cpu",), ("cuda",), ("cuda", True)
    return {name: [losses(name, *kind) for kind in kinds] for name in OPTIMIZERS}


def test_training_gives_the_cpus_numbers() -> None:
    for on_cpu, on_gpu, ahead in run(everywhere)[0].values():
        assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
        assert ahead == pytest.approx(on_cpu, rel=1e-4)
        assert on_gpu[-1] < on_gpu[0]


def mixed_precision(rank: int) -> tuple[str, float, bool]:
    model = nn.Linear(4, 1, device="cuda")
    before = model.weight.clone()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(torch.ones(2, 4, device="cuda"))
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return str(out.dtype), scaler.get_scale(), torch.allclose(model.weight, before - 0.2, atol=1e-3)


def test_mixed_precision() -> None:
    assert list(run(mixed_precision)) == [("torch.float16", 1024.0, True)]


def tensors(rank: int) -> list[Any]:
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    x[:, 1] += 10
    out = torch.empty(0, device="cuda")
    torch.mul(x, 2, out=out)
    strided = torch.randn(4, 6, device="cuda").t()
    torch.cuda.manual_seed(3)
    first, second = torch.rand(2, device="cuda"), torch.rand(2, device="cuda")
    torch.cuda.manual_seed(3)
    again = torch.rand(2, device="cuda")
    return [
        x.t().contiguous().tolist(),
        out.tolist(),
        x[x > 9].tolist(),
        torch.equal(strided.cpu().contiguous(), strided.contiguous().cpu()),
        x.to("cuda:1").sum().item(),
        torch.equal(first, again) and not torch.equal(first, second),
        x.half().cpu().dtype == torch.float16,
    ]


def test_views_results_copies_and_random_numbers() -> None:
    (found,) = run(tensors)
    transposed = [[0.0, 3.0], [11.0, 14.0], [2.0, 5.0]]
    doubled = [[0.0, 22.0, 4.0], [6.0, 28.0, 10.0]]
    assert found == [transposed, doubled, [11.0, 14.0], True, 35.0, True, True]


def two_devices(rank: int) -> None:
    torch.ones(3, device="cuda") + torch.ones(3)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(nbspawn.RankRaisedError, match="to be on the same device.* cuda:0 and cpu"):
        run(two_devices)


# ---------------------------------------------------------------- streams


def streams(rank: int) -> list[Any]:
    torch.cuda.init()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    start.record()
    torch.cuda._sleep(ONE_SECOND)
    end.record()
    side.wait_event(end)
    running = not torch.cuda.current_stream().query() and not end.query() and not side.query()
    number = torch.ones(1, device="cuda").sum()
    waited = number.item()
    return [running, waited, 1000 <= start.elapsed_time(end) < 60_000, side.synchronize(), side.query()]


def test_streams_go_on_beside_the_host() -> None:
    assert list(run(streams)) == [[True, 1.0, True, None, True]]


def two_streams(rank: int) -> list[bool]:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(A_WHILE)
    with torch.cuda.stream(second):
        number = torch.ones(2, device="cuda").sum().item()
    return [number == 2.0, not first.query(), second.query()]


def test_streams_do_not_wait_for_each_other() -> None:
    assert list(run(two_streams)) == [[True, True, True]]


# ---------------------------------------------------------------- errors


def wrong_index(rank: int) -> None:
    """Nothing is said of the index where it is used; everything fails from then on."""
    embedding = nn.Embedding(3, 2, device="cuda")
    row = embedding(torch.tensor([7], device="cuda"))
    found = [str(tuple(row.shape))]
    for use in (torch.cuda.synchronize, lambda: torch.ones(1, device="cuda"), row.tolist):
        try:
            use()
        except torch.AcceleratorError as error:
            found.append(str(error).splitlines()[0])
    assert found == ["(1, 2)", ASSERT, ASSERT, ASSERT]


def asserted(rank: int, holds: bool) -> None:
    torch._assert_async(torch.tensor(holds, device="cuda"))


def third_kernel(rank: int) -> int:
    launched = 0
    try:
        while launched < 9:
            torch.cuda._sleep(1)
            launched += 1
    except torch.AcceleratorError:
        pass
    return launched


ASSERT = "CUDA error: device-side assert triggered"


def test_a_wrong_index_breaks_the_context() -> None:
    with pytest.raises(nbspawn.RankRaisedError, match=ASSERT):  # as of each command from then on
        run(wrong_index)


def test_an_assertion_on_the_device() -> None:
    assert list(run(asserted, True)) == [None]
    with pytest.raises(nbspawn.RankRaisedError, match=ASSERT):
        run(asserted, False)


def test_a_kernel_that_is_told_to_fail() -> None:
    assert list(run(third_kernel, FAKE_GPU_ASSERT_AT="3")) == [2]


# ---------------------------------------------------------------- memory


def fill(rank: int) -> tuple[str, bool, int]:
    """The rank that is alone may have what the other has freed."""
    held = torch.empty(600 << 20, dtype=torch.uint8, device="cuda:0")
    free, total = torch.cuda.mem_get_info(0)
    try:
        torch.empty(600 << 20, dtype=torch.uint8, device="cuda:0")
    except torch.OutOfMemoryError as error:
        message = str(error).partition(".")[0]
    del held
    torch.cuda.empty_cache()
    return message, free + (600 << 20) <= total, torch.empty(600 << 20, dtype=torch.uint8, device="cuda:0").nbytes


def test_memory_is_limited() -> None:
    expected = "CUDA out of memory", True, 600 << 20
    for _ in range(2):  # the second run has what the first has left
        assert list(run(fill, FAKE_GPU_MEMORY_MB="1024")) == [expected]


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("instances", ctypes.c_uint * 2)]


def nvml(index: int) -> tuple[int, dict[int, int], int]:
    """Bytes in use, the bytes of each process, and the percentage of time that it was busy."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    library.nvmlInit_v2()
    device, memory, busy = ctypes.c_void_p(), Memory(), (ctypes.c_uint * 2)()
    processes, count = (Process * 16)(), ctypes.c_uint(16)
    assert library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
    assert library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    assert library.nvmlDeviceGetUtilizationRates(device, busy) == 0
    assert library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes) == 0
    return memory.used, {one.pid: one.used for one in processes[: count.value]}, busy[0]


def hold(rank: int) -> tuple[int, Any, Any]:
    held = torch.zeros(300 << 20, dtype=torch.uint8, device="cuda:1")
    with torch.cuda.device(1):
        torch.cuda._sleep(A_WHILE)
    return os.getpid(), nvml(1), (held.nbytes, nvml(0))


def test_nvml_knows_who_holds_memory() -> None:
    ((pid, (used, processes, busy), (held, other)),) = run(hold)
    assert set(processes) == {pid} and processes[pid] == used > held and busy == 100
    assert pid not in other[1]
    assert nvml(1) == (0, {}, 0), "nothing is left of a rank that has ended"


# ---------------------------------------------------------------- counting


def counted(rank: int) -> list[str]:
    return [str(torch.cuda.get_device_properties(i).uuid)[:8] for i in range(torch.cuda.device_count())]


@pytest.mark.parametrize(
    "visible, found",
    [
        ("2,0", ["00000003", "00000001"]),
        ("GPU-00000004-1111,GPU-00000002", ["00000004", "00000002"]),
        ("1,9,0", ["00000002"]),
        ("1,1", []),
        ("", []),
    ],
)
def test_visible_devices(visible: str, found: list[str]) -> None:
    assert list(run(counted, FAKE_GPUS="4", CUDA_VISIBLE_DEVICES=visible)) == [found]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FAKE_GPUS": "4"}, 4),
        ({"FAKE_GPUS": "4", "CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"FAKE_GPUS": "4", "CUDA_VISIBLE_DEVICES": "GPU-00000004"}, 1),
        ({"FAKE_GPUS": "4", "CUDA_VISIBLE_DEVICES": "MIG-8d7e0b6a", "FAKE_GPU_MIG": "1"}, 1),
        ({"FAKE_GPUS": "4", "FAKE_GPU_MIG": "1"}, 1),  # CUDA takes one instance, and NVML counts four GPUs
        ({"FAKE_GPUS": "4", "FAKE_NVML": "fail"}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_gpus_are_counted_without_cuda(environment: dict[str, str], expected: int) -> None:
    code = "from os import environ\nfrom nbspawn._accelerators.kinds import own\nprint(own().count(environ))\n"
    code += "from torch import cuda\nprint(cuda.is_initialized())"
    child = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert child.stdout.split() == [str(expected), "False"], child.stderr


def by_nvml(rank: int) -> int:
    return torch.cuda._device_count_nvml()


@pytest.mark.filterwarnings("ignore:Can't initialize NVML")
def test_what_nvml_cannot_count() -> None:
    assert list(run(by_nvml, CUDA_VISIBLE_DEVICES="MIG-8d7e0b6a", FAKE_GPU_MIG="1")) == [-1]
    assert list(run(counted, CUDA_VISIBLE_DEVICES="MIG-8d7e0b6a", FAKE_GPU_MIG="1")) == [["00000001"]]
    assert list(run(by_nvml, FAKE_NVML="fail")) == [-1]
