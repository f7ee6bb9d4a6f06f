"""What the README promises of GPUs, on a real one: `pytest tests/kernel/test_gpu.py`, a machine with one GPU is enough.

Skipped where there is none. Nothing here initialises CUDA in the test process, nor in a kernel where the test does not
say so: NVML counts the GPUs, and nvidia-smi tells what the driver knows.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernels import WARM, Cell, ExecutedKernel, Kernel, Reply, ok, wait_gone, wait_until

from nbspawn._accelerators import kinds

SLOW = 120.0  # seconds: a rank's first use of CUDA reads hundreds of MB of libraries, and PATIENCE is for the CPU


def _missing() -> str:
    """Why there is nothing to be tested here; '' if there is."""
    if torch.version.cuda is None:
        return f"needs a GPU and a CUDA build of torch: torch {torch.__version__} here is built without CUDA"
    return "" if kinds.own().count(os.environ) else "needs a GPU: there is none that torch could use"


_MISSING = _missing()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


@pytest.fixture(scope="module", autouse=True)
def one_gpu() -> Iterator[None]:
    """The kernels see the first GPU: the tests count on one."""
    with pytest.MonkeyPatch.context() as patch:
        if kinds.own().count(os.environ) > 1:
            patch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip())
        yield


def run(kernel: Kernel, code: str) -> Reply:
    """A cell that has to end well."""
    return ok(kernel.execute(code, timeout=SLOW))


def without_cuda(kernel: Kernel) -> bool:
    """Has this kernel kept CUDA uninitialised?"""
    return kernel.value("__import__('sys').modules['torch'].cuda.is_initialized()") is False


# ---------------------------------------------------------------- what the driver knows

HELD = 512  # MiB that a rank takes: what it leaves behind could not be overlooked
MARGIN = 256  # MiB: others may use the GPU, too


def ask(query: str) -> list[int]:
    """The numbers of nvidia-smi's answer; none where it is missing, or does not know."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) for line in map(str.strip, answer.splitlines()) if line.isdigit()]


def known(pids: Collection[int]) -> set[int]:
    """Those that are in the driver's list. In a container it may be empty, or hold the host's numbers."""
    return set(pids) & set(ask("compute-apps=pid"))


def used() -> int:
    """MiB of device memory; 0 where nobody tells."""
    return sum(ask("gpu=memory.used"))


@dataclass
class Driver:
    """Whether a test's ranks are gone from the device, by whichever of both the driver tells here."""

    before: int
    """MiB that were in use before there was one."""
    listed: bool = False
    measured: bool = False

    def sees(self, pids: Collection[int]) -> None:
        """While the ranks hold HELD each: what can be told of them here?"""
        self.listed = known(pids) == set(pids)
        self.measured = used() >= self.before + HELD * len(pids)
        print(f"the driver lists the ranks: {self.listed}; their memory shows: {self.measured}")

    def forgets(self, pids: list[int], seconds: float = 20.0) -> None:
        """The processes end, and nothing of them stays in the driver."""
        wait_gone(pids, seconds)
        if self.listed:
            wait_until(lambda: not known(pids), f"ranks {pids} leave the driver's list of processes", seconds)
        if self.measured:
            limit = self.before + MARGIN
            wait_until(lambda: used() <= limit, f"device memory goes back to {self.before} MiB", seconds)


@pytest.fixture
def driver() -> Driver:
    """The driver, before the test."""
    return Driver(used())


AT_WORK = f"""
import os, torch
held = torch.ones({HELD} << 20, dtype=torch.uint8, device=device)
x = torch.randn(2048, 2048, device=device)
def work():
    global x
    x = torch.nn.functional.normalize(x @ x)
    torch.cuda.synchronize()
work()
print('pid', os.getpid())
while not (rank == 1 and os.path.exists({{go!r}})):
    work()
raise ValueError('on purpose')"""
"""Ranks in a loop of kernels; when the file ``go`` comes rank 1 fails."""


