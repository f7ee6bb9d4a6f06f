"""What a rank is told before its first command, and where the files of its run lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn._rank.imports import News
from nbspawn._rank.process import Interrupts
from nbspawn._rank.settings import Settings

MARK = "NBSPAWN_RUN"
"""The environment variable of the run's processes: its directory, behind those of the runs that it runs in."""

LIFELINE = "lifeline"
"""The name of the FIFO in the run's directory that its ranks hold open."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run: ``private`` is a 0700 directory of the kernel, ``logs`` may be the person's own."""

    private: Path
    logs: Path

    @property
    def socket(self) -> Path:
        """The kernel listens here; each rank connects once."""
        return self.private / "socket"

    @property
    def lifeline(self) -> Path:
        """A FIFO that only the kernel holds open for writing: its end is the kernel's death."""
        return self.private / LIFELINE

    @property
    def interrupts(self) -> Path:
        """One byte a rank: how many interrupts the kernel has announced to it."""
        return self.private / "interrupts"

    @property
    def gauges(self) -> Path:
        """A slot a rank: what _protocol/gauges.py writes and the kernel reads."""
        return self.private / "gauges"

    @property
    def store(self) -> Path:
        """The FileStore of the process group that ``--backend`` makes."""
        return self.private / "store"

    def log(self, rank: int) -> Path:
        """Everything that the rank wrote to its fds 1 and 2."""
        return self.logs / f"rank-{rank}.log"

    def crash(self, rank: int) -> Path:
        """Where faulthandler writes the stack of a rank that crashes."""
        return self.private / f"crash-{rank}"

    def stack(self, rank: int) -> Path:
        """Where faulthandler writes the rank's stack when it is asked for it."""
        return self.private / f"stack-{rank}"

    def threads(self, rank: int) -> Path:
        """Where the rank then writes what its other threads do."""
        return self.private / f"threads-{rank}"


class SentFd:
    """A file descriptor as an argument of a process that is being started; multiprocessing duplicates it on the way."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, sent: Any) -> None:
        self.fd = sent.detach()


@dataclass(frozen=True)
class Launch:
    """One run's settings, the same object for every rank (torch passes the same ``args`` to all)."""

    world_size: int
    method: str
    """The start method: 'fork', 'forkserver' or 'spawn'."""
    files: RunFiles
    env: dict[str, str]
    """The whole environment of the ranks, but for the variables that differ by rank; under fork what is new in it."""
    threads: int
    """Intra-op threads of torch and OpenMP in each rank."""
    backend: str | None
    """The process group to make before the first command runs, None for none."""
    accelerator: str
    """'xla' (torch_xla) or 'tpu' (torch_tpu), if the ranks are for one of them; else ''."""
    sys_path: list[str]
    """Where the kernel finds modules, now."""
    settings: Settings
    """The notebook's."""
    command: RunFunction | RunCell
    """What to run. It comes along at the start, so that ranks run whether or not the kernel listens by then."""
    seed: int | None = None
    """Repeat the random numbers of a run; None: other numbers in each run."""
    keep: bool = False
    """Wait for more commands when the first has ended."""
    patient: bool = False
    """Somebody may look at one rank for long while the others wait for it."""
    debugpy: bool = False
    """Listen for a debugger on a loopback port."""
    inherited: Any = None
    """Under fork: the job itself, which the rank has by inheritance."""
    foreign: tuple[tuple[int, int], ...] = ()
    """Under fork: the kernel's own sockets, as (descriptor, inode)."""
    payload: tuple[SentFd, ...] = ()
    """Else: the packed job."""
    beside: tuple[Any, ...] = ()
    """And what can travel only as an argument of a process that is being started (payload.Packed.beside)."""


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
