"""``python -m nbspawn``: what works on this machine, as plain text for a bug report.

What is cheap is tested: two ranks are started with each start method. CUDA is initialised in a separate process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbspawn

_PACKAGES = (
    *("ipython", "ipykernel", "ipywidgets", "jupyter_client", "cloudpickle"),
    *("debugpy", "py-spy", "torch_xla", "torch_tpu"),
)
_LIMITS = (("open files", resource.RLIMIT_NOFILE), ("processes", resource.RLIMIT_NPROC))
_MIB, _GIB = 1 << 20, 1 << 30
_WAIT = 60.0  # seconds: a start that takes longer is reported as a failure
_NAMES = "from torch import {0} as it; print(*map(it.get_device_name, range(it.device_count())), sep='\\n')"

Row = tuple[str, str]


def report(every_method: bool = False, on: str = "") -> str:
    """The complete report. ``every_method`` also starts ranks with spawn, which takes some seconds; ``on`` names a
    cluster, as for ``--on``, on each of whose nodes a rank is started, too."""
    sections = {
        "Versions": versions(),
        "Machine": machine(),
        "Start methods": start_methods(every_method),
        "Devices": devices(),
    }
    if on:
        sections[f"Cluster ({on})"] = cluster(on)
    return "\n\n".join(f"{title}\n{_table(rows)}" for title, rows in sections.items())


def versions() -> list[Row]:
    """The versions of nbspawn and of the packages that it uses."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return [
        ("nbspawn", nbspawn.__version__),
        ("python", platform.python_version()),
        ("platform", platform.platform()),
        ("torch", f"{torch.__version__} ({build} build)"),
        *((name, _version(name)) for name in _PACKAGES),
    ]


def machine() -> list[Row]:
    """The resources that ranks share, and the system's features that nbspawn uses."""
    from nbspawn._engine.launch import cores

    return [
        ("cores", f"{cores()} of {os.cpu_count()} usable"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB{_container_limit()}"),
        ("/dev/shm", _shared_memory()),
        *((name, f"at most {resource.getrlimit(kind)[0]} (-1: no limit)") for name, kind in _LIMITS),
        ("own host name", _host_name()),
        ("memfd", "yes" if hasattr(os, "memfd_create") else "no: variables are sent in a temporary file"),
        ("lifeline", "F_SETSIG" if hasattr(signal, "SIGRTMIN") else "a thread in each rank"),
    ]


def start_methods(every_method: bool) -> list[Row]:
    """Whether each start method works, and how long two ranks take from the call to the results."""
    from nbspawn._engine.start.fork_safety import unsafe_to_fork
    from nbspawn._engine.start.forkserver import server

    hazards = unsafe_to_fork() if hasattr(os, "fork") else ["this system has no fork"]
    rows = [("fork is safe here", "no: " + "; and ".join(hazards) if hazards else "yes: nothing found against it")]
    if not hazards:
        rows.append(("2 ranks, fork", _tried(lambda: _two_ranks("fork"))))
    rows.append(("fork server, start", _tried(server.get)))
    rows.append(("2 ranks, forkserver", _tried(lambda: _two_ranks("forkserver"))))
    rows += _preloaded()
    if every_method:
        rows.append(("2 ranks, spawn", _tried(lambda: _two_ranks("spawn"))))
    return rows


def _preloaded() -> list[Row]:
    """What the fork server imports in notebooks of this environment in addition to torch, and what it refuses."""
    from nbspawn._engine.start import learned
    from nbspawn._engine.start.forkserver import memory_limit, server

    server.learned.load()
    found = server.learned
    refused = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
    return [
        (
            "its memory",
            f"{server.report.memory / _MIB:.0f} MiB with torch alone; imports up to {memory_limit() / _MIB:.0f}",
        ),
        ("remembered imports", f"{len(found.tried)} in {learned.path() or 'memory: there is no home directory'}"),
        ("refused imports", refused or "none"),
    ]


def devices() -> list[Row]:
    """The GPUs and TPUs that ranks would see. CUDA is initialised only in a child: here it would make fork unsafe."""
    from nbspawn._accelerators import kinds, tpu

    own = kinds.own()
    found = own.count(os.environ)
    rows = [("GPUs", str(found)), ("TPU chips", str(tpu.chips()))]
    if other := kinds.unserved():
        rows.append((f"{other} devices", "not served: ranks compute on the CPU"))
    if found:
        code = _NAMES.format(own.type)
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_WAIT)
        names = child.stdout.splitlines() or child.stderr.splitlines()[-1:]
        rows += [(f"{own.type}:{number}", name) for number, name in enumerate(names)]
    return rows


def cluster(on: str) -> list[Row]:
    """The cluster's nodes, and whether ranks on all of them meet."""
    from nbspawn._engine import clusters
    from nbspawn._engine.cluster import agents
    from nbspawn.errors import SpawnError

    try:
        there, count = clusters.named(on).module.found(on)
    except KeyError:
        return [(on, f"is no cluster: use {clusters.usage()}")]
    except SpawnError as refusal:
        return [("connection", f"fails: {refusal}")]
    rows: list[Row] = there
    if count:
        rows.append((f"a rank on each of {count} nodes", _tried(lambda: _meet(on, count))))
        rows.append(("the same again", _tried(lambda: _meet(on, count))))
        agents.release()
    return rows


def _meet(on: str, nodes: int) -> None:
    sums = nbspawn.spawn(_sum, nprocs=nodes, on=on, nnodes=nodes, backend="gloo", timeout=_WAIT)
    if sums != [float(nodes)] * nodes:
        raise RuntimeError(f"their all_reduce returned {sums!r}")


def _sum(rank: int) -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def _table(rows: list[Row]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _container_limit() -> str:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return ""
    return f", of which this container may use {int(limit) / _GIB:.1f} GiB" if limit.isdecimal() else ""


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except FileNotFoundError:
        return "none"
    return f"{usage.total / _GIB:.1f} GiB, {usage.free / _GIB:.1f} free"


def _host_name() -> str:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        return f"does not resolve ({error}); nbspawn does not need it"
    return "resolves"


def _two_ranks(method: str) -> None:
    values = nbspawn.spawn(_own_rank, nprocs=2, start_method=method, timeout=_WAIT)
    if values != [0, 1]:
        raise RuntimeError(f"two ranks returned {values!r}")


def _own_rank(rank: int) -> int:
    return rank


def _tried(action: Callable[[], object]) -> str:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    return f"works ({time.monotonic() - began:.3f} s)"


def main() -> None:
    """Print the report."""
    from nbspawn._engine import clusters

    parser = argparse.ArgumentParser(prog="python -m nbspawn", description="What works on this machine.")
    parser.add_argument("--all", action="store_true", help="also start ranks with spawn, which takes some seconds")
    where = f"also start ranks on other machines: {clusters.usage()}"
    parser.add_argument("--on", metavar="WHERE", default="", help=where)
    check = "check for a minute or two how ranks work on the GPUs; with --on: the machines there, and whether they meet"
    parser.add_argument("--check", nargs="?", choices=["gpu"], const="gpu", help=check)
    given = parser.parse_args()
    if given.check and given.on:
        from nbspawn import _check_hosts

        sys.exit(_check_hosts.hosts(given.on))
    if given.check:
        from nbspawn import _check

        sys.exit(_check.gpu())
    print(report(given.all, given.on))


if __name__ == "__main__":
    main()
