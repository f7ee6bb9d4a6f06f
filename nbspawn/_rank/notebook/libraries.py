"""What libraries have concluded about their process, and must conclude anew in a rank; the locks and workers they had.

Imports none of them: a library that is not there has concluded nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import threading
from typing import Any

from nbspawn._payload import accelerate_state

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def forget_process_state() -> None:
    """Early in a rank, when it has its environment."""
    accelerate_state.forget()
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None and hasattr(rank_zero.rank_zero_only, "rank"):
        rank_zero.rank_zero_only.rank = int(os.environ["RANK"])  # read at import, when there was none


def not_interactive() -> None:
    """In a forked rank: say to libraries that the notebook has imported that it is not interactive. Lightning looks at
    its import whether it is in a notebook, and there refuses every strategy but those that fork. Many of its modules
    have that constant."""
    if not any(name in sys.modules for name in _LIGHTNING):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIGHTNING and "_IS_INTERACTIVE" in vars(module):
            module._IS_INTERACTIVE = False  # type: ignore[attr-defined]


def have_own_locks() -> None:
    """In a forked rank: give libraries locks of its own. tqdm's bars share a lock between processes, so that those of a
    DataLoader's workers do not draw over each other; with the kernel a rank shares no terminal. One that raises or is
    killed while it holds the lock would keep it for good, and every later bar of the notebook would wait for it.

    In place: each bar's class, and ``tqdm.get_lock()``, hold on to the lock.
    """
    tqdm: Any = sys.modules.get("tqdm.std")
    locks = getattr(tqdm, "TqdmDefaultWriteLock", None)
    between_processes = getattr(locks, "mp_lock", None)
    if between_processes is not None:
        fresh: Any = multiprocessing.get_context("fork").RLock()
        between_processes._semlock = fresh._semlock
        between_processes._make_methods()
    between_threads = getattr(locks, "th_lock", None)
    if between_threads is not None:
        between_threads._at_fork_reinit()  # a thread of the kernel's that draws bars may have it at this moment


def have_own_workers() -> None:
    """In a forked rank: give executors workers of its own. A fork copies no thread: a ThreadPoolExecutor of the
    notebook, or of a library, would wait for its workers for ever. It starts others when it is given work. joblib uses
    one executor of loky's for all, and makes another where there is none."""
    futures: Any = sys.modules.get("concurrent.futures.thread")
    for thread in list(getattr(futures, "_threads_queues", ())):
        known = getattr(thread, "_args", None)  # it has none when it has ended
        if known and (executor := known[0]()) is not None:
            executor._threads, executor._work_queue = set(), queue.SimpleQueue()
            executor._idle_semaphore, executor._shutdown_lock = threading.Semaphore(0), threading.Lock()
    for package in ("joblib.externals.loky", "loky"):
        loky: Any = sys.modules.get(f"{package}.reusable_executor")
        if loky is not None and loky._executor is not None:
            _not_collected.append(loky._executor)  # it would tell its manager, which is in the kernel
            loky._executor = loky._executor_kwargs = None


_not_collected: list[object] = []
