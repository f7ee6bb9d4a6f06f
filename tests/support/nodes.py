"""Agents that are processes of this machine, each a node of its own, and ranks on them, as on a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from nbspawn._engine.cluster.hosts import HostRanks
from nbspawn._engine.jobs import CellJob, FunctionJob
from nbspawn._engine.options import LaunchOptions
from nbspawn._process import traced
from nbspawn._protocol.messages import RunCell
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import StreamView


class Processes:
    """``nodes`` of them, at the loopback interface. ``command`` runs a Python program, by default in this interpreter;
    ``commands`` are those of single nodes."""

    address = "127.0.0.1"
    needs_modules = False
    news_seconds = 0.0

    def __init__(
        self,
        nodes: int,
        command: Sequence[str] = (sys.executable,),
        commands: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.nodes = nodes
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.folders: dict[int, str] = {}
        self._commands = dict.fromkeys(range(nodes), command) | dict(commands)

    def name(self, node: int) -> str:
        return f"node {node}"

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """They are here."""

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> None:
        command = [*self._commands[node], "-m", "nbspawn._agent", *arguments]
        # As if the nodes shared a file system, except for their temp directories.
        if node not in self.folders:  # an agent may be started anew
            self.folders[node] = tempfile.mkdtemp(prefix="nbn-")
        paths = os.pathsep.join(filter(None, sys.path))
        env = {**os.environ, "PYTHONPATH": paths, "TMPDIR": self.folders[node]}
        with traced.not_in_children():
            self.agents[node] = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=env)
        stdin = self.agents[node].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            print(token, file=stdin, flush=True)

    def failures(self) -> dict[int, str]:
        codes = {node: agent.poll() for node, agent in self.agents.items()}
        return {node: f"its process ended with exit code {code}" for node, code in codes.items() if code is not None}

    def close(self) -> None:
        for agent in self.agents.values():
            assert agent.stdin is not None
            with suppress(BrokenPipeError):
                agent.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(1)
            agent.kill()  # one that was stopped
            agent.wait()
        for folder in self.folders.values():
            shutil.rmtree(folder)
        self.agents.clear()
        self.folders.clear()


class Equal(Processes):
    """Equal to others with as many nodes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and other.nodes == self.nodes

    def __hash__(self) -> int:
        return self.nodes


def count(where: str, asked: int | None) -> int:
    """This module as a kind of cluster (_engine/clusters.py)."""
    return asked or 1


def starter(where: str, nprocs: int, nodes: int, backend: str | None) -> Equal:
    """The other of its functions."""
    return Equal(nodes)


def call(nodes: Processes, fn: Any, *args: Any, nprocs: int = 4, **options: Any) -> list[Any]:
    """What ``fn(rank, *args)`` returns in ranks there."""
    return list(Pool(LaunchOptions(nprocs=nprocs, on=nodes, **options)).run(FunctionJob(fn, args)))


class Kept:
    """Ranks that stay, on these nodes."""

    def __init__(self, nodes: Processes, nprocs: int = 4, **options: Any) -> None:
        self.pool = Pool(
            LaunchOptions(nprocs=nprocs, on=nodes, keep=True, **options), CommandOptions(view=StreamView())
        )

    def __enter__(self) -> Kept:
        self.pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def execute(self, code: str, only: list[int] | None = None, **variables: Any) -> list[Any]:
        command = RunCell(textwrap.dedent(code), f"<test {next(self.pool.numbers)}>")
        return list(self.pool.run(CellJob(command, variables, frozenset(variables)), None, only))

    @property
    def engine(self) -> HostRanks:
        found: Any = self.pool._started().engine
        return found