def pids_of(cell: Cell, nprocs: int) -> list[int]:
    """The pids that AT_WORK prints, when all have."""

    def found() -> list[int]:
        message = [re.search(r"pid (\d+)", "\n".join(cell.reply.of(rank))) for rank in range(nprocs)]
        return [int(one[1]) for one in message if one]

    cell.read_until(lambda: len(found()) == nprocs, f"{nprocs} ranks are at work on the GPU", SLOW)
    return found()


# ---------------------------------------------------------------- nccl

ALL_REDUCE = """
import torch, torch.distributed as dist
t = torch.full((4,), rank + 1.0, device=device)
dist.all_reduce(t)
str(device), dist.get_backend(), str(t.device), t.tolist()"""


@pytest.mark.parametrize("line", ["1 -b nccl", "gpu -b nccl", "gpu -b auto", "-b auto"])
def test_nccl_with_a_rank_for_the_gpu(kernel: Kernel, line: str) -> None:
    reply = run(kernel, f"%%spawn {line}{ALL_REDUCE}")
    assert reply.result == "[0] ('cuda:0', 'nccl', 'cuda:0', [1.0, 1.0, 1.0, 1.0])", str(reply)
    assert without_cuda(kernel), "to count GPUs and start ranks takes no CUDA in the kernel"


def test_a_group_that_the_cell_makes_itself(kernel: Kernel) -> None:
    """As under torchrun: by the environment, nccl for CUDA tensors and gloo for the others."""
    cell = """%%spawn 1
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
there, here = torch.ones(2, device=device), torch.ones(2)
dist.all_reduce(there)
dist.all_reduce(here)
dist.destroy_process_group()
there.tolist(), here.tolist()"""
    assert run(kernel, cell).result == "[0] ([1.0, 1.0], [1.0, 1.0])"


def test_nccl_takes_no_more_ranks_than_gpus(kernel: Kernel) -> None:
    """Its first collective would hang, or fail with 'Duplicate GPU detected'."""
    reply = kernel.execute("%%spawn 2 -b nccl\nrank")
    assert reply.ename == "UsageError", str(reply)
    assert "nccl needs one GPU per rank: there are 2 ranks and 1 visible GPUs." in reply.traceback
    assert "-b gloo" in reply.traceback and reply.traceback.count("\n") == 0, "one sentence, with what to do"


# ---------------------------------------------------------------- several ranks on one GPU


def test_gloo_sums_cuda_tensors_of_ranks_that_share_the_gpu(kernel: Kernel) -> None:
    reply = run(kernel, f"%%spawn 3 -b gloo{ALL_REDUCE}")
    assert reply.result == "[0-2] ('cuda:0', 'gloo', 'cuda:0', [6.0, 6.0, 6.0, 6.0])", str(reply)


def test_auto_is_gloo_where_ranks_share_the_gpu(kernel: Kernel) -> None:
    cell = "%%spawn 2 -b auto\nimport torch.distributed as dist\ndist.get_backend()"
    assert run(kernel, cell).result == "[0-1] 'gloo'"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_each_start_method_has_the_gpu(kernel: Kernel, method: str) -> None:
    """fork, too, as long as the kernel has not used CUDA: and that is so after all the cells that came before."""
    cell = f"%%spawn 2 -m {method}\nimport torch\nstr(device), (torch.ones(3, device=device) * rank).sum().item()"
    assert run(kernel, cell).result == "[0] ('cuda:0', 0.0)\n[1] ('cuda:0', 3.0)"


def test_devices(kernel: Kernel) -> None:
    cell = "\nimport os, torch\nos.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count(), str(device)"
    assert run(kernel, f"%%spawn 2 --devices 0{cell}").result == "[0-1] ('0', 1, 'cuda:0')"
    assert run(kernel, f"%%spawn 2 --env CUDA_VISIBLE_DEVICES={cell}").result == "[0-1] ('', 0, 'cpu')"


def test_a_seed_is_for_the_gpus_generator_too(kernel: Kernel) -> None:
    cell = "%%spawn 2 --seed 7 -o {name}\nimport torch\ntorch.rand(3, device=device).tolist()"
    for name in ("first", "second"):
        run(kernel, cell.format(name=name))
    first, second = kernel.value("list(first), list(second)")
    assert first == second, "the same seed gives the same numbers"
    assert first[0] != first[1], "each rank has its own"


