"""What a user waits for, beside what is done without nbspawn in the same round, and beside another commit.

    python tests/benchmarks/waits.py [--tasks "first cell,start,kept"] [--beside COMMIT] [--json PATH]
    python tests/benchmarks/waits.py --check

The first training cell of a new kernel, beside one import of what it needs; an empty cell on 4 new ranks, beside bare
torch's fork; a cell in ranks that live, beside an empty cell of the notebook. All take turns. ``--beside`` measures
that commit, too. ``--check`` says what has become slower than in the commit that recorded results/waits.json, which it
measures in the same rounds: of another machine, even the ratios to what is done without nbspawn are others.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import samples
from kernel import Kernel
from tools import AUTO, FORK

HERE = Path(__file__).resolve().parent
RANKS = 4
IMPORT = "import torch, torch._dynamo"
LEARNED = ("step_transformers", "step_lightning")
"""Functions of work.py: what a kernel of the same user has run before."""
BEFORE = f"{AUTO.name}, before"
"""The series of the other commit."""
KEPT = {"pass": "pass", "a value shown": "rank"}
ROUNDS = {"first cell": 5, "start": 24, "kept": 60}

Trees = Mapping[str, Path]
"""Where the package is, by the name of its series."""
Tasks = Mapping[str, Callable[[samples.Task, Trees], None]]


def main() -> None:
    """Measure and print, or compare with what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", metavar="A,B", default=",".join(ROUNDS))
    parser.add_argument("--beside", metavar="COMMIT", help="measure that commit of this repository, too")
    parser.add_argument("--check", action="store_true", help="end with an error where something has become slower")
    samples.add_option(parser)
    given = parser.parse_args()
    chosen = {name: task for name, task in TASKS.items() if name in given.tasks.split(",")}
    if given.check:
        sys.exit(check(chosen))
    with trees(given.beside) as found:
        measure(samples.Record("waits", given.json), chosen, found, before=given.beside or "")


