"""What nbspawn's own parts cost a training loop: two ranks train with a part and without it, in turns of half a second.

    python tests/benchmarks/overhead.py [--tasks parts,stacks] [--pairs N] [--often K] [--turns N] [--json PATH]

Two loops: a small MLP that each rank trains alone (forward, backward, step), and one whose gradients are averaged by
all_reduce, so that a rank that is held up holds up both. Once a second rank 0 prints a line. Two parts: the sampler,
which is a thread in the rank, and the kernel, which reads what ranks print and tell, and draws the table: in turns
without it its process is stopped (SIGSTOP). All ranks make the same number of steps with the part and without, in
alternating order, and the ratio of the two times is taken pair by pair.

On a shared machine such ratios scatter by some percent, and a part costs some tenths of one. So it works, and rank 0
prints, ``--often`` times as often as in a run that has lasted for a while (10 by default), and what that costs is
divided by ``--often``. Work that is done more often gets cheaper, as caches stay warm: the last column is what the part
uses of a processor at its usual pace; of the kernel also without the timeline, in turns with it. Of torch's flight
recorder, which nbspawn reads (_rank/report/recorder.py), runs with it and without it take turns. Each rank's main
thread stays on a processor of its own: where Linux puts gloo's threads and the main ones beside each other changes by
the second, and such a loop's speed by a third with it.

And what the question costs where ranks stand: four ranks train in the background, with all_reduce in every step, and
in every other turn of three seconds somebody asks `%ranks stacks` once a second.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import signal
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import samples
import torch
import torch.distributed as dist

from nbspawn._engine.run import gauge_reader, logs
from nbspawn._rank import main
from nbspawn._rank.report import sampler
from nbspawn._session import supervisor, views
from nbspawn._state.timeline import Timeline

RANKS = 2
TURN = 0.5  # seconds
ASKED = 4  # ranks
LOOKS = 3  # in a turn, one a second
LOOPS = {"alone": False, "together": True}
PARTS = ("sampler", "kernel")
PROCESSORS = sorted(os.sched_getaffinity(0))

_where: list[Any] = []
_spend: list[Any] = []


@contextmanager
def _remember(info: Any, channel: Any) -> Iterator[None]:
    """In the sampler's place among the features: whoever is to be sampled begins it."""
    _where[:] = info, channel
    yield


def prepare() -> None:
    """In the kernel: ranks that are forked from now on have a sampler that begins when it is told to."""
    main.FEATURES = tuple(_remember if feature is sampler.sampling else feature for feature in main.FEATURES)
    vars(sampler)["_YOUNG"] = 0.0  # as in a run that has lasted for a while


def timeline(on: bool) -> None:
    """In the kernel: record what ranks do when, or do not."""
    if not _spend:
        _spend.append(Timeline.spend)
    Timeline.spend = _spend[0] if on else lambda *_: None  # type: ignore[method-assign]


def hasten(often: int) -> None:
    """In the kernel: whatever is done so many times a second, there and in the ranks, is done more often."""
    for module, names in (
        (sampler, ("_INTERVAL", "_SPACING", "_LATEST", "_MEASURE")),
        (logs, ("_INTERVAL", "_LONG_INTERVAL")),
        (gauge_reader, ("_INTERVAL",)),
        (supervisor, ("_TICK",)),
    ):
        vars(module).update({name: vars(module)[name] / often for name in names})
    views.Pace._SOON, views.Pace._CLOCK = views.Pace._SOON / often, views.Pace._CLOCK / often


def _training(rank: int, together: bool, pause: float) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(256, 64), torch.randint(10, (256,))
    printed = time.monotonic()

    def step() -> None:
        nonlocal printed
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if together:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 0 and time.monotonic() >= printed + pause:
            printed = time.monotonic()
            print(f"loss {loss.item():.6f}", flush=True)

    return step


@contextmanager
def _sampled() -> Iterator[threading.Thread]:
    with sampler.sampling(*_where):
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "nbspawn-sampler")
        os.sched_setaffinity(thread.native_id or 0, PROCESSORS)  # it has inherited the main thread's
        yield thread


@contextmanager
def _kernel_stopped(rank: int) -> Iterator[None]:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    try:
        yield
    finally:
        if rank == 0:
            os.kill(os.getppid(), signal.SIGCONT)


def _begin(rank: int, loop: str, often: int) -> tuple[Callable[[], None], int]:
    """A step, and how many of them make a turn."""
    step = _training(rank, LOOPS[loop], 1 / often)
    steps = torch.tensor([max(1, int(TURN / _time(step, 200) * 200))])
    dist.broadcast(steps, 0)
    os.sched_setaffinity(0, {PROCESSORS[rank % len(PROCESSORS)]})  # only now: gloo's threads would inherit it
    return step, int(steps.item())


