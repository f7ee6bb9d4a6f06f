"""``--on slurm`` with a real Slurm, on hosts that are namespaces of this machine (support/slurm.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import slurm
from kernels import Kernel, ok, wait_until
from slurm import Slurm

TRAINING = Path(__file__).parents[1] / "programs" / "digits.py"
BEGUN = "import time\nprint('begun')\ntime.sleep(600)"


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Where there can be no hosts these tests are skipped, but not by root on CI, where that would go unnoticed."""
    reason = slurm.missing()
    if reason and "CI" in os.environ and os.geteuid() == 0:
        pytest.fail(reason)
    elif reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with Slurm(2) as cluster:
        yield cluster


@pytest.fixture
def job(cluster: Slurm) -> Iterator[str]:
    """One that holds all nodes."""
    job = cluster.allocate("--nodes=2", "--cpus-per-task=2")
    yield job
    cluster.end(job)


@pytest.fixture
def outside(kernel: Kernel, cluster: Slurm) -> Iterator[Kernel]:
    """A kernel on a login node."""
    ok(kernel.execute(f"import os\nos.environ.update({cluster.environment!r})"))
    yield kernel
    ok(kernel.execute("%ranks release"))


@pytest.fixture
def inside(outside: Kernel, job: str) -> Iterator[Kernel]:
    """A kernel that runs in a step of one task with one CPU."""
    own = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "1", "SRUN_CPUS_PER_TASK": "1"}
    own |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_STEP_ID": "0"}
    ok(outside.execute(f"os.environ.update({own!r})"))
    yield outside
    ok(outside.execute(f"%ranks release\nfor name in {list(own)!r}: del os.environ[name]"))


def test_a_notebook_in_an_allocation_uses_its_nodes(inside: Kernel, cluster: Slurm) -> None:
    cell = "import os, socket, torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\n"
    cell += "int(ones), socket.gethostname(), os.environ['MASTER_ADDR'], len(os.sched_getaffinity(0))"
    first, both = cluster.address_of(1), min(2, os.cpu_count() or 2)
    for options in ("4", "--nproc-per-node 2"):
        reply = ok(inside.execute(f"%%spawn {options} --on slurm -b gloo\n{cell}"))
        assert reply.result == f"[0-1] (4, 'host1', '{first}', {both})\n[2-3] (4, 'host2', '{first}', {both})"
    cell = "import torch.distributed as dist\nif rank == 3: {}['hieght']\ndist.barrier()"
    reply = inside.execute(f"%%spawn 4 --on slurm -b gloo\n{cell}")
    assert reply.evalue.startswith("rank 3 of 4 (host2): "), reply


@pytest.mark.extended
def test_the_same_losses_as_under_torchrun(outside: Kernel, cluster: Slurm, job: str) -> None:
    """To the last digit, on as many hosts."""
    training = TRAINING.read_text()
    lines = cluster.torchrun(training)
    reply = ok(outside.execute(f"%%spawn 4 --on slurm:{job} --threads 1\n{training}"))
    ours = [line for rank in range(4) for line in reply.of(rank) if line.startswith("rank ")]
    assert len(lines) == 28 and sorted(ours) == sorted(lines)


def test_kept_ranks_of_a_job_that_is_held(outside: Kernel, job: str) -> None:
    ok(outside.execute(f"%%spawn 2 --on slurm:{job} --nnodes 1 -b gloo --keep\nmine = rank"))
    cell = outside.submit(f"%%ranks\n{BEGUN}")
    cell.until_ranks("begun", range(2))
    outside.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert ok(outside.execute("%%ranks\nmine")).result == "[0] 0\n[1] 1"
    ok(outside.execute("%ranks stop"))


@pytest.mark.parametrize(
    ("on", "why"),
    [
        ("slurm", "this notebook does not run in a Slurm allocation. Start Jupyter in one, or hold one with `salloc"),
        ("slurm:99999", "Slurm's squeue says: slurm_load_jobs error: Invalid job id specified"),
        ("slurm:mine", "'mine' is no number of a Slurm job: --on slurm:JOB"),
        ("slurm:{job} --nnodes 3", "Slurm's job {job} has 2 nodes, not 3"),
    ],
)
def test_what_cannot_be_is_one_sentence(outside: Kernel, job: str, on: str, why: str) -> None:
    reply = outside.execute(f"%%spawn 4 --on {on.format(job=job)}\nrank")
    assert reply.evalue.startswith(why.format(job=job)), reply


