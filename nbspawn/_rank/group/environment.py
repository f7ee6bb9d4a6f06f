"""The rank's environment as torchrun sets it, where ``init_process_group()`` meets, and the process group of
``--backend``."""

from __future__ import annotations

import datetime
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._process.after_import import after_import
from nbspawn._rank.group import stores
from nbspawn._rank.program import in_thread
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

_CONNECTED = "nbspawn/connected"
"""Key in a group's store: how many ranks have made it."""

_DESTROYED = 5.0
"""Seconds within which a group is destroyed at the end, by which all that was called has ended. NCCL's may hang."""

_BEFORE_2_7 = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""What torch calls TORCH_FR_BUFFER_SIZE there."""

server_began_with: frozenset[str] = frozenset()
"""The variables that the importer had from the kernel; the others of its environment its imports have set."""


def set_environment(info: RankInfo) -> None:
    """Make ``os.environ`` the kernel's at launch (a fork server's is as old as the server), plus this rank's own part
    of what torchrun sets: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. What imports
    have set in this process stays, where the kernel has nothing of that name: torch_xla finds its library by such a
    variable."""
    launch = info.launch
    for name in server_began_with - launch.env.keys():
        os.environ.pop(name, None)
    os.environ.update(launch.env, RANK=str(info.ordinal), LOCAL_RANK=str(info.rank), ROLE_RANK=str(info.ordinal))
    # For flight_recorder.py. Off by default in torch 2.8 and 2.9, 2000 calls in 2.13: to read these takes four times
    # as long.
    size = os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ.get(_BEFORE_2_7, "500"))
    after_import("torch", functools.partial(_set_older_name, size))
    # Else NCCL's watchdog aborts the process after an error of the device, while Python is about to raise it.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    time.tzset()
    after_import("torch.distributed", _set_debug_level)


def _set_older_name(size: str) -> None:
    """Later ones would warn that it is deprecated."""
    if sys.modules["torch"].__version__ < (2, 7):
        os.environ.setdefault(_BEFORE_2_7, size)


def _set_debug_level() -> None:
    """torch reads TORCH_DISTRIBUTED_DEBUG when it is imported, which was in the fork server, or in the kernel."""
    distributed: Any = sys.modules["torch.distributed"]
    if distributed.is_available():
        distributed.set_debug_level_from_env()


def meet_at_own_store(info: RankInfo) -> None:
    """Have ``init_process_group()`` meet where the group of ``--backend`` does (stores.py). Each group has a store of
    its own; in that of one that has been destroyed ranks would find old addresses, and wait there for ever.

    Code that brings its own MASTER_PORT or ``init_method="tcp://..."`` meets there, as under ``mp.spawn``. Under
    torchrun it hangs: with TORCHELASTIC_USE_AGENT_STORE set every rank is a client, and nobody serves that port.

    Either way torch's own barrier at the end of ``init_process_group()`` is switched on. Without it gloo lets a rank go
    as soon as that one is connected, and if it has little to do and ends, its peers fail while they connect
    ("Connection closed by peer"): one in four runs, since a rank ends much sooner than torchrun's.
    """
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is None or not hasattr(rendezvous, "_create_c10d_store"):
        return
    create = rendezvous._create_c10d_store
    ours = int(os.environ["MASTER_PORT"])
    made: Counter[int] = Counter()

    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta, *args: Any, **kwargs: Any
    ) -> Any:
        os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
        if port == ours:
            made[info.regrouped] += 1
            store = stores.store(info.launch, f"-{info.regrouped}-{made[info.regrouped]}")
            store.set_timeout(timeout)
            return store
        agent = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        try:
            return create(hostname, port, rank, world_size, timeout, *args, **kwargs)
        finally:
            if agent is not None:
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = agent

    rendezvous._create_c10d_store = create_store


def lengthen_timeouts(info: RankInfo) -> None:
    """Lengthen the timeouts of all groups that the code makes, if a user may look at one rank while the others wait.
    gloo would give them up after 30 minutes, NCCL after 10."""
    if info.launch.long_group_timeout:
        after_import("torch.distributed.distributed_c10d", _lengthen_timeouts)


def _lengthen_timeouts() -> None:
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = datetime.timedelta(days=1)


def keep_destroyed_groups(info: RankInfo) -> None:
    """Hold until the next command a process group that the cell has destroyed: a DistributedDataParallel that goes
    after it would be the last to hold it, and gloo's destructor then waits, with Python's lock, for a thread that waits
    for that lock. In torch 2.13 a function that trains, destroys the group and returns, as in its tutorials, hangs."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    destroy = distributed.destroy_process_group
    destroyed: list[Any] = []

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        destroyed.append(distributed.group.WORLD if group is None else group)
        destroy(group)

    info.on_begin.append(destroyed.clear)
    distributed.destroy_process_group = distributed.distributed_c10d.destroy_process_group = destroy_process_group


@contextmanager
def process_group(info: RankInfo, channel: Channel) -> Iterator[None]:
    """Make the group that ``--backend`` asks for, and destroy it when the rank has finished.

    gloo's is destroyed by the end of the process. By itself it waits 20 to 40 ms for its threads, and closes nothing
    that the system does not. A rank does not end before its peers are connected, too (``meet_at_own_store`` tells
    why): to know that costs nothing at the start, where torch's barrier polls the file each 10 ms.
    """
    launch = info.launch
    if launch.backend is None:
        yield
        return
    import torch.distributed as dist

    store = stores.store(launch, "")
    make_group(info, store)
    yield
    try:
        with info.interrupts.enabled():
            if dist.is_initialized() and dist.get_backend() != "gloo":
                in_thread.ends_within(_DESTROYED, dist.destroy_process_group)
            with suppress(RuntimeError):  # a kept rank has given up this store: it was not used any more
                while store.add(_CONNECTED, 0) < launch.world_size:
                    time.sleep(0.001)
    except KeyboardInterrupt:
        pass  # one of them has failed


def make_group(info: RankInfo, store: Any) -> None:
    """Make the group of ``--backend``; the ranks meet at ``store``."""
    import torch.distributed as dist

    launch = info.launch
    backend = kinds.named(launch.accelerator).backend(launch.backend or "")
    dist.init_process_group(backend, store=store, rank=info.ordinal, world_size=launch.world_size)
    store.add(_CONNECTED, 1)
