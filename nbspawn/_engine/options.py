"""How ranks are started: what ``%%spawn``, ``spawn`` and ``Session`` take beside what is to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbspawn.errors import UsageError

MAX_RANKS = 512
LARGEST_SEED = 2**32 - 1
"""What numpy's generator takes."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Made once, from what the user has typed; ``devices.resolve`` then replaces what depends on the machine.

    Raises UsageError for a value that cannot be.
    """

    nprocs: int | str = "auto"
    """How many ranks, or 'auto', 'gpu', 'cpu', 'xla' or 'tpu'; resolved, a number."""
    start_method: str = "auto"
    backend: str | None = None
    """The process group to make in each rank: 'gloo', 'nccl', 'xla', 'tpu_dist' or, not yet resolved, 'auto'; None
    leaves it to the user's own code."""
    accelerator: str = ""
    """Resolved: 'xla' (torch_xla) or 'tpu' (torch_tpu), which have to be made ready; '' for CUDA and the CPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside the kernel's."""
    devices: Sequence[int] | None = None
    """The CUDA devices that the ranks may see; None for all."""
    threads: int | None = None
    """Intra-op threads a rank; None: OMP_NUM_THREADS if it is set, else the cores shared out, at least 1."""
    seed: int | None = None
    """Rank r begins with the random numbers of ``seed`` + r; None: with fresh ones."""
    log_dir: str | None = None
    """Where the logs go, and stay; None for a private directory."""
    keep: bool = False
    """Leave the ranks alive, for more to run."""
    idle_timeout: float | None = None
    """Seconds without a command after which kept ranks end; None: never."""
    long_group_timeout: bool = False
    """Somebody may look at one rank for long, so the group of ``backend`` gets a day's timeout."""
    debugpy: bool = False
    """Have each rank listen for a debugger (VS Code's) on a loopback port of its own."""
    daemon: bool = False
    """As in multiprocessing; a daemonic rank cannot have children, such as DataLoader workers."""

    def __post_init__(self) -> None:
        if isinstance(self.nprocs, int) and not 1 <= self.nprocs <= MAX_RANKS:
            raise UsageError(f"nprocs must be between 1 and {MAX_RANKS}, got {self.nprocs}")
        if self.threads is not None and not (isinstance(self.threads, int) and self.threads >= 1):
            raise UsageError(f"threads must be a positive number, got {self.threads!r:.60}")
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed <= LARGEST_SEED):
            raise UsageError(f"seed must be between 0 and {LARGEST_SEED}, got {self.seed!r:.60}")
        if self.idle_timeout is not None and not self.keep:
            raise UsageError("idle_timeout is for ranks that are kept: leave it out, or keep the ranks")
        if self.idle_timeout is not None and not self.idle_timeout > 0:
            raise UsageError(f"idle_timeout must be a positive number of seconds, got {self.idle_timeout!r:.60}")
