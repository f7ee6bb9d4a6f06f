"""Which rank this process is, its run, and its current command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nbspawn._process.imports import NewImports
from nbspawn._protocol.launch import Launch
from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn._rank.program.process import Interrupts


@dataclass
class RankInfo:
    """Which rank this process is, its run, and its current command. ``rank`` counts on this machine, ``ordinal`` is the
    rank's number in the program: with one machine the same, except with torch_xla, which assigns its own on a TPU
    (_accelerators/xla.py). ``names`` are IPython's names for the notebook's cells, by file name; ``imported`` records
    what the rank imports; ``regrouped`` is the number of the last ``Regroup``,
    ``ungrouped`` the exception if that failed.

    Features add their callbacks to the lists. ``on_begin`` is called when a further command begins, ``on_end`` when one
    has ended, ``on_look`` some times a second, in another thread, with the argument whether the rank seems to
    wait for others."""

    rank: int
    launch: Launch
    interrupts: Interrupts
    command: RunFunction | RunCell
    ordinal: int = -1
    names: dict[str, str] = field(default_factory=dict)
    imported: NewImports = field(default_factory=NewImports)
    regrouped: int = 0
    ungrouped: Exception | None = None
    on_begin: list[Callable[[], None]] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    on_look: list[Callable[[bool], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ordinal = self.launch.place.first + self.rank
        self.begin(self.command)

    def begin(self, command: RunFunction | RunCell) -> None:
        """Record the current command."""
        self.command = command
        self.names.update(command.names)
