"""Which rank this process is, its run, and what it runs now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nbspawn._protocol.launch import Launch
from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn._rank.imports import News
from nbspawn._rank.process import Interrupts


@dataclass
class RankInfo:
    """Which rank this process is, its run, and what it runs now. ``ordinal`` is the rank's number to the program, the
    same but for torch_xla, which gives its own on a TPU (_rank/xla.py). ``names`` are what IPython calls the notebook's
    cells, by file name; ``imported`` tells what the rank imports; ``regrouped`` is the number of the last ``Regroup``,
    ``ungrouped`` what it failed with.
    Who has something to do when a further command begins, when it has ended, or some times a second meanwhile (in
    another thread, which passes whether the rank seems to wait), adds it to the lists."""

    rank: int
    launch: Launch
    interrupts: Interrupts
    command: RunFunction | RunCell
    ordinal: int = -1
    names: dict[str, str] = field(default_factory=dict)
    imported: News = field(default_factory=News)
    regrouped: int = 0
    ungrouped: Exception | None = None
    on_begin: list[Callable[[], None]] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    on_look: list[Callable[[bool], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ordinal = self.rank
        self.begin(self.command)

    def begin(self, command: RunFunction | RunCell) -> None:
        """It runs this now."""
        self.command = command
        self.names.update(command.names)