def test_an_array_and_what_it_is_not(outside: Kernel, cluster: Slurm) -> None:
    array = cluster.submit("--array=1-2", "--nodes=1")
    ok(outside.execute("os.environ['SQUEUE_USERS'] = 'nobody'"))
    for job in (f"{array}_1", array):  # the array's number is also the last task's
        wait_until(lambda job=job: "RUNNING" in cluster.run_slurm("squeue", f"--jobs={job}", "--format=%T"), "it runs")
        assert ok(outside.execute(f"%%spawn 2 --on slurm:{job}\nrank")).result == "[0] 0\n[1] 1"
        cluster.end(f"{array}_1")
    ok(outside.execute("%ranks release\ndel os.environ['SQUEUE_USERS']"))
    cluster.end(array)
    mixed = cluster.submit("--nodes=1", ":", "--nodes=1")
    reply = outside.execute(f"%%spawn 2 --on slurm:{mixed}\nrank")
    assert reply.evalue.startswith(f"Slurm's job {mixed} is a heterogeneous one"), reply
    cluster.end(mixed)


def test_a_directory_that_nodes_do_not_have(outside: Kernel, job: str) -> None:
    here = f"/dev/shm/nbt-{os.getpid()}"  # each host has a /dev/shm of its own
    ok(outside.execute(f"before = os.getcwd()\nos.mkdir('{here}')\nos.chdir('{here}')"))
    reply = outside.execute(f"%%spawn 2 --on slurm:{job} --nnodes 1\nrank")
    ok(outside.execute(f"os.chdir(before)\nos.rmdir('{here}')"))
    assert f"there is no {here}, the notebook's directory: %cd to one that all nodes have" in reply.evalue, reply


def test_a_job_that_waits_is_waited_for(outside: Kernel, cluster: Slurm, job: str) -> None:
    later = cluster.submit("--nodes=2")
    cell = outside.submit(f"%%spawn 2 --on slurm:{later}\nrank")
    cell.until(f"Waiting for Slurm's job {later}, which is PENDING (Resources)")
    outside.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    cell = outside.submit(f"%%spawn 2 --on slurm:{later}\nrank")
    cell.until("which is PENDING (Resources)")
    cluster.end(job)
    assert cell.wait().result == "[0] 0\n[1] 1"
    ok(outside.execute("%ranks release"))
    cluster.end(later)
    reply = outside.execute(f"%%spawn 2 --on slurm:{later}\nrank")
    assert reply.evalue.startswith(f"Slurm's job {later} is CANCELLED, not RUNNING"), reply


def agents(cluster: Slurm, host: int) -> list[psutil.Process]:
    """Of nbspawn's processes there, the agent first."""
    found = []
    for process in psutil.Process(cluster.pid(host)).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and "nbspawn" in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: "nbspawn._agent" not in process.cmdline())


def test_an_end_is_told_in_slurms_words_and_leaves_nothing(outside: Kernel, cluster: Slurm) -> None:
    """The last one switches a host off."""

    def end(what: Callable[[str], object], why: str) -> None:
        job = cluster.allocate("--nodes=2", "--cpus-per-task=2")
        cell = outside.submit(f"%%spawn 4 --on slurm:{job}\n{BEGUN}")
        cell.until_ranks("begun", range(4))
        what(job)
        reply = cell.wait(60)
        assert "was lost" in reply.evalue and why in reply.evalue, reply
        wait_until(lambda: not agents(cluster, 1), "nothing is left on host1")
        ok(outside.execute("%ranks release"))
        cluster.end(job)

    end(lambda job: cluster.end(job), "CANCELLED AT")
    end(lambda job: agents(cluster, 1)[0].kill(), "its agent has ended: Killed")
    end(lambda job: cluster.kill(2), "node host2 was lost")


def test_all_ends_with_the_kernel(own_kernel: Kernel, cluster: Slurm) -> None:
    ok(own_kernel.execute(f"import os\nos.environ.update({cluster.environment!r})"))
    job = cluster.allocate("--nodes=1", "--cpus-per-task=2")
    cell = own_kernel.submit(f"%%spawn 2 --on slurm:{job}\n{BEGUN}")
    cell.until_ranks("begun", range(2))
    assert agents(cluster, 1)
    own_kernel.kill()
    wait_until(lambda: not agents(cluster, 1), "nothing is left on host1")
    cluster.end(job)