def test_a_default_device_of_the_notebook_is_the_ranks_gpu(kernel: Kernel) -> None:
    ok(kernel.execute("import torch\ntorch.set_default_device('cuda')"))
    try:
        assert run(kernel, "%%spawn 2\nimport torch\nstr(torch.ones(1).device)").result == "[0-1] 'cuda:0'"
    finally:
        ok(kernel.execute("torch.set_default_device(None)"))
    assert without_cuda(kernel), "the kernel need not use its default device to tell it"


# ---------------------------------------------------------------- results


def test_cuda_results_come_back_to_the_cpu(kernel: Kernel) -> None:
    """Small ones in the stream, large ones beside it; a loss with a history, a model's weights."""
    cell = """%%spawn 2 -o out
import torch
model = torch.nn.Linear(2, 1, bias=False).to(device)
torch.nn.init.constant_(model.weight, rank + 1.0)
loss = model(torch.ones(1, 2, device=device)).sum()
assert loss.is_cuda and loss.requires_grad
{'small': torch.arange(3, device=device), 'big': torch.full((100_000,), rank, device=device), 'loss': loss,
 'weights': model.state_dict(), 'model': model}"""
    run(kernel, cell)
    tensors = "[out[r]['small'], out[r]['big'], out[r]['loss'], out[r]['weights']['weight'], out[r]['model'].weight]"
    assert kernel.value(f"[str(t.device) for r in range(2) for t in {tensors}]") == ["cpu"] * 10
    assert kernel.value("[one['small'].tolist() for one in out]") == [[0, 1, 2]] * 2
    assert kernel.value("[int(one['big'].sum()) for one in out]") == [0, 100_000]
    assert kernel.value("[one['loss'].item() for one in out]") == [2.0, 4.0]
    assert kernel.value("[one['weights']['weight'].tolist() for one in out]") == [[[1.0, 1.0]], [[2.0, 2.0]]]
    assert without_cuda(kernel), "results can be read without CUDA"


# ---------------------------------------------------------------- a kernel that uses CUDA itself

USES_CUDA = """\
import torch
weights = torch.arange(6.0, device='cuda').reshape(2, 3)
row = weights[1]
big = torch.arange(100_000, device='cuda')
model = torch.nn.Linear(3, 1, bias=False).to('cuda')
torch.nn.init.constant_(model.weight, 2.0)
def scaled(factor):
    def apply(x):
        return (x * big[:3] * factor).tolist()
    return apply
apply = scaled(torch.tensor(10.0, device='cuda'))"""


