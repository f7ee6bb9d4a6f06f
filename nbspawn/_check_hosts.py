"""``python -m nbspawn --check --on WHERE``: can ranks run there, and do they meet?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nbspawn._api import spawn
from nbspawn._engine import clusters
from nbspawn._engine.cluster import agents, preparation
from nbspawn._engine.cluster.nodes import Nodes
from nbspawn._session.views import StreamView
from nbspawn.errors import SpawnError

_SECONDS = 60.0  # for ranks that do nothing but meet


@dataclass
class _Report:
    """Says what each check has found."""

    checks: int = 0
    failed: int = 0
    gpus: dict[str, int] = field(default_factory=dict)
    """How many each host has."""

    def made(self, what: str, check: Callable[[], str]) -> bool:
        """Make this check, which returns what else is to be said; returns whether it is well."""
        began = time.monotonic()
        self.checks += 1
        try:
            verdict, text = "ok", check()
        except SpawnError as failure:
            self.failed += 1
            verdict, text = "FAILED", str(failure).partition("\n\n")[0]
        print(f"{verdict:<10}{what} ({time.monotonic() - began:.1f} s)")
        print("".join(f"{'':10}{line}\n" for line in text.splitlines()), end="", flush=True)
        return verdict == "ok"


def hosts(on: str) -> int:
    """Print the report about the cluster that ``on`` names; returns the exit code."""
    report = _Report()
    try:
        module = clusters.named(on).module
        names = module.singly(on)
        count = len(names) or module.found(on)[1]
    except KeyError:
        print(f"{on} is no place for ranks: use {clusters.usage()}")
        return 1
    except SpawnError as failure:
        print(failure)
        return 1
    alone = [report.made(name, partial(_described, report, name, 1)) for name in names]
    if all(alone):
        if not names:
            alone = [report.made(f"{count} nodes", partial(_described, report, on, count))]
        if count > 1 and all(alone):
            report.made("Who reaches whom", partial(_reach, on, count))
            report.made("An all_reduce of all, by gloo", partial(_meet, on, count, "gloo"))
            if all(report.gpus.values()):
                report.made("The same by nccl", partial(_meet, on, count, "nccl"))
    agents.release()
    print(f"{report.failed} of {report.checks} checks have failed." if report.failed else "All is well.")
    return int(report.failed > 0)


def _described(report: _Report, on: str, count: int) -> str:
    """What there is where a rank runs on each of so many nodes."""
    lines = []
    for host, description, gpus in _run(_node, on, count, None):
        lines.append(f"{host}: {description}")
        report.gpus[host] = gpus
    return "\n".join(lines)


def _node(rank: int) -> tuple[str, str, int]:
    import os
    import platform
    import socket

    import torch

    from nbspawn._accelerators import kinds

    gpus = kinds.own().count(os.environ)
    cpus = len(os.sched_getaffinity(0))
    about = f"Python {platform.python_version()}, torch {torch.__version__}, {cpus} CPUs, {gpus} GPUs"
    return socket.gethostname(), about, gpus


def _reach(on: str, count: int) -> str:
    found = agents.connected(clusters.named(on).module.starter(on, count, count, "gloo"))
    nodes = Nodes(found, count, 0)
    try:
        failures = preparation.unreachable(nodes)
    finally:
        nodes.close()
        found.done()
    if failures:
        raise SpawnError("\n".join(failures))
    return f"Each of the {count} hosts reaches each other one, at a port that the system chooses."


def _meet(on: str, count: int, backend: str) -> str:
    sums = _run(_sum, on, count, backend)
    if sums != [float(count)] * count:
        raise SpawnError(f"It returned {sums!r}.")
    return ""


def _sum(rank: int) -> float:
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    return float(ones)


def _run(fn: Callable[[int], Any], on: str, count: int, backend: str | None) -> list[Any]:
    view = StreamView(lambda text: None)
    return list(spawn(fn, nprocs=count, on=on, nnodes=count, backend=backend, timeout=_SECONDS, view=view))
