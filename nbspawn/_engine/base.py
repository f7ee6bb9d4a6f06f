"""What a session asks of an engine, whatever places the ranks: processes of this machine (local.py), later Ray."""

from __future__ import annotations

from typing import Protocol

from nbspawn._protocol.messages import Command, Event
from nbspawn._render.stacks import Stack
from nbspawn._results import Results
from nbspawn.errors import Failure


class Engine(Protocol):
    """The ranks of one run, which have been started. Times are in seconds."""

    @property
    def failures(self) -> list[Failure]:
        """Every rank that failed by itself, in the order in which that became known."""

    @property
    def over(self) -> bool:
        """Have all ranks ended?"""

    @property
    def settled(self) -> bool:
        """Have all ranks ended what they were given? One-shot ranks end with it, kept ranks wait for more."""

    @property
    def stopping(self) -> bool:
        """Have ranks been asked to end, or will they be?"""

    def poll(self, timeout: float) -> list[Event]:
        """What has happened, after at most ``timeout`` seconds. Never blocks for longer, never raises for a rank."""

    def wake(self) -> None:
        """Have a ``poll`` that waits return; from any thread, or a signal handler."""

    def send(self, rank: int, command: Command) -> None:
        """Give a rank a command; returns at once."""

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        """End the ranks by signals, so many seconds from now each; replaces what was planned before."""

    def look(self, deep: bool) -> dict[int, Stack]:
        """The stacks of the ranks that run, within half a second; ``deep`` also other threads and native code."""

    def break_into(self, rank: int) -> None:
        """Have a rank stop in the debugger as soon as it can; returns at once."""

    def stacks(self, ending: str = "") -> list[str]:
        """Where the ranks stood when they were stopped, a plain sentence for each group of them."""

    def results(self) -> Results:
        """The ranks' values, when all have returned."""

    def losses(self) -> list[str]:
        """What was lost of files and helpers that the ranks need, a plain sentence each; each is told once."""

    def close(self, keep_logs: bool = False) -> None:
        """End whatever is left, by force, and give back every file, socket and process."""