@contextmanager
def trees(beside: str | None) -> Iterator[Trees]:
    """This one, and that of another commit."""
    if beside is None:
        yield {AUTO.name: samples.ROOT}
        return
    command = ["git", "-C", os.fspath(samples.ROOT), "archive", beside, "nbspawn"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield {AUTO.name: samples.ROOT, BEFORE: Path(folder)}


def measure(record: samples.Record, chosen: Tasks, found: Trees, **settings: str) -> None:
    """The tasks that were chosen."""
    for name, task in chosen.items():
        with record.measuring(name, ranks=RANKS, rounds=ROUNDS[name], **settings) as figures:
            task(figures, found)


# ---------------------------------------------------------------- the tasks


def _turns(number: int, names: list[str]) -> list[str]:
    """A B C, then B C A."""
    first = number % len(names)
    return names[first:] + names[:first]


def first_cell(figures: samples.Task, found: Trees) -> None:
    """In a kernel that has torch, some time after ``%load_ext``; for a new user, and for one whose earlier kernels have
    used more."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        learned = {name: f"{folder}/{number}" for number, name in enumerate(found)}
        for name, tree in found.items():
            for fn in LEARNED:
                _first_cell(tree, fn, 0.0, learned[name], settle=True)
        for number in range(ROUNDS["first cell"]):
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", IMPORT], check=True)
            imported = time.monotonic() - began
            for key, after, known in (
                ("0 s", 0.0, False),
                ("3 s", 3.0, False),
                ("8 s", 8.0, False),
                ("3 s, learned", 3.0, True),
                ("8 s, learned", 8.0, True),
            ):
                title = f"first training cell, {after:g} s after loading{', more learned' if known else ''}"
                figures.quantity(key, title, base=IMPORT)
                figures.add(key, IMPORT, imported)
                for name in _turns(number, list(found)):
                    fresh = f"{folder}/{name} {key} {number}"
                    seconds = _first_cell(found[name], "step", after, learned[name] if known else fresh)
                    figures.add(key, name, seconds)


def _first_cell(tree: Path, fn: str, after: float, caches: str, settle: bool = False) -> float:
    """Seconds of the cell. What it has imported is remembered in ``caches``, once it has settled."""
    with ExitStack() as stack:
        kernel = Kernel(os.fspath(HERE), caches, tree)
        stack.callback(kernel.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench_"))
        kernel.run(f"import torch\n{(HERE / 'work.py').read_text()}")
        kernel.run("%load_ext nbspawn")
        time.sleep(after)
        own_group = fn == "step_lightning"
        arguments = f"rank, {folder!r}, {RANKS}" + ("" if own_group else ", 0")
        ran = kernel.run(f"%%spawn {RANKS}{'' if own_group else ' -b gloo'}\n{fn}({arguments})")
        if settle:
            _settle(kernel)
        return ran.seconds


def _settle(kernel: Kernel) -> None:
    """What runs beside a kernel, as imports of its fork server, has ended; any commit's."""
    while kernel.busy() > 0.05:
        pass


def start(figures: samples.Task, found: Trees) -> None:
    """Whole cells with nothing to do; each way has a kernel of its own."""
    figures.quantity("fork server", "an empty cell on new ranks", base=FORK.name)
    figures.quantity("fork", "the same, -m fork", base=FORK.name)
    cell = f"start_processes(start, (FOLDER,), nprocs={RANKS}, start_method='fork')"
    with ExitStack() as stack:
        bare = _ready(stack, samples.ROOT, FORK.setup)
        ours = {name: _ready(stack, tree, "%load_ext nbspawn") for name, tree in found.items()}
        ways = {FORK.name: (bare, {"fork server": cell, "fork": cell})}
        for name, kernel in ours.items():
            kernel.run(f"%%spawn {RANKS}\nstart(rank, FOLDER)")
            _settle(kernel)
            spawned = {
                "fork server": f"%%spawn {RANKS}\nstart(rank, FOLDER)",
                "fork": f"%%spawn {RANKS} -m fork\nstart(rank, FOLDER)",
            }
            ways[name] = kernel, spawned
        for number in range(-2, ROUNDS["start"]):
            for name in _turns(number, list(ways)):
                kernel, cells = ways[name]
                for key, one in cells.items():
                    seconds = kernel.run(one).seconds
                    if number >= 0:
                        figures.add(key, name, seconds)
                    time.sleep(0.1)


def _ready(stack: ExitStack, tree: Path, setup: str) -> Kernel:
    """A kernel that has torch, the functions of work.py, and a tool."""
    caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_"))
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench_"))
    kernel = Kernel(os.fspath(HERE), caches, tree)
    stack.callback(kernel.close)
    kernel.run(f"import torch\n{(HERE / 'work.py').read_text()}\nFOLDER = {folder!r}")
    kernel.run(setup)
    return kernel


def kept(figures: samples.Task, found: Trees) -> None:
    """Cells in 4 and in 16 ranks that live, and an empty cell just before."""
    with ExitStack() as stack:
        kernels = {name: _ready(stack, tree, "%load_ext nbspawn") for name, tree in found.items()}
        for kernel in kernels.values():
            for ranks in (4, 16):
                kernel.run(f"%%spawn {ranks} --keep --name of{ranks}\npass")
            _settle(kernel)
        for number in range(-5, ROUNDS["kept"]):
            for name in _turns(number, list(kernels)):
                for ranks in (4, 16):
                    for what, code in KEPT.items():
                        empty = next(iter(kernels.values())).run("pass").seconds
                        seconds = kernels[name].run(f"%%ranks @of{ranks}\n{code}").seconds
                        if number >= 0:
                            key = f"{ranks}, {what}"
                            base = figures.quantity(key, f"a cell in {ranks} kept ranks, {what}", base="an empty cell")
                            figures.add(key, base.base, empty, number)
                            figures.add(key, name, seconds, number)
                        time.sleep(0.02)


TASKS = {"first cell": first_cell, "start": start, "kept": kept}


# ---------------------------------------------------------------- the check


def check(chosen: Tasks) -> str | None:
    """What has become slower than in the commit that was recorded, in two runs."""
    recorded = samples.read(samples.RESULTS / "waits.json")
    for _ in range(2):
        record = samples.Record("waits")
        for name, task in chosen.items():
            commit = recorded[name].machine["commit"]
            with trees(commit) as found:
                measure(record, {name: task}, found, before=commit)
        lines = [line for name in chosen for line in slower(name, recorded[name], record.tasks[name])]
        chosen = {name: task for name, task in chosen.items() if any(line.startswith(name) for line in lines)}
        if not lines:
            return None
        print("\n".join(lines), file=sys.stderr)
    return "Slower than what was recorded, twice."


def slower(name: str, recorded: samples.Task, now: samples.Task) -> Iterator[str]:
    """A line for each quantity that takes a tenth longer than before in three rounds of four, or is missing."""
    for key, quantity in recorded.quantities.items():
        ratios = now.quantities[key].ratios(AUTO.name, BEFORE) if key in now.quantities else []
        if not ratios:
            yield f"{name}, {quantity.title}: not measured: {now.reason(key, AUTO.name).why}"
        elif (quartiles := samples.quartiles(ratios))[0] > 1.1:
            yield f"{name}, {quantity.title}: {quartiles[1]:.3g} times as long as in {now.settings['before']}"


if __name__ == "__main__":
    main()
