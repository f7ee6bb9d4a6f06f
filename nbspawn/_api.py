"""torch.multiprocessing's ``spawn`` and ``start_processes``, with everything that a notebook needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

from torch.multiprocessing import ProcessContext

from nbspawn._engine.devices import resolve
from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.launch import resolve_start, start
from nbspawn._engine.options import LaunchOptions, options_of
from nbspawn._engine.run.local_context import LocalContext
from nbspawn._results import Results
from nbspawn._session import hooks
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import View
from nbspawn.errors import UsageError

T = TypeVar("T")


@overload
def spawn(
    fn: Callable[..., T],
    args: tuple[Any, ...] = ...,
    nprocs: int | str = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: str = ...,
    *,
    backend: str | None = ...,
    env: Mapping[str, str] | None = ...,
    devices: Sequence[int] | None = ...,
    threads: int | None = ...,
    seed: int | None = ...,
    timeout: float | None = ...,
    grace_period: float | None = ...,
    log_dir: str | None = ...,
    pdb: bool = ...,
    debugpy: bool = ...,
    show_locals: bool = ...,
    view: View | None = ...,
    on: str = ...,
    nnodes: int | None = ...,
) -> Results[T]: ...
@overload
def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = ...,
    nprocs: int | str = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: str = ...,
    backend: str | None = ...,
    env: Mapping[str, str] | None = ...,
    devices: Sequence[int] | None = ...,
    threads: int | None = ...,
    seed: int | None = ...,
    log_dir: str | None = ...,
    show_locals: bool = ...,
) -> LocalContext: ...
def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | str = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "auto",
    *,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    devices: Sequence[int] | None = None,
    threads: int | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    grace_period: float | None = None,
    log_dir: str | None = None,
    pdb: bool = False,
    debugpy: bool = False,
    show_locals: bool = False,
    view: View | None = None,
    on: str = "local",
    nnodes: int | None = None,
) -> Results[Any] | LocalContext:
    """Call ``fn(rank, *args)`` in ``nprocs`` new ranks: torch.multiprocessing's ``spawn``, for notebooks too.

    Args:
        fn: any function. A function that is defined in a cell or in ``__main__`` is pickled by value, with all that it
            uses.
        args: the arguments of ``fn`` after the rank. They may contain shared tensors and multiprocessing's queues,
            locks and events.
        nprocs: the number of ranks; or 'gpu', 'xla', 'tpu' (one per device), 'cpu' (one per core), 'auto' (what fits).
        join: True: wait, show what the ranks print, and return their results. False: return a context at once. Then the
            ranks are not supervised, and ``timeout``, ``grace_period``, ``view``, ``pdb``, ``debugpy`` and ``on`` are
            refused.
        daemon: as in multiprocessing.
        start_method: 'auto', 'fork', 'forkserver' or 'spawn' (auto: the fork server if everything that ``fn`` uses can
            be pickled).
        backend: make and destroy a process group around ``fn``: 'gloo', 'nccl', 'xla' (torch_xla), 'tpu_dist'
            (torch_tpu), or 'auto' for the one that fits; None: no process group.
        env: environment variables of the ranks, in addition to the kernel's (or the node's, on several machines).
        devices: the numbers of the CUDA devices that the ranks may see; None: all.
        threads: intra-op threads per rank; None: OMP_NUM_THREADS, else the number of cores divided by ``nprocs``.
        seed: rank r seeds ``random``, numpy and torch with ``seed`` + r; None: with a different seed in every rank and
            every run.
        timeout: seconds until the ranks are stopped, with a RunTimeoutError; None: no limit.
        grace_period: seconds between KeyboardInterrupt and SIGTERM when ranks are stopped; None: 3.
        log_dir: the directory in which each rank's whole output is logged, and the logs are kept; None: a private
            directory.
        pdb: open the debugger in a rank that raises, at the line that raised; the other ranks wait meanwhile.
        debugpy: each rank listens for a debugger (VS Code's) on a loopback port of its own.
        show_locals: show the variables of the frame that raised, in the error.
        view: how the run is shown; None: the notebook's default view, or in a script lines marked with their ranks on
            ``sys.stdout``.
        on: 'local' for this machine, 'ssh:HOST' or 'ssh:HOST,HOST' for machines that ssh reaches (each as
            USER@HOST:PORT/PATH/TO/PYTHON), 'slurm' or 'slurm:JOB' for a Slurm allocation, 'ray' or 'ray:HOST:PORT' for
            a running Ray cluster. Needs ``join``, and a number for ``nprocs``.
        nnodes: how many nodes of the cluster to use, each for its share of the ranks; None: all that ``on`` names, or
            one node of a Ray cluster.

    Returns:
        ``Results``, a sequence by rank of what ``fn`` returned. With ``join=False`` a ``LocalContext``: a torch
        ``ProcessContext`` that also has ``interrupt()``, ``terminate(grace_period)`` and ``results()``.

    Raises:
        RankRaisedError: a rank raised; the error is that of the rank that failed first.
        RankExitedError: the rank that failed first was killed, or exited before it had finished.
        StartError: the ranks could not be started.
        PayloadError: ``fn``, or something that it uses, cannot be pickled; or a result cannot, when it is accessed.
        UsageError: an argument is invalid; no rank was started.
        RunTimeoutError: ``timeout`` seconds have passed; it says where every rank was.
        KeyboardInterrupt: the user has stopped the run.
    """
    launch, command = options_of(LaunchOptions, locals()), options_of(CommandOptions, locals())
    job = FunctionJob(fn, args, names=hooks.cell_names())
    if join:
        return Pool(launch, command).run(job)
    _refuse_what_needs_a_supervisor(
        timeout=timeout,
        grace_period=grace_period,
        view=view,
        pdb=pdb or None,
        debugpy=debugpy or None,
        on=None if on == "local" else on,
    )
    return _served(_started(job, resolve(launch), show_locals))


def _refuse_what_needs_a_supervisor(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise UsageError(
            f"with join=False {' and '.join(names)} would be ignored, because the ranks are not supervised: use "
            "context.join(timeout, grace_period), or join=True"
        )


def start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """``torch.multiprocessing.start_processes``: the same arguments, defaults, results and errors.

    Two ends of a rank are errors here, because it has not finished, and successes in torch (up to release 2.13): a
    KeyboardInterrupt that it raises itself, and an exit with code 0 before ``fn`` has returned.

    Args:
        fn: called as ``fn(rank, *args)`` in each rank.
        args: the arguments of ``fn`` after the rank.
        nprocs: the number of ranks.
        join: wait for the ranks.
        daemon: as in multiprocessing.
        start_method: 'auto', 'fork', 'forkserver' or 'spawn'.

    Returns:
        None with ``join``, when all ranks have succeeded. Otherwise a ``LocalContext`` to ``join``, or torch's empty
        context if ``nprocs`` is 0.

    Raises:
        RankRaisedError: a rank raised; also torch's ProcessRaisedException. The other ranks get SIGTERM at once.
        RankExitedError: a rank ended without finishing; also torch's ProcessExitedException. The other ranks
            get SIGTERM at once.
        StartError: the ranks could not be started.
        PayloadError: ``fn``, or something that it uses, cannot be pickled.
        UsageError: an argument is invalid.
    """
    if nprocs == 0:
        return None if join else ProcessContext([], [])
    options = LaunchOptions(nprocs=nprocs, start_method=start_method, daemon=daemon)
    context = _started(FunctionJob(fn, args, names=hooks.cell_names()), options)
    if not join:
        return _served(context)
    while not context.join():
        pass
    return None


def _started(job: FunctionJob, options: LaunchOptions, show_locals: bool = False) -> LocalContext:
    command = replace(job.command, show_locals=show_locals)
    return start(command, resolve_start(job, options), options, job.inherited)


def _served(context: LocalContext) -> LocalContext:
    """The context, for a caller who joins later: its store is there already. Nothing is left of an interrupted call."""
    try:
        context.serve()
    except BaseException:
        context.close()
        raise
    return context
