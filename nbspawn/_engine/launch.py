"""Starts ranks on this machine: resolves the start method, packs the job, and has torch start the processes."""

from __future__ import annotations

import errno
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.multiprocessing

from nbspawn._accelerators import kinds
from nbspawn._accelerators.accelerator import Unavailable
from nbspawn._carried import process_state, replaced, settings
from nbspawn._engine.jobs import Job, fill, pack
from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.directories import run_directories
from nbspawn._engine.kernel.door import door
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.run.local_context import LocalContext
from nbspawn._engine.run.logs import empty_logs
from nbspawn._engine.run.resources import Resources
from nbspawn._engine.start import fork_safety, start_method
from nbspawn._engine.start.forkserver import server
from nbspawn._engine.start.start_method import Start
from nbspawn._payload import packing
from nbspawn._process import open_files, pools, traced
from nbspawn._protocol.launch import MARK, Launch, RunFiles
from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn._protocol.payload import Inherited, Payload, Sent, SentFd
from nbspawn._protocol.place import Place
from nbspawn._protocol.settings import Settings
from nbspawn._rank.main import main
from nbspawn.errors import StartError, UsageError, interrupt_error

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_DESCRIPTORS_A_RANK = 7  # a channel, a log, two or four pipes to the process, a connection to the store
_DESCRIPTORS_A_RUN = 32


def resolve_start(job: Job, options: LaunchOptions, interrupts: InterruptFlag | None = None) -> Start:
    """The start method, and the job packed if the method needs it. Errors as in ``start_method.choose``, StartError if
    the current directory has been deleted, and KeyboardInterrupt if one of the ``interrupts`` comes."""
    if not process_state.has_directory():
        raise StartError(process_state.NO_DIRECTORY)
    return start_method.choose(
        options.start_method,
        partial(
            pack,
            replace(job, replaced=replaced.read()),
            interrupts,
            None if options.start_method == "spawn" else packing.DESCRIPTORS,
        ),
        job.variables,
        job.kind,
        kinds.named(options.accelerator),
        {**os.environ, **options.env},
        bool if interrupts is None else lambda: interrupts.count,
        job.modules,
        int(options.nprocs),
    )


def start(
    command: RunCell | RunFunction,
    how: Start,
    options: LaunchOptions,
    inherited_input: Callable[[], Any] = dict,
    place: Place | None = None,
    notebook: Settings | None = None,
    interrupts: InterruptFlag | None = None,
) -> LocalContext:
    """Start ranks on this machine, as many as ``options`` say, that run ``command``, and return at once. ``how`` is
    what ``resolve_start`` gave for the job. Under fork ``inherited_input`` gives the command's payload. ``place`` and
    the ``notebook``'s settings are for ranks that are only a part of all; by default they are all, and this process's.
    Whoever supervises the ranks gets those ``interrupts`` that come meanwhile: some ranks run the command already.

    Raises StartError if the operating system refuses or this process holds the TPU, UsageError for a log directory that
    cannot be used, a debugpy that is not there or ranks that the accelerator cannot have, and KeyboardInterrupt if one
    came meanwhile that nobody gets, or before the ranks had what they need; then no rank is left.
    """
    nprocs, packed, gave_up = int(options.nprocs), how.packed, False

    def cancelled() -> bool:
        nonlocal gave_up
        gave_up = gave_up or flag.count > 0
        return gave_up

    with ExitStack() as undo, InterruptFlag() as flag:
        if packed is not None:
            undo.callback(packed.close)
        descriptors.check_limit(nprocs, "ranks", nprocs * _DESCRIPTORS_A_RANK + _DESCRIPTORS_A_RUN)
        if options.debugpy and importlib.util.find_spec("debugpy") is None:
            raise UsageError("there is no debugpy in this environment: `pip install debugpy`")
        try:
            files, logs = _run_files(options.log_dir, nprocs)
            undo.callback(run_directories.done, files, keep=False)
            for fd in logs:
                undo.callback(descriptors.close, fd)
            resources = Resources(files, nprocs)
            undo.callback(resources.close)  # the end of the lifeline is the end of the ranks that did start
            command = replace(command, payload=_payload(how, inherited_input))
            notebook = settings.read() if notebook is None else notebook
            place = place or Place.alone(nprocs)
            launch = _launch(command, notebook, how, options, files, place, resources.rendezvous.port)
            environment = {**os.environ, **options.env}
            with server.starting(environment, cancelled), _ended_if_it_fails(), ThreadPoolExecutor(1) as meanwhile:
                filled = meanwhile.submit(fill, packed, cancelled) if packed is not None else None
                with _starting(files, how):
                    started = torch.multiprocessing.start_processes(
                        main, (launch,), nprocs, join=False, daemon=options.daemon, start_method=how.torch_name
                    )
                if filled is not None:
                    filled.result()
                context = LocalContext(started, files, resources, launch, logs)
        except (OSError, EOFError) as refusal:
            message = f"the system did not start {nprocs} ranks: {refusal}"
            if getattr(refusal, "errno", None) in _NO_ROOM:
                message += f" in {tempfile.gettempdir()!r}. Make room there, or start the kernel with another TMPDIR."
            raise StartError(message) from None
        undo.pop_all()
        if packed is not None:
            packed.close()
        if flag.count and (gave_up or interrupts is None):
            context.close()
            run_directories.done(files, keep=False)  # also logs of ranks that failed for want of what was not sent
            # The error keeps this frame, and with it what it names: the processes, with three descriptors each.
            del context, started
            raise interrupt_error(())
        if interrupts is not None:
            interrupts.press(flag.count)
    return context


