"""The functions: torch.multiprocessing's ``spawn`` and ``start_processes``, with everything that a notebook needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

from torch.multiprocessing import ProcessContext

from nbspawn._engine.context import LocalContext
from nbspawn._engine.devices import resolve
from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.launch import resolve_start, start
from nbspawn._engine.options import LaunchOptions
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.options import GRACE_PERIOD, CommandOptions
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
@overload
def spawn(
    fn: Callable[..., T],
    args: tuple[Any, ...] = ...,
    nprocs: int | str = ...,
    join: bool = ...,
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
) -> Results[T] | LocalContext: ...
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
) -> Results[Any] | LocalContext:
    """Call ``fn(rank, *args)`` in ``nprocs`` new ranks: torch.multiprocessing's ``spawn``, for notebooks too.

    Args:
        fn: any function; one that is defined in a cell or in ``__main__`` travels by value, with what it uses.
        args: its arguments after the rank. multiprocessing's queues, locks and events and shared tensors may be among
            them.
        nprocs: how many ranks, or 'gpu', 'cpu', 'xla', 'tpu' or 'auto': one a device of that kind.
        join: wait, show what the ranks print, and return their Results; else return a context at once. Then nobody
            watches the ranks: timeout, grace_period, view, pdb and debugpy are refused.
        daemon: as in multiprocessing.
        start_method: 'auto', 'fork', 'forkserver' or 'spawn' (auto: the fork server if what is used can travel).
        backend: make and destroy a process group around ``fn``: 'gloo', 'nccl', 'xla' (torch_xla), 'tpu_dist'
            (torch_tpu), or 'auto' for the one that fits.
        env: environment variables for the ranks, beside the kernel's.
        devices: the CUDA devices that the ranks may see.
        threads: intra-op threads a rank; default OMP_NUM_THREADS, else the cores shared out.
        seed: repeat a run's random numbers: rank r begins with ``seed`` + r for ``random``, numpy and torch; default:
            fresh ones in every rank and every run.
        timeout: seconds; afterwards RunTimeoutError says where every rank stood.
        grace_period: seconds between KeyboardInterrupt and SIGTERM when ranks have to be stopped; default 3.
        log_dir: where each rank's whole output goes, and stays.
        pdb: open the debugger in a rank that raises, at the line that raised; its peers wait meanwhile.
        debugpy: have each rank listen for a debugger (VS Code's) on a loopback port of its own.
        show_locals: show the variables of the frame that raised, in the error.
        view: how the run is shown; default: as the notebook does, else marked lines on ``sys.stdout``.

    Returns:
        ``Results``, a sequence by rank of what ``fn`` returned; with ``join=False`` a ``LocalContext``, which is a
        torch ``ProcessContext`` with ``interrupt()``, ``terminate(grace_period)`` and ``results()`` beside it.

    Raises:
        RankRaisedError, RankExitedError: of the rank that failed first.
        StartError, PayloadError, UsageError: nothing was started.
        RunTimeoutError: after ``timeout`` seconds.
        KeyboardInterrupt: the user stopped it.
    """
    if not join:
        _refuse_what_needs_a_supervisor(
            timeout=timeout, grace_period=grace_period, view=view, pdb=pdb or None, debugpy=debugpy or None
        )
    launch = LaunchOptions(
        nprocs=nprocs,
        start_method=start_method,
        backend=backend,
        env=env or {},
        devices=devices,
        threads=threads,
        seed=seed,
        log_dir=log_dir,
        long_group_timeout=pdb,
        debugpy=debugpy,
        daemon=daemon,
    )
    command = CommandOptions(
        timeout=timeout,
        grace_period=GRACE_PERIOD if grace_period is None else grace_period,
        view=view,
        pdb=pdb,
        show_locals=show_locals,
    )
    job = FunctionJob(fn, args, names=views.cell_names())
    if join:
        return Pool(launch, command).run(job)
    context = _started(job, resolve(launch), show_locals)
    context.serve()
    return context


def _refuse_what_needs_a_supervisor(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise UsageError(
            f"with join=False nobody watches the ranks, and {' and '.join(names)} would be ignored: use "
            "context.join(timeout, grace_period), or let spawn() wait (join=True)"
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

    With ``join`` it returns None when all ranks have ended well and raises RankRaisedError or RankExitedError
    otherwise, which are torch's ProcessRaisedException and ProcessExitedException; its peers get SIGTERM at once.
    Without, it returns a LocalContext to ``join``, or torch's empty one for no ranks at all.

    A KeyboardInterrupt that a rank raises itself is an error: the rank has not finished. torch takes it for success up
    to release 2.13.
    """
    if nprocs == 0:
        return None if join else ProcessContext([], [])
    options = LaunchOptions(nprocs=nprocs, start_method=start_method, daemon=daemon)
    context = _started(FunctionJob(fn, args, names=views.cell_names()), options)
    if not join:
        context.serve()
        return context
    while not context.join():
        pass
    return None


def _started(job: FunctionJob, options: LaunchOptions, show_locals: bool = False) -> LocalContext:
    command = replace(job.command, show_locals=show_locals)
    return start(job, command, resolve_start(job, options), options)
