"""Starts ranks on this machine: settles the start method, packs the job, and has torch start the processes."""

from __future__ import annotations

import errno
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.multiprocessing

from nbspawn._engine import fork_safety, inherited, start_method, tpu, xla
from nbspawn._engine.context import LocalContext
from nbspawn._engine.directories import run_directories
from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._engine.logs import empty_logs
from nbspawn._engine.rendezvous import Rendezvous
from nbspawn._engine.resources import Resources
from nbspawn._engine.start_method import Choice
from nbspawn._payload import packing
from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn._rank import settings
from nbspawn._rank.launch import MARK, Launch, RunFiles, SentFd
from nbspawn._rank.main import main
from nbspawn._rank.settings import Settings
from nbspawn.errors import PayloadError, StartError, UsageError, interrupted


@dataclass(frozen=True)
class Options:
    """How ranks are started; what ``%%spawn`` and ``spawn`` take beside the job."""

    start_method: str = "auto"
    backend: str | None = None
    """The process group to make in each rank: 'gloo', 'nccl', 'xla', 'tpu_dist'; None leaves it to the person's own
    code."""
    accelerator: str = ""
    """'xla' (torch_xla) or 'tpu' (torch_tpu), which have to be made ready; '' for CUDA and the CPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside the kernel's."""
    devices: Sequence[int] | None = None
    """The CUDA devices that the ranks may see; None for all."""
    threads: int | None = None
    """Intra-op threads a rank; None: OMP_NUM_THREADS if it is set, else the cores shared out, at least 1."""
    log_dir: str | None = None
    """Where the logs go, and stay; None for a private directory."""
    keep: bool = False
    """Leave the ranks alive, for more to run."""
    patient: bool = False
    """Somebody may look at one rank for long, so the group of ``backend`` gets a day's timeout."""
    debugpy: bool = False
    """Have each rank listen for a debugger (VS Code's) on a loopback port of its own."""
    seed: int | None = None
    """Rank r begins with the random numbers of ``seed`` + r; None: with fresh ones."""
    daemon: bool = False
    """As in multiprocessing; a daemonic rank cannot have children, such as DataLoader workers."""


@dataclass(frozen=True)
class FunctionJob:
    """``fn(rank, *args)`` in every rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """What IPython calls the notebook's cells, by file name."""
    pdb: bool = False
    show_locals: bool = False
    kind = "function"
    source = ()
    sources = ()

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"{getattr(self.fn, '__name__', 'a function')}()"

    @property
    def variables(self) -> dict[str, Any]:
        """What the ranks need."""
        return {"fn": self.fn, "args": self.args}

    def pack(self, descriptors: int | None) -> tuple[packing.Packed, RunFunction]:
        """Everything by value that the function uses of ``__main__``, at most so many ``descriptors`` beside it."""
        packed = packing.pack_variables(self.variables, namespace=vars(sys.modules["__main__"]), most=descriptors)
        return packed, replace(self.command, job=packed.sizes)

    @property
    def command(self) -> RunFunction:
        """As it is sent, but for the job."""
        return RunFunction(self.names, pdb=self.pdb, show_locals=self.show_locals)

    def inherited(self) -> tuple[Any, RunFunction]:
        """Under fork nothing travels."""
        return self.variables, self.command


@dataclass(frozen=True)
class CellJob:
    """A notebook cell and the variables that it uses (``required``, and those it may use) of ``namespace``."""

    command: RunCell
    namespace: dict[str, Any]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    kind = "cell"

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return self.names.get(self.command.filename, "a cell")

    @property
    def sources(self) -> Collection[str]:
        """The files of the notebook's other cells, which its ranks are told of."""
        return self.command.sources

    @property
    def source(self) -> tuple[str, ...]:
        """The cell's lines, as the person sees them."""
        first, *rest = self.command.source.split("\n")
        typed = self.command.first_line.rstrip("\n")
        return (typed if typed and first.startswith("# %%") else first, *rest)

    @property
    def names(self) -> Mapping[str, str]:
        """What IPython calls the notebook's cells, by file name."""
        return self.command.names

    @property
    def variables(self) -> dict[str, Any]:
        """What the cell uses, and only that."""
        return {name: self.namespace[name] for name in self.required | self.optional if name in self.namespace}

    def pack(self, descriptors: int | None) -> tuple[packing.Packed, RunCell]:
        """The variables, and what they use in their turn, with at most so many ``descriptors`` beside them."""
        optional = self.optional - self.required
        packed = packing.pack_variables(self.variables, optional, self.namespace, descriptors)
        return packed, replace(self.command, job=packed.sizes)

    def inherited(self) -> tuple[Any, RunCell]:
        """Under fork a rank has the notebook's variables already."""
        packing.track_classes(self.namespace)
        return {}, self.command