def _run_files(log_dir: str | None, nprocs: int) -> tuple[RunFiles, list[int]]:
    """The run's files, and its logs, opened."""
    if log_dir is not None and "\0" in log_dir:
        raise UsageError(f"log_dir {log_dir!r:.200} is no directory: it holds a NUL")
    try:
        files = run_directories.new(log_dir, nprocs)
    except RuntimeError as refusal:  # a home that is not known
        raise UsageError(f"log_dir {log_dir!r:.200} is no directory: {refusal}") from None
    try:
        return files, empty_logs(files, nprocs)
    except BaseException as refusal:
        run_directories.done(files, keep=False)
        if log_dir is None or not isinstance(refusal, OSError):
            raise
        raise UsageError(
            f"no logs can be written to {log_dir!r}: {refusal.strerror}. "
            "Give --log-dir (log_dir) a directory that you may write to."
        ) from None


def _payload(how: Start, inherited_input: Callable[[], Any]) -> Payload:
    packed = how.packed
    if packed is None:
        return Inherited(inherited_input())
    return Sent(tuple(map(SentFd, packed.fds)), packed.sizes, packed.spawn_arguments)


def _launch(
    command: RunCell | RunFunction,
    notebook: Settings,
    how: Start,
    options: LaunchOptions,
    files: RunFiles,
    place: Place,
    port: int,
) -> Launch:
    nprocs = int(options.nprocs)
    threads = options.threads or default_threads(nprocs)
    env = {**os.environ, **place.environment(port), "OMP_NUM_THREADS": str(threads)}
    env[MARK] = ":".join([*filter(None, [os.environ.get(MARK)]), os.fspath(files.private)])
    # gloo looks the host's own name up for an interface to use, and that name need not resolve.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    env.update(options.env)
    if options.threads is None:  # of a new process: torch asks MKL, which keeps to the cores
        threads = pools.number(env.get("MKL_NUM_THREADS"), env.get("OMP_NUM_THREADS")) or threads
        threads = min(threads, cores()) if torch.backends.mkl.is_available() else threads
    if how.method == "fork" and not fork_safety.openmp_can_be_paused():
        threads, env["OMP_NUM_THREADS"] = 1, "1"
    accelerator = kinds.named(options.accelerator)
    if accelerator.is_held(env):
        raise StartError(fork_safety.holds_the_tpu(accelerator.type))
    try:
        env.update(accelerator.prepare(nprocs, env))
    except Unavailable as refusal:
        raise UsageError(str(refusal)) from None
    if how.packed is None:
        env = {name: value for name, value in env.items() if os.environ.get(name) != value}
    return Launch(
        place=place,
        method=how.method,
        files=files,
        env=env,
        threads=threads,
        sys_path=list(sys.path),
        seed=options.seed,
        backend=options.backend,
        accelerator=options.accelerator,
        keep=options.keep,
        long_group_timeout=options.pdb or options.debugpy or options.keep or door.is_open(),
        debugpy=options.debugpy,
        door=door.path(),
        settings=notebook,
        process=process_state.read() if how.method == "forkserver" and place.master is None else None,
        default_method=multiprocessing.get_start_method(allow_none=True),
        command=command,
        foreign=descriptors.kernel_sockets() if how.packed is None else (),
    )


def default_threads(nprocs: int) -> int:
    """OMP_NUM_THREADS if the user has set it, else an equal share of the cores that this process may use."""
    return pools.number(os.environ.get("OMP_NUM_THREADS")) or max(1, cores() // nprocs)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _starting(files: RunFiles, how: Start) -> Iterator[None]:
    """What has to be so while torch starts the ranks."""
    if how.method == "fork":
        fork_safety.pause_openmp()
        pools.find()
        for stream in (sys.stdout, sys.stderr):  # what is buffered here would be printed again by every rank
            stream.flush()
        for file in open_files.named_in(vars(sys.modules["__main__"])):  # and what is buffered for these, written again
            with suppress(OSError):  # which the user hears of when they write it out themselves
                file.flush()
    # A rank inherits the mask, and lifts it when it has its own handler (_rank/program/process.py): until then an
    # interrupt of the kernel's group, or the end of the thread that starts it (torch asks for SIGINT then), would end
    # it silently.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings(), _private_error_files(files), traced.not_in_children(), _flushed_once():
            # 3.12+ warns of every fork in a process with threads, and a kernel always has some.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _flushed_once() -> Iterator[None]:
    """multiprocessing flushes both streams before each process, which is to wait for ipykernel's thread each time:
    1 ms, and ranks print to a log. (That thread goes on to send what is written.)"""
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "pub_thread")]
    try:
        for stream in streams:
            vars(stream).setdefault("flush", lambda: None)
        yield
    finally:
        for stream in streams:
            vars(stream).pop("flush", None)


@contextmanager
def _ended_if_it_fails() -> Iterator[None]:
    """Ranks that a start which fails half-way leaves are ended."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
            process.close()
        raise


@contextmanager
def _private_error_files(files: RunFiles) -> Iterator[None]:
    """torch names its error files in the shared temp directory, and reads them back with pickle: anybody who creates
    one first could run code here. For ``torch.multiprocessing.spawn`` alone that directory becomes the private one."""
    module: Any = sys.modules["torch.multiprocessing.spawn"]  # the attribute of that name is torch's function
    shared = module.tempfile
    module.tempfile = types.SimpleNamespace(NamedTemporaryFile=partial(tempfile.NamedTemporaryFile, dir=files.private))
    try:
        yield
    finally:
        module.tempfile = shared
