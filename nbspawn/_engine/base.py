"""What a session asks of an engine, and all that it asks, whatever places the ranks: processes of this machine
(local.py), later those of several.

Three numbers tell a rank: ``rank``, 0 to ``nprocs`` - 1, is its place in the engine's run, and in all that is told of
it; ``node`` the machine that it is on (0 where there is one); its *ordinal* is what its program is told as RANK, the
same but where a library numbers its processes itself (torch_xla on a TPU), and is known in the rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nbspawn._protocol.frames import Stack
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.messages import Command, Event, RunCell, RunFunction
from nbspawn._results import Results
from nbspawn.errors import Failure


class Engine(Protocol):
    """The ranks of one run, which have been started. Times are in seconds."""

    # Read-only, as properties are: a class that implements this may have attributes.
    @property
    def nprocs(self) -> int:
        """How many ranks there are, or were."""

    @property
    def cell(self) -> str | None:
        """The running cell's file name, if a cell runs."""

    @property
    def log_dir(self) -> str:
        """The directory of the ranks' logs."""

    @property
    def complete(self) -> bool:
        """Do all ranks live?"""

    @property
    def over(self) -> bool:
        """Have all ranks ended?"""

    @property
    def settled(self) -> bool:
        """Have all ranks ended what they were given? One-shot ranks end with it, kept ranks wait for more."""

    @property
    def stopping(self) -> bool:
        """Have ranks been asked to end, or will they be?"""

    @property
    def failures(self) -> Sequence[Failure]:
        """Every rank that failed by itself in the current command, in the order in which that became known."""

    def node(self, rank: int) -> int:
        """The machine that the rank is on, 0 for the first."""

    def log_path(self, rank: int) -> str:
        """The file that holds all that the rank has printed."""

    def pids(self) -> list[int]:
        """Of the ranks' processes, by rank."""

    def usage(self) -> list[Reading]:
        """What each rank uses, as it last reported."""

    def poll(self, timeout: float) -> list[Event]:
        """What has happened, after at most ``timeout`` seconds. Never blocks for longer, never raises for a rank."""

    def wake(self) -> None:
        """Have a ``poll`` that waits return; from any thread, or a signal handler."""

    def serve(self) -> None:
        """Let the ranks meet at MASTER_PORT though nobody may ``poll`` for a while."""

    def send(self, rank: int, command: Command) -> None:
        """Give a rank a command; returns at once."""

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        """Have these kept ranks, which are idle, run something more; returns at once. Failures and outcomes are those
        of the new command from now on."""

    def regroup(self) -> bool:
        """Have the kept ranks begin anew what they share. True if that is a group of ``--backend``. Raises OSError if
        there is no place for it."""

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        """End the ranks by signals, so many seconds from now each; replaces what was planned before."""

    def look(self, deep: bool) -> dict[int, Stack]:
        """The stacks of the ranks that run, within half a second; ``deep`` also other threads and native code."""

    def break_into(self, rank: int) -> None:
        """Have a rank stop in the debugger as soon as it can; returns at once."""

    def stacks(self, ending: str = "") -> list[str]:
        """Where the ranks stood when they were stopped, a plain sentence for each group of them."""

    def results(self) -> Results[Any]:
        """The ranks' values, when all have returned."""

    def losses(self) -> list[str]:
        """What was lost of files and helpers that the ranks need, a plain sentence each; each is given once."""

    def dismiss(self, seconds: float) -> None:
        """Have kept ranks leave in good order, and wait for at most so long."""

    def dispose(self, keep_logs: bool = False) -> None:
        """End whatever is left, by force, and give back every file, socket and process."""
