"""How ranks are started: the options of ``%%spawn``, ``spawn`` and ``Session``, but for those of single commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from nbspawn._engine import clusters
from nbspawn._engine.base import Starter
from nbspawn._protocol.launch import LARGEST_SEED
from nbspawn.errors import UsageError

MAX_RANKS = 512  # on one machine
MAX_THREADS = 4096


T = TypeVar("T")


def options_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """``LaunchOptions`` or ``CommandOptions`` from those of the ``values`` that have the name of an option; None stands
    for its default. So an option has one name: here, as a keyword, and for argparse."""
    names = {option.name for option in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names and value is not None})


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Made once, from the user's input; ``devices.resolve`` then replaces what depends on the machine.

    Raises UsageError for an invalid value.
    """

    nprocs: int | str = "auto"
    """The number of ranks, or 'auto', 'gpu', 'cpu', 'xla' or 'tpu'; a number after ``resolve``."""
    start_method: str = "auto"
    backend: str | None = None
    """The process group to make in each rank: 'gloo', 'nccl', 'xla', 'tpu_dist', or, before ``resolve``, 'auto'; None
    if the user's own code makes it."""
    accelerator: str = ""
    """Set by ``resolve``: 'xla' (torch_xla) or 'tpu' (torch_tpu), to be initialised; 'cpu' if the user has asked for
    that; else ''."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the kernel's."""
    devices: Sequence[int] | None = None
    """The CUDA devices that the ranks may see; None for all."""
    threads: int | None = None
    """Intra-op threads per rank; None: OMP_NUM_THREADS if set, else the cores divided by the ranks, at least 1."""
    seed: int | None = None
    """Rank r seeds its random numbers with ``seed`` + r; None: with a different seed in each run."""
    log_dir: str | None = None
    """The directory for the logs, which are kept there; None for a private directory."""
    keep: bool = False
    """Keep the ranks alive, for more commands."""
    autoreload: bool = False
    """Before each command kept ranks load the modules again that were edited on disk."""
    idle_timeout: float | None = None
    """Seconds without a command after which kept ranks are ended; None: never."""
    pdb: bool = False
    """A rank that raises stops in the debugger, maybe for long: the process group of ``backend`` gets a timeout of a
    day."""
    debugpy: bool = False
    """Each rank listens for a debugger (VS Code's) on a loopback port of its own."""
    on: str | Starter | None = None
    """Where ranks are started: None for this machine, a cluster's name (one of clusters.KINDS, or 'ray:HOST:PORT'), or
    what starts an agent on each node itself."""
    nnodes: int | None = None
    """The number of nodes of the cluster; None: as many as are usual there."""
    daemon: bool = False
    """As in multiprocessing; a daemonic rank cannot have children, such as DataLoader workers."""

    def __post_init__(self) -> None:
        if self.on == "local":
            object.__setattr__(self, "on", None)
        if isinstance(self.on, str) and not clusters.is_one(self.on):
            raise UsageError(f"{self.on!r:.60} is no place for ranks: use {clusters.usage()}")
        nodes = self.nodes
        most = MAX_RANKS * nodes
        if isinstance(self.nprocs, int) and not 1 <= self.nprocs <= most:
            raise UsageError(f"nprocs must be between 1 and {most}, got {self.nprocs}")
        if self.on is not None:
            self._check_several_nodes(nodes)
        elif nodes > 1:
            raise UsageError(f"{nodes} nodes need a cluster: --on {' or '.join(clusters.KINDS)}")
        if self.threads is not None and not (isinstance(self.threads, int) and 1 <= self.threads <= MAX_THREADS):
            raise UsageError(f"threads must be between 1 and {MAX_THREADS}, got {self.threads!r:.60}")
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed <= LARGEST_SEED):
            raise UsageError(f"seed must be between 0 and {LARGEST_SEED}, got {self.seed!r:.60}")
        if self.autoreload and not self.keep:
            raise UsageError("autoreload is for kept ranks (--keep): others import every module anew")
        if self.idle_timeout is not None and not self.keep:
            raise UsageError("idle_timeout is for kept ranks (--keep): others end with the cell")
        if self.idle_timeout is not None and not self.idle_timeout > 0:
            raise UsageError(f"idle_timeout must be a positive number of seconds, got {self.idle_timeout!r:.60}")

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        if self.on is None:
            return self.nnodes or 1
        return clusters.nodes(self.on, self.nnodes) if isinstance(self.on, str) else self.on.nodes

    def _check_several_nodes(self, nodes: int) -> None:
        if not isinstance(self.nprocs, int):
            raise UsageError(
                "on other machines the number of ranks has to be given (what they have: python -m nbspawn --check "
                f"--on {self.on if isinstance(self.on, str) else '...'})"
            )
        if nodes > self.nprocs:
            raise UsageError(f"{nodes} nodes need as many ranks at least, got {self.nprocs}")
        if self.start_method not in ("auto", "forkserver"):
            raise UsageError(
                f"-m {self.start_method} is for ranks on this machine: other nodes have a fork server each"
            )
        if self.devices is not None and isinstance(self.on, str) and clusters.named(self.on).assigns_gpus:
            raise UsageError(f"--devices is not for {self.on}: the cluster assigns the GPUs of its nodes")
        if self.debugpy:
            raise UsageError("--debugpy is for ranks on this machine: breakpoint() works on all nodes")
        if self.log_dir is not None:
            raise UsageError("--log-dir is for ranks on this machine: the logs of others stay on their nodes")