@pytest.fixture(scope="module")
def module_cuda_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which the third cell has initialised CUDA."""
    with ExecutedKernel(tmp_path_factory.mktemp("cuda-kernel")) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute(WARM))
        run(kernel, USES_CUDA)
        yield kernel


@pytest.fixture
def cuda_kernel(module_cuda_kernel: Kernel) -> Iterator[Kernel]:
    """That kernel; no test may leave a rank in it."""
    assert not without_cuda(module_cuda_kernel), "the test needs a kernel that has initialised CUDA"
    yield module_cuda_kernel
    module_cuda_kernel.assert_no_rank(5.0)


def test_fork_is_refused_by_the_name_of_the_cell(cuda_kernel: Kernel) -> None:
    reply = cuda_kernel.execute("%%spawn 2 -m fork\nrank")
    assert reply.ename == "StartError", str(reply)
    assert "torch.cuda is initialised in this kernel" in reply.evalue and "(since cell 3 ran)" in reply.evalue
    assert "-m forkserver" in reply.evalue


def test_auto_works_all_the_same(cuda_kernel: Kernel) -> None:
    reply = run(cuda_kernel, f"%%spawn 2 -b gloo{ALL_REDUCE}")
    assert reply.result == "[0-1] ('cuda:0', 'gloo', 'cuda:0', [3.0, 3.0, 3.0, 3.0])"
    assert reply.table["text/plain"].startswith("2 ranks · fork server"), reply.table["text/plain"]


def test_what_cannot_travel_is_named_beside_cuda(cuda_kernel: Kernel) -> None:
    ok(cuda_kernel.execute("import threading\nmutex = threading.Lock()"))
    reply = cuda_kernel.execute("%%spawn 2\nmutex")
    assert reply.ename == "PayloadError", str(reply)
    assert "mutex" in reply.evalue and "torch.cuda is initialised in this kernel" in reply.evalue


def test_cuda_tensors_of_the_notebook(cuda_kernel: Kernel) -> None:
    """On the rank's own GPU, with their values; views go on sharing memory; what a rank changes stays in it."""
    cell = """%%spawn 2 -o out
import torch
weights[1] += 10 * rank
devices = sorted({str(tensor.device) for tensor in (weights, row, big, *model.parameters())})
devices, row.tolist(), big.sum().item(), model(torch.ones(3, device=device)).item()"""
    run(cuda_kernel, cell)
    expected = [(["cuda:0"], [3.0 + 10 * r, 4.0 + 10 * r, 5.0 + 10 * r], 4_999_950_000, 6.0) for r in range(2)]
    assert cuda_kernel.value("list(out)") == expected
    assert cuda_kernel.value("str(weights.device), weights.tolist()") == ("cuda:0", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def test_a_cuda_tensor_in_a_closure(cuda_kernel: Kernel) -> None:
    reply = run(cuda_kernel, "%%spawn 2\nimport torch\napply(torch.full((3,), rank + 1.0, device=device))")
    assert reply.result == "[0] [0.0, 10.0, 20.0]\n[1] [0.0, 20.0, 40.0]"


def test_a_kernel_that_only_asked_for_cuda(own_kernel: Kernel) -> None:
    """Which spoils fork, and torch.cuda.is_initialized() does not tell; nor is it told of a backward on the CPU."""
    works = "%%spawn 1\nimport torch\ntorch.ones(3, device=device).sum().item(), str(device)"
    ok(own_kernel.execute("import torch\ntorch.ones(1, requires_grad=True).sum().backward()"))
    reply = own_kernel.execute("%%spawn 1 -m fork\nrank")
    assert reply.ename == "StartError" and "fork cannot work here" in reply.evalue, f"after a backward: {reply}"
    assert run(own_kernel, works).result == "[0] (3.0, 'cuda:0')"
    assert own_kernel.value("torch.cuda.is_available()") is True
    reply = own_kernel.execute("%%spawn 1 -m fork\nrank")
    assert reply.ename == "StartError" and "CUDA was used or asked for in this kernel" in reply.evalue, str(reply)
    assert run(own_kernel, works).result == "[0] (3.0, 'cuda:0')"


# ---------------------------------------------------------------- the view


def device_column(table: str) -> list[str]:
    """What the text of a table says of each rank's device memory; nothing if it has no such column."""
    lines = table.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("rank ") and (heading := re.search(r"memory  +device(?=  )", line)):
            rows = [row for row in lines[number + 1 :] if re.match(r" *\d+  ", row)]
            return [" ".join(row[: heading.end()].split()[-2:]) for row in rows]
    return []


def test_the_view_shows_device_memory(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = kernel.submit(
        f"%%spawn 1\nimport os, time, torch\nheld = torch.zeros(50_000_000, device=device)\nprint('held')\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.05)"
    )
    cell.until("held", timeout=SLOW)
    try:
        cell.read_until(lambda: device_column(cell.reply.table["text/plain"]) == ["200 MB"], "the view says 200 MB", 20)
        assert "200 MB" in cell.reply.table["text/html"]
    finally:
        go.touch()
    ok(cell.wait())


def test_locals_tell_of_cuda_tensors(kernel: Kernel) -> None:
    cell = "%%spawn 1 --locals\nimport torch\nx = torch.arange(4.0, device=device)\nx.reshape(3)"
    reply = kernel.execute(cell, timeout=SLOW)
    assert reply.ename == "RankRaisedError", str(reply)
    assert "x = Tensor 4 float32 cuda:0: min 0, mean 1.5, max 3" in reply.traceback, reply.traceback


# ---------------------------------------------------------------- out of memory

TOO_MUCH = "torch.empty(1 << 45, dtype=torch.uint8, device=device)"


def out_of_memory(reply: Reply, line: int) -> None:
    """Is this the cell's error?"""
    first = reply.traceback.partition("\n")[0]
    assert reply.ename == "RankRaisedError", str(reply)
    assert re.fullmatch(rf"RankRaisedError: rank 1 of 2: OutOfMemoryError: .*memory.* \(line {line}\)", first), first
    assert re.search(rf"-+> {line} .*torch\.empty", reply.traceback), reply.traceback


def test_out_of_memory_is_the_cells_error(kernel: Kernel) -> None:
    cell = f"""%%spawn 2
import time, torch
if rank == 0:
    time.sleep(600)
try:
    {TOO_MUCH}
except torch.cuda.OutOfMemoryError:
    print('it is of that class')
big = {TOO_MUCH}"""
    reply = kernel.execute(cell, timeout=SLOW)
    out_of_memory(reply, 9)
    assert "it is of that class" in reply.of(1), str(reply)
    kernel.assert_no_rank(5.0)
    cell = "%%spawn 2\nimport torch\ntorch.ones(2, device=device).sum().item()"
    assert run(kernel, cell).result == "[0-1] 2.0", "the next run has the GPU"


# ---------------------------------------------------------------- ranks that stay


def kept_pids(kernel: Kernel) -> list[int]:
    return [int(pid) for pid in re.findall(r"^ +\d+  \w+ +(\d+) ", ok(kernel.execute("%ranks")).text(), re.MULTILINE)]


@pytest.fixture
def kept(kernel: Kernel) -> Iterator[Kernel]:
    """Two ranks that stay, with 200 MB each on the GPU."""
    cell = """%%spawn 2 --keep -b gloo
import torch, torch.distributed as dist
held = torch.full((50_000_000,), rank + 1.0, device=device)
def total():
    part = held[:2].clone()
    dist.all_reduce(part)
    return part.tolist()"""
    run(kernel, cell)
    yield kernel
    kernel.execute("%ranks stop")
    kernel.assert_no_rank(5.0)


def test_kept_ranks_keep_their_cuda_tensors(kept: Kernel) -> None:
    message = ok(kept.execute("%ranks")).text()
    assert message.count("200 MB, GPU 0") == 2, message
    assert run(kept, "%%ranks\nstr(held.device), total()").result == "[0-1] ('cuda:0', [3.0, 3.0])"
    run(kept, "%%ranks 1\nheld += 1")
    assert run(kept, "%%ranks\nheld[-1].item(), total()").result == "[0] (1.0, [4.0, 4.0])\n[1] (3.0, [4.0, 4.0])"


def test_stop_frees_kept_ranks_in_a_loop_of_kernels(kept: Kernel) -> None:
    before = kept_pids(kept)
    for _ in range(2):
        cell = kept.submit(f"%%ranks{AT_WORK.format(go='/nowhere')}".replace("held =", "more ="))
        pids_of(cell, 2)
        pressed = time.monotonic()
        kept.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        assert time.monotonic() - pressed < 10
        assert run(kept, "%%ranks\ntotal()").result == "[0-1] [3.0, 3.0]", "tensors and the group are usable"
    assert kept_pids(kept) == before


def test_out_of_memory_leaves_kept_ranks(kept: Kernel) -> None:
    before = kept_pids(kept)
    out_of_memory(kept.execute(f"%%ranks\nif rank == 1:\n    big = {TOO_MUCH}\nrank", timeout=SLOW), 3)
    reply = run(kept, "%%ranks\nheld.max().item(), total()")
    assert reply.result == "[0] (1.0, [3.0, 3.0])\n[1] (2.0, [3.0, 3.0])", "tensors and the group are usable"
    assert kept_pids(kept) == before


def test_kept_ranks_that_stop_leave_the_gpu(kernel: Kernel, driver: Driver) -> None:
    run(kernel, f"%%spawn 2 --keep\nimport torch\nheld = torch.ones({HELD} << 20, dtype=torch.uint8, device=device)")
    pids = kept_pids(kernel)
    assert len(pids) == 2
    driver.sees(pids)
    ok(kernel.execute("%ranks stop"))
    driver.forgets(pids)


# ---------------------------------------------------------------- DistributedDataParallel

TRAIN = """
import torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 8, device=device), torch.randn(64, 1, device=device)
def step():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()
losses = [step() for _ in range(3)]
str(next(model.parameters()).grad.device), losses == sorted(losses, reverse=True) and losses[2] < losses[0]"""


def test_ddp_trains_with_nccl_and_after_stop(kernel: Kernel) -> None:
    try:
        assert run(kernel, f"%%spawn 1 --keep -b nccl{TRAIN}").result == "[0] ('cuda:0', True)"
        cell = kernel.submit("%%ranks\nprint('training')\nwhile True:\n    losses.append(step())")
        cell.until("training")
        kernel.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"
        reply = run(kernel, "%%ranks\nimport torch.distributed as dist\nstep() < losses[0], dist.get_backend()")
        assert reply.result == "[0] (True, 'nccl')", "the model goes on, with the new group"
    finally:
        kernel.execute("%ranks stop")
        kernel.assert_no_rank(5.0)


def test_a_fork_server_that_has_imported_everything(tmp_path: Path) -> None:
    """What training with torch needs is preloaded, none of it initialises CUDA, and forked ranks have it still."""
    preloading = {"NBSPAWN_PRELOAD_MB": "8192", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with ExecutedKernel(tmp_path, **preloading) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        run(kernel, "%%spawn 1\nimport torch\ntorch.ones(1, device=device).item()")
        for _ in range(2):  # what the run has taught comes second
            run(kernel, "from nbspawn._engine.start.forkserver import server as _s\nwhile _s.bringing_up: pass")
        assert kernel.value("{name: why for name, why in _s.report.refused.items() if 'cuda' in why.lower()}") == {}
        reply = run(kernel, f"%%spawn 2 -b gloo{TRAIN}")
        assert reply.result == "[0-1] ('cuda:0', True)"
        assert "fork server ·" in reply.table["text/plain"]
        kernel.assert_no_rank(5.0)


# ---------------------------------------------------------------- nothing is left


def usable(kernel: Kernel) -> None:
    """The next run has the GPU."""
    assert run(kernel, "%%spawn 1\nimport torch\ntorch.ones(2, device=device).sum().item()").result == "[0] 2.0"


def test_stop_leaves_nothing_on_the_gpu(kernel: Kernel, driver: Driver) -> None:
    cell = kernel.submit(f"%%spawn 2{AT_WORK.format(go='/nowhere')}")
    pids = pids_of(cell, 2)
    driver.sees(pids)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", str(reply)
    assert time.monotonic() - pressed < 10
    driver.forgets(pids)
    usable(kernel)


def test_stop_ends_a_rank_inside_a_long_kernel(kernel: Kernel, driver: Driver) -> None:
    """No KeyboardInterrupt can be raised there: the ladder's signals end it. (By itself it takes some 30 s.)"""
    cell = kernel.submit(
        "%%spawn 1 -g 1\nimport os, torch\ntorch.cuda._sleep(1)\ntorch.cuda.synchronize()\n"
        "print('pid', os.getpid())\ntorch.cuda._sleep(60 * 10**9)\ntorch.cuda.synchronize()"
    )
    pids = pids_of(cell, 1)
    driver.sees(pids)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", str(reply)
    assert time.monotonic() - pressed < 15
    driver.forgets(pids)
    usable(kernel)


def test_an_error_leaves_nothing_on_the_gpu(kernel: Kernel, driver: Driver, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = kernel.submit(f"%%spawn 2{AT_WORK.format(go=str(go))}")
    pids = pids_of(cell, 2)
    driver.sees(pids)
    go.touch()
    reply = cell.wait()
    assert reply.ename == "RankRaisedError" and "rank 1 of 2: ValueError: on purpose" in reply.evalue, str(reply)
    driver.forgets(pids)
    usable(kernel)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_kernel_leaves_nothing_on_the_gpu(own_kernel: Kernel, driver: Driver, method: str) -> None:
    cell = own_kernel.submit(f"%%spawn 2 -m {method}{AT_WORK.format(go='/nowhere')}")
    pids = pids_of(cell, 2)
    driver.sees(pids)
    own_kernel.kill()
    driver.forgets(pids)
