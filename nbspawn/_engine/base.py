"""The complete interface between a session and an engine: ranks on this machine (local.py), or on several (hosts.py).

A rank has three numbers. ``rank``, 0 to ``nprocs`` - 1, is its index in the engine's run, in all messages and views.
``node`` is the number of the machine that it is on (0 if there is one). Its *ordinal* is the value of RANK in its
program: the same, unless a library numbers its processes itself (torch_xla on a TPU); only the rank itself knows it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from nbspawn._protocol.failure import Failure
from nbspawn._protocol.frames import Stack
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.messages import Command, Event, RunCell, RunFunction
from nbspawn._protocol.questions import Question, T
from nbspawn._results import Results


class Engine(Protocol):
    """The ranks of one run, after their start. Times are in seconds."""

    # Properties, because these are read-only; a class that implements this may have attributes.
    @property
    def nprocs(self) -> int:
        """The number of ranks, alive or ended."""

    @property
    def cell(self) -> str | None:
        """The file name of the running cell; None if no cell runs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the last command's start."""

    @property
    def log_dir(self) -> str:
        """The directory of the ranks' logs."""

    @property
    def logs_exist(self) -> bool:
        """Are the logs there, as far as is known?"""

    @property
    def logs_stay_until(self) -> str:
        """What the logs stay until; '' for those in a directory that the user has given."""

    @property
    def all_alive(self) -> bool:
        """Are all ranks alive?"""

    @property
    def all_exited(self) -> bool:
        """Have all ranks ended?"""

    @property
    def finished(self) -> bool:
        """Have all ranks finished the command? One-shot ranks then end, kept ranks wait for the next one."""

    @property
    def stopping(self) -> bool:
        """Has a signal that ends ranks been sent or scheduled?"""

    @property
    def failures(self) -> Sequence[Failure]:
        """The failures of the current command that nbspawn did not cause, in the order in which they were noticed."""

    def host(self, rank: int) -> str:
        """The name of the machine that the rank is on; '' if all ranks are on this one."""

    def log_path(self, rank: int) -> str:
        """The log with the rank's whole output; 'host2:/tmp/…' if that is on another machine."""

    def fetch_log(self, rank: int, end_only: bool = False) -> str:
        """The path of the log on this machine, of a copy made now if it is on another one (``end_only``: of its last
        megabyte). The same as ``log_path`` if it cannot be copied."""

    def pids(self) -> list[int]:
        """The process ids, by rank."""

    def usage(self) -> list[Reading]:
        """The last gauge reading of each rank."""

    def poll(self, timeout: float) -> list[Event]:
        """New events, after at most ``timeout`` seconds. Never blocks for longer; a rank's failure does not raise."""

    def wake(self) -> None:
        """Have a waiting ``poll`` return; called from any thread, or a signal handler."""

    def serve(self) -> None:
        """Serve the store at MASTER_PORT, even if ``poll`` is not called for a while."""

    def send(self, rank: int, command: Command) -> None:
        """Send a command to a rank; returns at once."""

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        """Have these kept ranks, which are idle, run a further command; returns at once. Failures and results are those
        of the new command from now on."""

    def regroup(self) -> bool:
        """Have the kept ranks reset what they share. True if that includes a process group of ``--backend``, which is
        created again. Raises OSError if there is no space for its store."""

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        """Schedule the signals that end the ranks, in seconds from now; replaces an earlier schedule."""

    def look(self, deep: bool, native: Collection[int] = ()) -> dict[int, Stack]:
        """The stacks of the busy ranks, within about a second; ``deep``: with other threads. Of these ranks ``native``
        code, too, which halts them, and takes longer."""

    def ask(self, question: Question[T]) -> dict[int, T | None]:
        """What the ranks answer, busy or idle, within some seconds; nothing of others."""

    def break_into(self, rank: int) -> None:
        """Have a rank stop in the debugger as soon as possible; returns at once."""

    def stacks(self, names: Mapping[str, str], ending: str = "") -> list[str]:
        """Where the ranks were when they were stopped, a sentence for each group of ranks. ``names`` are IPython's for
        the notebook's cells, by file name."""

    def results(self) -> Results[Any]:
        """The ranks' values; called when all have returned."""

    def losses(self) -> list[str]:
        """Files and helper processes of the ranks that were lost, a sentence each; each is reported once."""

    def dismiss(self, seconds: float) -> None:
        """Have kept ranks exit cleanly, and wait for that for at most ``seconds``."""

    def dispose(self, keep_logs: bool = False) -> None:
        """Kill all ranks that are left, and release every file, socket and process."""


class Starter(Protocol):
    """Places agents on nodes: what knows a cluster. Equal to another one that wants the same nodes: agents that it has
    started are used again."""

    @property
    def nodes(self) -> int:
        """How many nodes there are."""

    @property
    def address(self) -> str:
        """The address of this machine at which the nodes can reach it; '' if it connects them itself."""

    @property
    def needs_modules(self) -> bool:
        """Do the nodes lack this machine's files, so that the user's own modules have to be sent?"""

    @property
    def news_seconds(self) -> float:
        """How long after a connection has ended ``failures`` may tell why."""

    def name(self, node: int) -> str:
        """What messages call the node before its agent has said what its host's name is."""

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """Reserve the nodes. As long as that takes, call ``waiting`` several times a second with what is waited for,
        such as 'Waiting for 2 nodes'. It raises KeyboardInterrupt when the user stops that."""

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> Mapping[bytes, socket.socket] | None:
        """Run ``python -m nbspawn._agent`` with these arguments on the node, with the token on its standard input. One
        that connects the nodes itself returns the connections to the agent, by their purpose."""

    def failures(self) -> Mapping[int, str]:
        """The nodes from which no agent will come, or whose agent has ended, as far as is known, and why."""

    def close(self) -> None:
        """Give the nodes back; their agents have ended, or end by themselves."""
