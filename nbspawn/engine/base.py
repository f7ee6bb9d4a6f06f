"""What every engine can do: six verbs, whatever places the ranks (local processes, a script of events, Ray)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbspawn.messages import Command, Event


class Engine(Protocol):
    """One run's ranks. Times are in seconds."""

    def poll(self, timeout: float) -> list[Event]:
        """What has happened, after at most ``timeout`` seconds. Never blocks for longer, never raises for a rank."""

    def send(self, rank: int, command: Command) -> None:
        """Give a rank a command; returns at once."""

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt once in every rank that runs."""

    def terminate(self, grace_period: float = 0.0) -> None:
        """SIGTERM now, SIGKILL after ``grace_period``; returns at once, ``poll`` does the rest."""

    def stacks(self) -> Sequence[str]:
        """Where each rank stood when it was stopped, one plain sentence a group of ranks."""

    def close(self) -> None:
        """End whatever is left, by force, and give back every file, socket and process."""