def _time(step: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


def compared(rank: int, loop: str, part: str, pairs: int, often: int) -> list[float]:
    """In a rank: for each pair of turns the time with the part over the time without."""
    step, count = _begin(rank, loop, often)
    ratios = []
    for pair in range(pairs):
        took = {}
        for on in (False, True) if pair % 2 else (True, False):
            sampled = _sampled() if on or part != "sampler" else nullcontext()
            stopped = nullcontext() if on or part != "kernel" else _kernel_stopped(rank)
            with sampled, stopped:
                dist.barrier()
                took[on] = _time(step, count)
                dist.barrier()
        ratios.append(took[True] / took[False])
    return ratios


def shares(rank: int, loop: str) -> dict[str, float]:
    """In a rank: what each part uses of a processor, over twenty turns at its usual pace."""
    step, count = _begin(rank, loop, 1)
    with _sampled() as thread:
        _time(step, 4 * count)  # no front end has shown buttons: they go in these seconds
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before = time.clock_gettime(clock), _used(os.getppid())
        took = _time(step, 20 * count)
        after = time.clock_gettime(clock), _used(os.getppid())
    return {part: (b - a) / took for part, a, b in zip(PARTS, before, after, strict=True)}


def pace(rank: int) -> float:
    """In a rank: seconds of a step of the loop with all_reduce, the median of ten turns."""
    step, count = _begin(rank, "together", 1)
    return statistics.median(_time(step, count) / count for _ in range(10))


def count(rank: int, path: str) -> None:
    """In a rank: train until it is interrupted. Rank 0 counts the steps in that file."""
    step = _training(rank, True, 1.0)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as counted:
        for number in itertools.count(1):
            step()
            if rank == 0:
                counted[:] = struct.pack("q", number)


def _counted(path: Path) -> int:
    return int(struct.unpack("q", path.read_bytes())[0])


def _used(pid: int) -> float:
    """Seconds of processors that a process's threads have used; nanoseconds are counted."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _stacks(kernel: Any, record: samples.Record, given: argparse.Namespace, path: Path) -> None:
    path.write_bytes(bytes(8))
    with record.measuring("stacks", ranks=ASKED, looks=LOOKS) as task:
        task.quantity("look", "%ranks stacks, from the request to the reply")
        task.quantity("step", "a step of the loop", "s", "without")
        cell = f"%%spawn {ASKED} -m fork -b gloo --threads 1 --background\noverhead.count(rank, {os.fspath(path)!r})"
        kernel.run(cell)
        while _counted(path) < 100:
            time.sleep(0.1)
        for turn in range(2 * given.turns):
            before, began = _counted(path), time.monotonic()
            for look in range(LOOKS):
                if turn % 2:
                    task.add("look", "looks", kernel.run("%ranks stacks").seconds)
                time.sleep(max(0.0, began + look + 1 - time.monotonic()))
            step = (time.monotonic() - began) / (_counted(path) - before)
            task.add("step", "with looks" if turn % 2 else "without", step)
        kernel.run("%ranks stop")


def run() -> None:
    """Measure and print."""
    from kernel import Kernel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", metavar="A,B", default="parts,stacks", help="parts, stacks or both")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--often", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6, help="of ten seconds, with the timeline and without")
    samples.add_option(parser)
    given = parser.parse_args()
    record = samples.Record("overhead", given.json)
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(str(Path(__file__).parent))
        try:
            kernel.run("%load_ext nbspawn\nimport overhead")
            if "stacks" in given.tasks:
                _stacks(kernel, record, given, Path(folder, "steps"))
            if "parts" in given.tasks:
                _parts(kernel, record, given)
        finally:
            kernel.close()


def _parts(kernel: Any, record: samples.Record, given: argparse.Namespace) -> None:
    kernel.run("overhead.prepare()")

    def message(call: str) -> Any:
        cell = f"%%spawn {RANKS} -m fork -b gloo --threads 1 -o TOLD\noverhead.{call}"
        return kernel.run(cell, "list(TOLD)").value

    for loop in LOOPS:
        with record.measuring(f"timeline, {loop}", ranks=RANKS, seconds=10) as task:
            task.quantity("kernel", "processor time of the kernel, share of a core", "cores", "without")
            for turn in range(given.turns):
                kernel.run(f"overhead.timeline({turn % 2 == 0})")
                series = "without" if turn % 2 else "with the timeline"
                task.add("kernel", series, message(f"shares(rank, {loop!r})")[0]["kernel"])
    kernel.run("overhead.timeline(True)")
    with record.measuring("flight recorder", ranks=RANKS) as task:
        task.quantity("step", "a step of the loop with all_reduce", "s", "without")
        for turn in range(2 * given.turns):
            size = 500 * (turn % 2)
            cell = f"%%spawn {RANKS} -m fork -b gloo --threads 1 --env TORCH_FR_BUFFER_SIZE={size} -o TOLD\n"
            seconds = kernel.run(f"{cell}overhead.pace(rank)", "TOLD[0]").value
            task.add("step", "with torch's flight recorder" if size else "without", seconds)
    usual = {loop: message(f"shares(rank, {loop!r})") for loop in LOOPS}
    kernel.run(f"overhead.hasten({given.often})")
    for loop in LOOPS:
        with record.measuring(f"parts, {loop}", ranks=RANKS, often=given.often) as task:
            task.quantity("slower", f"time with the part, {given.often} times as often, to that without", "x")
            task.quantity("share", "what the part uses at its usual pace, share of a core", "cores")
            for part in PARTS:
                for ratios in message(f"compared(rank, {loop!r}, {part!r}, {given.pairs}, {given.often})"):
                    for ratio in ratios:
                        task.add("slower", part, ratio)
                for rank in usual[loop]:
                    task.add("share", part, rank[part])
        _tell(task)


def _tell(task: samples.Task) -> None:
    for part in PARTS:
        ratios = task.quantities["slower"].values(part)
        if ratios:
            slower, error = samples.cost(ratios, task.settings["often"], RANKS)
            print(f"  {part:7} {slower:+.3%} (standard error {error:.3%}) at its usual pace", flush=True)


if __name__ == "__main__":
    run()
