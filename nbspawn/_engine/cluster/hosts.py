"""Ranks on several machines: the local engines of their agents as one engine.

What agents report has the run's numbers of ranks and the kernel's clock already; what is asked of a node's engine, and
what it answers, has the numbers of that engine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from nbspawn._engine.cluster import preparation
from nbspawn._engine.cluster.agents import Agents
from nbspawn._engine.cluster.nodes import ANSWER_SECONDS, SOON_SECONDS, Node, Nodes
from nbspawn._engine.kernel.directories import run_directories
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.run import stacks
from nbspawn._payload.packing import Packed
from nbspawn._protocol import shared_memory
from nbspawn._protocol.agents import LOG_PART, Begin, Call, RunNext, Transfer
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.frames import Frame, Stack
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Command, Event, RunCell, RunFunction
from nbspawn._protocol.payload import NOTHING, Shared
from nbspawn._protocol.place import Place, new_run_id
from nbspawn._protocol.questions import Question, T
from nbspawn._protocol.settings import Settings
from nbspawn._results import Results
from nbspawn.errors import StartError

_START_SECONDS = 60.0
_KILL_SECONDS = 1.0  # for a node to report that its ranks, which were killed, have ended
_NAMED = 4  # nodes in one sentence


class IdleAgentLostError(StartError):
    """An agent has ended since the last run; nothing was started."""


class HostRanks:
    """The ranks of one run (``Engine`` in base.py says what each method does)."""

    def __init__(
        self,
        agents: Agents,
        command: RunCell | RunFunction,
        packed: Packed,
        options: LaunchOptions,
        notebook: Settings,
        cancelled: Callable[[], object] = bool,
    ) -> None:
        self.nprocs = int(options.nprocs)
        self._agents = agents
        self._command = command
        self._grouped = options.backend is not None
        self._stopping = False
        self._unsettled = False
        """Have ranks been stopped that have not settled yet?"""
        self._lost_at = math.inf
        """When a node is lost that has not reported the end of its ranks (CLOCK_MONOTONIC seconds)."""
        self.notes: tuple[str, ...] = ()
        """For the user, of what was sent besides."""
        self._closed = False
        self._copies: RunFiles | None = None
        self._nodes = Nodes(agents, self.nprocs, command.command_number)
        with ExitStack() as undo:
            undo.callback(self.dispose)
            self._begin(packed, options, notebook, cancelled)
            undo.pop_all()

    def _begin(
        self, packed: Packed, options: LaunchOptions, notebook: Settings, cancelled: Callable[[], object]
    ) -> None:
        if self._agents.used:
            self._nodes.ask("losses")  # one that has just ended does not answer
            if not self._agents.alive:
                raise IdleAgentLostError("an idle agent has ended")
        if self._agents.modules is not None:
            self.notes = preparation.send_modules(self._agents.modules, self._nodes, True, cancelled)
        several = len(self._agents.links) > 1
        if several and self._agents.master is None:
            self._agents.master = preparation.meeting_point(self._agents, self._nodes)
        if options.backend == "auto":
            options = replace(options, backend=preparation.backend(self._nodes, partial(_own, options)))
        addresses = tuple(node.link.address for node in self._nodes)
        run_id = new_run_id()
        for number, node in enumerate(self._nodes):
            place = Place(node.first, node.count, self.nprocs, run_id=run_id)
            if several:
                place = replace(place, node=number, addresses=addresses, master=self._agents.master)
            transfer = node.link.transfer(packed.fds, packed.sizes)
            self._nodes.send(
                node, Begin(place, _own(options, node), notebook, replace(self._command, payload=NOTHING), transfer)
            )
        self._nodes.wait(lambda: cancelled() or all(node.has_answered for node in self._nodes), _START_SECONDS)
        if cancelled():
            raise KeyboardInterrupt
        for node in self._nodes:
            if node.begun is None:
                why = node.refused.reason if node.refused else "it does not answer"
                why = self._agents.why(node.link) if node.link.lost else why
                raise StartError(f"no ranks could be started on {node.link.host}: {why}")

    # ------------------------------------------------------------ what is known

    @property
    def cell(self) -> str | None:
        return self._command.filename if isinstance(self._command, RunCell) else None

    @property
    def log_dir(self) -> str:
        places = [f"{node.link.host}:{node.begun.log_dir}" for node in self._nodes if node.begun]
        more = len(places) - _NAMED
        return ", ".join(places[:_NAMED]) + (f" and on {more} more nodes" if more > 0 else "")

    @property
    def logs_exist(self) -> bool:
        return True

    @property
    def logs_stay_until(self) -> str:
        return "`%ranks release`, or five idle minutes"

    @property
    def all_alive(self) -> bool:
        self.poll(0.0)
        return not self._nodes.ended and all(node.status.all_alive for node in self._nodes)

    @property
    def all_exited(self) -> bool:
        return all(node.status.all_exited and not node.link.awaited for node in self._nodes)

    @property
    def finished(self) -> bool:
        return self._settled and not any(node.link.awaited for node in self._nodes)

    @property
    def _settled(self) -> bool:
        """Have all ranks finished the last command, or ended? Their values may be on their way."""
        return all(map(self._has_settled, self._nodes))

    def _has_settled(self, node: Node) -> bool:
        status = node.status
        return status.all_exited or (status.finished and status.command_number == self._command.command_number)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def failures(self) -> list[Failure]:
        return [failure for node in self._nodes for failure in node.status.failures] + self._nodes.lost

    def host(self, rank: int) -> str:
        return self._nodes.of(rank).link.host

    def log_path(self, rank: int) -> str:
        node = self._nodes.of(rank)
        return node.log_paths[rank - node.first]

    def fetch_log(self, rank: int, end_only: bool = False) -> str:
        try:
            if self._copies is None:
                self._copies = run_directories.new(None, 0)
            copy = self._copies.log(rank)
            with open(copy, "wb") as file:
                for part in self._log_parts(rank, end_only):
                    file.write(part)
        except OSError:  # no space; or the node does not answer
            return self.log_path(rank)
        return os.fspath(copy)

    def _log_parts(self, rank: int, end_only: bool) -> Iterator[bytes]:
        """The log, or its last part. Raises OSError if it cannot be had."""
        node = self._nodes.of(rank)
        part, start = None, -LOG_PART if end_only else 0
        while part is None or (len(part) == LOG_PART and not end_only):
            (part,) = self._nodes.ask("log_part", rank - node.first, start, only=node)
            if part is None:
                raise OSError(f"{node.link.host} does not give it")
            start += len(part)
            yield part

    def pids(self) -> list[int]:
        return [pid for node in self._nodes if node.begun for pid in node.begun.pids]

    def usage(self) -> list[Reading]:
        none = Reading(0.0, 0.0, 0, 0, -1, -1)
        answers = self._nodes.ask("usage")
        return [
            reading for node, one in zip(self._nodes, answers, strict=True) for reading in one or [none] * node.count
        ]

    def losses(self) -> list[str]:
        found = []
        for node, answer in zip(self._nodes, self._nodes.ask("losses"), strict=True):
            found += [f"On {node.link.host}: {loss}" for loss in answer or ()]
        return found

    # ------------------------------------------------------------ commands

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        if self._agents.modules is not None:
            self.notes = preparation.send_modules(self._agents.modules, self._nodes, False)
        self._command = next(iter(commands.values()))
        self._nodes.returned.clear()
        self._nodes.lost.clear()
        self._stopping, self._unsettled, self._lost_at = False, False, math.inf
        payload = self._command.payload
        fds = shared_memory.opened(payload.paths) if isinstance(payload, Shared) else ()
        try:
            for node in self._nodes:
                own = {
                    rank - node.first: replace(commands[rank], payload=NOTHING)
                    for rank in node.ranks
                    if rank in commands
                }
                if own:
                    transfer: Transfer | None = None
                    if isinstance(payload, Shared) and fds:
                        transfer = node.link.transfer(fds, payload.sizes)
                    self._nodes.send(node, RunNext(own, transfer))
                else:
                    number = self._command.command_number
                    node.status = replace(node.status, command_number=number, failures=())
        finally:
            shared_memory.close(fds)

    def serve(self) -> None:
        """Node 0's agent serves the store at any time."""

    def send(self, rank: int, command: Command) -> None:
        node = self._nodes.of(rank)
        self._nodes.send(node, Call("send", (rank - node.first, command)))

    def regroup(self) -> bool:
        self._nodes.tell("regroup")
        return self._grouped

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        self._stopping = self._unsettled = True
        self._lost_at = math.inf if kill is None else time.monotonic() + kill + _KILL_SECONDS
        self._nodes.tell("stop_at", interrupt, term, kill)

    def break_into(self, rank: int) -> None:
        node = self._nodes.of(rank)
        self._nodes.send(node, Call("break_into", (rank - node.first,)))

    def look(self, deep: bool, native: Collection[int] = ()) -> dict[int, Stack]:
        def arguments(node: Node) -> tuple[bool, list[int]]:
            return deep, [rank - node.first for rank in native if rank in node.ranks]

        return self._nodes.by_rank(
            self._nodes.ask_each("look", arguments, seconds=ANSWER_SECONDS if deep or native else SOON_SECONDS)
        )

    def ask(self, question: Question[T]) -> dict[int, T | None]:
        return self._nodes.by_rank(self._nodes.ask("ask", question))

    def stacks(self, names: Mapping[str, str], ending: str = "") -> list[str]:
        stood: dict[int, tuple[Frame, ...]] = self._nodes.by_rank(self._nodes.ask("stood"))
        return stacks.sentences(stood, self.cell, names, ending)

    def results(self) -> Results[Any]:
        returned = self._nodes.returned
        ranks = sorted(returned)
        return Results([returned[rank].value for rank in ranks], ranks)

    # ------------------------------------------------------------ watching

    def poll(self, timeout: float) -> list[Event]:
        if self._closed:
            return []
        if self._unsettled and self._settled:  # it is over but for what nobody waits for
            self._unsettled, self._lost_at = False, math.inf
            self._nodes.abandon("were on their way when the run was stopped")
        elif time.monotonic() > self._lost_at:
            self._nodes.lose([node for node in self._nodes if not self._has_settled(node)], "it does not answer")
        return self._nodes.poll(min(timeout, max(0.0, self._lost_at - time.monotonic())))

    def wake(self) -> None:
        self._nodes.wake()

    # ------------------------------------------------------------ the end

    def dismiss(self, seconds: float) -> None:
        self._nodes.ask("dismiss", seconds)

    def dispose(self, keep_logs: bool = False) -> None:
        if self._closed:
            return
        self._nodes.abandon("were on their way when the run ended")
        disposed = self._nodes.ask("dispose", keep_logs)
        self._closed = True
        for node, ended in zip(self._nodes, disposed, strict=True):
            if not ended:  # what its ranks still do and say is not for the next run
                node.link.close("it did not end its ranks")
            node.status = replace(node.status, all_exited=True, finished=True)
        if self._copies is not None:
            run_directories.done(self._copies, keep=True)
        self._nodes.close()
        self._agents.done()


def _own(options: LaunchOptions, node: Node) -> LaunchOptions:
    """Those of the node's own ranks. The kernel's front end has chosen where figures appear."""
    figures = {name: os.environ[name] for name in ("MPLBACKEND",) if name in os.environ}
    return replace(options, nprocs=node.count, on=None, nnodes=1, env={**figures, **options.env})