Job = FunctionJob | CellJob

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_DESCRIPTORS_A_RANK = 7  # a channel, a log, two or four pipes to the process, a connection to the store
_DESCRIPTORS_A_RUN = 32


def settle(job: Job, options: Options, interrupted: InterruptFlag | None = None) -> tuple[Choice, Any]:
    """The start method, and the job packed if the method needs it. Errors as in ``start_method.choose``, and
    KeyboardInterrupt if somebody ``interrupted`` it."""
    needed = (xla.PACKAGE,) if options.accelerator == "xla" else ()
    environment = {**os.environ, **_visible(options), **options.env}
    descriptors = None if options.start_method == "spawn" else packing.DESCRIPTORS
    return start_method.choose(
        options.start_method,
        partial(pack, job, interrupted, descriptors),
        job.variables,
        job.kind,
        needed,
        environment,
        bool if interrupted is None else lambda: interrupted.count,
    )


def pack(
    job: Job, interrupted_by: InterruptFlag | None = None, descriptors: int | None = None
) -> tuple[packing.Packed, Any]:
    """The job's variables packed, with at most so many ``descriptors`` beside them (None: any number), and its command.
    Raises PayloadError that names the variable that cannot travel, and KeyboardInterrupt: how an object is pickled is
    the code of its class, which may take for ever."""
    try:
        with nullcontext() if interrupted_by is None else interrupted_by.as_exception():
            return job.pack(descriptors)
    except KeyboardInterrupt:
        raise interrupted((), "nothing was started: the variables that the ranks need were being packed") from None
    except packing.Unpackable as stuck:
        part = stuck.path.rpartition(" -> ")[2]
        culprit = part if part == stuck.variable else f"{stuck.variable} (it uses {part})"
        raise PayloadError(str(stuck), culprit) from None


def fill(packed: packing.Packed, give_up: Callable[[], object] = lambda: False) -> None:
    """Write what was packed. Raises StartError if there is no room."""
    try:
        packed.fill(give_up)
    except OSError as refusal:
        raise StartError(
            f"the {sum(packed.sizes) / 1e6:,.0f} MB that the ranks need cannot be put into shared memory: "
            f"{refusal.strerror}. Send less, or have the ranks load it themselves."
        ) from None


def start(job: Job, nprocs: int, choice: Choice, packed: Any, options: Options) -> LocalContext:
    """Start ``nprocs`` ranks and return at once; ``choice`` and ``packed`` are what ``settle`` gave.

    Raises StartError if the operating system refuses or this process holds the TPU, UsageError for a log directory that
    cannot be used, a debugpy that is not there or ranks that the accelerator cannot have, and KeyboardInterrupt if one
    came meanwhile; then no rank is left.
    """
    with ExitStack() as undo, InterruptFlag() as flag:
        if packed is not None:
            undo.callback(packed[0].close)
        _check_descriptors(nprocs)
        if options.debugpy and importlib.util.find_spec("debugpy") is None:
            raise UsageError("there is no debugpy in this environment: `pip install debugpy`")
        try:
            files, logs = _run_files(options.log_dir, nprocs)
            undo.callback(run_directories.done, files, keep=False)
            for fd in logs:
                undo.callback(inherited.close, fd)
            resources = Resources(files, nprocs)
            undo.callback(resources.close)  # the end of the lifeline is the end of the ranks that did start
            launch = _launch(job, nprocs, choice, packed, options, files, resources.rendezvous)
            with _ended_if_it_fails(), ThreadPoolExecutor(1) as meanwhile:
                filled = meanwhile.submit(fill, packed[0], lambda: flag.count) if packed is not None else None
                with _starting(files, choice):
                    started = torch.multiprocessing.start_processes(
                        main, (launch,), nprocs, join=False, daemon=options.daemon, start_method=choice.torch_name
                    )
                if filled is not None:
                    filled.result()
                context = LocalContext(started, files, resources, launch, logs)
        except (OSError, EOFError) as refusal:
            told = f"the system did not start {nprocs} ranks: {refusal}"
            if getattr(refusal, "errno", None) in _NO_ROOM:
                told += f" in {tempfile.gettempdir()!r}. Make room there, or start the kernel with another TMPDIR."
            raise StartError(told) from None
        undo.pop_all()
        if packed is not None:
            packed[0].close()
        if flag.count:
            context.close()
            # The error keeps this frame, and with it what it names: the processes, with three descriptors each.
            del context, started
            raise interrupted(())
    return context


