"""In each rank the pools of BLAS, OpenMP and torch have the sizes of a new process that has the rank's environment."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys

import pytest
from kernels import Kernel, ok
from methods import EVERY_METHOD

SIZES = """
import os, threadpoolctl, torch, numpy
def sizes():
    pools = {one["internal_api"]: one["num_threads"] for one in threadpoolctl.threadpool_info()}
    return {**pools, "torch": torch.get_num_threads(), "between": torch.get_num_interop_threads()}
"""


def of_new_process(environment: dict[str, str]) -> dict[str, int]:
    return _of_new_process(tuple((name, value) for name, value in environment.items() if name.endswith("_THREADS")))


@functools.cache
def _of_new_process(limits: tuple[tuple[str, str], ...]) -> dict[str, int]:
    without = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    command = [sys.executable, "-c", f"{SIZES}\nprint(sizes())"]
    printed = subprocess.check_output(command, env=without | dict(limits), text=True)
    found: dict[str, int] = ast.literal_eval(printed)
    return found


@pytest.mark.parametrize("method", EVERY_METHOD)
@pytest.mark.parametrize(
    ("nprocs", "options"),
    [
        (1, "--env OPENBLAS_NUM_THREADS=1"),
        (2, ""),
        pytest.param(1, "", marks=pytest.mark.extended),
        pytest.param(1, "--env OMP_NUM_THREADS=1", marks=pytest.mark.extended),
        pytest.param(1, "--env OMP_NUM_THREADS=5", marks=pytest.mark.extended),
        pytest.param(1, "--env MKL_NUM_THREADS=1", marks=pytest.mark.extended),
        pytest.param(1, "--threads 1", marks=pytest.mark.extended),
        pytest.param(2, "--env OPENBLAS_NUM_THREADS=2 --env OMP_NUM_THREADS=1", marks=pytest.mark.extended),
    ],
)
def test_sizes(kernel: Kernel, method: str, nprocs: int, options: str) -> None:
    ok(kernel.execute(SIZES))
    cell = f"%%spawn {nprocs} -m {method} {options} -o found\nsizes(), dict(os.environ)"
    ok(kernel.execute(cell))
    for rank in range(nprocs):
        sizes, environment = kernel.value(f"found[{rank}]")
        assert sizes == of_new_process(environment)


@pytest.mark.extended
def test_sizes_by_the_notebooks_environment(kernel: Kernel) -> None:
    ok(kernel.execute(f"{SIZES}\nos.environ['OPENBLAS_NUM_THREADS'] = '1'"))
    try:
        for method in ("fork", "forkserver"):
            ok(kernel.execute(f"%%spawn 1 -m {method} -o found\nsizes(), dict(os.environ)"))
            sizes, environment = kernel.value("found[0]")
            assert sizes["openblas"] == 1 and sizes == of_new_process(environment)
    finally:
        ok(kernel.execute("del os.environ['OPENBLAS_NUM_THREADS']"))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_thread_of_blas_runs_before_it_is_needed(kernel: Kernel, method: str) -> None:
    """OpenBLAS's own function for its size starts one for each core in a copied process, and they keep cores busy."""
    ok(kernel.execute("import numpy, os, threading\nones = numpy.ones((400, 400))\n(ones @ ones).sum()"))
    unknown = "len(os.listdir('/proc/self/task')) - threading.active_count()"
    for threads in (1, len(os.sched_getaffinity(0))):
        cell = f"%%spawn 2 -m {method} --threads {threads} -o found\n{unknown}, float((ones @ ones).sum()), {unknown}"
        ok(kernel.execute(cell))
        needed = kernel.value("found[0][2]")
        assert kernel.value("found[0][:2]") == (0, 400.0**3) and (needed > 0) == (threads > 1)
