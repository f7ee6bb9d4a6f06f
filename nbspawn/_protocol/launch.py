"""What a rank is told before its first command, and where the files of its run lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn._protocol.place import Place
from nbspawn._protocol.settings import ProcessState, Settings

LARGEST_SEED = 2**32 - 1
"""The largest that numpy's generator accepts."""
MARK = "NBSPAWN_RUN"
"""The environment variable of the run's processes: its directory, behind those of the runs that it runs in."""


LIFELINE = "lifeline"
"""The name of the FIFO in the run's directory that its ranks hold open."""

RANKS = "ranks"
"""The name of the file in the run's directory in which its ranks register."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run: ``private`` is a 0700 directory of the kernel, ``logs`` may be the user's own."""

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
    def ranks(self) -> Path:
        """For the guardian: of each rank, before it runs any code of the user, what /proc/PID/stat says."""
        return self.private / RANKS

    @property
    def interrupts(self) -> Path:
        """One byte a rank: how many interrupts the kernel has announced to it."""
        return self.private / "interrupts"

    @property
    def gauges(self) -> Path:
        """A slot a rank: what _protocol/gauges.py writes and the kernel reads."""
        return self.private / "gauges"

    @property
    def questions(self) -> Path:
        """What the kernel asks the ranks (_protocol/questions.py)."""
        return self.private / "questions"

    def answer(self, rank: int) -> Path:
        """What the rank has answered last."""
        return self.private / f"answer-{rank}"

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


@dataclass(frozen=True)
class Launch:
    """One run's settings, the same object for every rank of a machine (torch passes the same ``args`` to all)."""

    place: Place
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
    """'xla' (torch_xla), 'tpu' (torch_tpu) or 'cpu', if the ranks are for one of them; else ''."""
    sys_path: list[str]
    """Where the kernel finds modules, now."""
    settings: Settings
    """The notebook's."""
    process: ProcessState | None
    """The kernel's; None on another machine."""
    default_method: str | None
    """What the notebook has given to ``multiprocessing.set_start_method``, for the processes of ranks."""
    command: RunFunction | RunCell
    """What to run first. It comes along, so that ranks run whether or not the kernel listens by then."""
    seed: int | None = None
    """Repeat the random numbers of a run; None: other numbers in each run."""
    keep: bool = False
    """Wait for more commands when the first has ended."""
    long_group_timeout: bool = False
    """The process group gets a timeout of a day: others may wait for long for a rank in the debugger."""
    debugpy: bool = False
    """Listen for a debugger on a loopback port."""
    door: str = ""
    """The path of the socket at which the kernel waits for ranks while its front end's debugger is on; '' for none."""
    foreign: tuple[tuple[int, int], ...] = ()
    """Under fork: the kernel's own sockets, as (descriptor, inode)."""

    @property
    def world_size(self) -> int:
        """The number of ranks on all machines."""
        return self.place.total