def _run_files(log_dir: str | None, nprocs: int) -> tuple[RunFiles, list[int]]:
    """The run's files, and its logs, opened."""
    files = run_directories.new(log_dir, nprocs)
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


def _check_descriptors(nprocs: int) -> None:
    """Running out of file descriptors half-way would leave the whole kernel unable to open anything."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = len(os.listdir("/dev/fd")) + nprocs * _DESCRIPTORS_A_RANK + _DESCRIPTORS_A_RUN
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise StartError(
            f"{nprocs} ranks need {needed} open files in this process, and the system allows {limit}: "
            "choose fewer ranks, or raise the limit (ulimit -n) and start the kernel again"
        )


def _launch(
    job: Job, nprocs: int, choice: Choice, packed: Any, options: Options, files: RunFiles, rendezvous: Rendezvous
) -> Launch:
    if options.accelerator == "tpu":
        tpu.prepare(nprocs)
    threads = options.threads or default_threads(nprocs)
    if choice.method == "fork" and not fork_safety.openmp_can_be_paused():
        threads = 1
    env = {**os.environ, **rendezvous.environment(nprocs), "OMP_NUM_THREADS": str(threads)}
    env[MARK] = ":".join([*filter(None, [os.environ.get(MARK)]), os.fspath(files.private)])
    # gloo looks the host's own name up for an interface to use, and that name need not resolve.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    env.update(_visible(options))
    env.update(options.env)
    if options.accelerator == "xla":
        env.update(xla.prepare(nprocs, env))
    job_of_ranks: dict[str, Any]
    if packed is None:
        inherited_job, command = job.inherited()
        new = {name: value for name, value in env.items() if os.environ.get(name) != value}
        job_of_ranks = {
            "env": new,
            "command": command,
            "inherited": inherited_job,
            "foreign": inherited.kernel_sockets(),
        }
        job_of_ranks["settings"] = Settings()  # inherited, too
    else:
        blob, command = packed
        job_of_ranks = {"env": env, "command": command, "payload": tuple(map(SentFd, blob.fds)), "beside": blob.beside}
        job_of_ranks["settings"] = settings.read()
    return Launch(
        world_size=nprocs,
        method=choice.method,
        files=files,
        threads=threads,
        sys_path=list(sys.path),
        seed=options.seed,
        backend=options.backend,
        accelerator=options.accelerator,
        keep=options.keep,
        patient=options.patient or options.debugpy or options.keep,
        debugpy=options.debugpy,
        **job_of_ranks,
    )


def _visible(options: Options) -> dict[str, str]:
    return {} if options.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, options.devices))}


def default_threads(nprocs: int) -> int:
    """OMP_NUM_THREADS if the person has set it, else an equal share of the cores that this process may use."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    except (KeyError, ValueError):
        return max(1, cores() // nprocs)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _starting(files: RunFiles, choice: Choice) -> Iterator[None]:
    """What has to be so while torch starts the ranks."""
    if choice.method == "fork":
        fork_safety.pause_openmp()
        for stream in (sys.stdout, sys.stderr):  # what is buffered here would be printed again by every rank
            stream.flush()
    # A rank inherits the mask, and lifts it when it has its own handler (_rank/process.py): until then an interrupt of
    # the kernel's group, or the end of the thread that starts it (torch asks for SIGINT then), would end it silently.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings(), _private_error_files(files):
            # 3.12+ warns of every fork in a process with threads, and a kernel always has some.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
