"""``nbspawn.Session``: ranks that stay, as an object."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from nbspawn._engine.jobs import CellJob, FunctionJob, Job
from nbspawn._engine.options import LaunchOptions
from nbspawn._protocol.messages import RunCell
from nbspawn._rank import namespace
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.background import BackgroundRun
from nbspawn._session.options import GRACE_PERIOD, CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import View
from nbspawn.errors import UsageError

T = TypeVar("T")


class RankSubset:
    """Some ranks of a session: ``session[2]``, ``session[1:]``, ``session[[0, 2]]``."""

    def __init__(self, pool: Pool, ranks: Sequence[int]) -> None:
        self._pool = pool
        self.ranks = tuple(ranks)
        """Their numbers."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, which: int | slice | Sequence[int]) -> RankSubset:
        chosen = [which] if isinstance(which, int) else range(len(self))[which] if isinstance(which, slice) else which
        try:
            ranks = sorted({self.ranks[number] for number in chosen})
        except (IndexError, TypeError):
            ranks = []
        if not ranks:
            raise UsageError(f"there is no rank {which!r} of {len(self)}")
        return RankSubset(self._pool, ranks)

    @overload
    def run(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        timeout: float | None = ...,
        background: Literal[False] = ...,
        **kwargs: Any,
    ) -> Results[T]: ...
    @overload
    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = ...,
        background: Literal[True],
        **kwargs: Any,
    ) -> BackgroundRun: ...
    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        background: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call ``fn(rank, *args, **kwargs)`` in each of these ranks.

        The function comes with the notebook's variables that it uses; names that a rank has bound itself stay its own.
        (Arguments of its own that are called ``timeout`` or ``background`` are given by ``functools.partial``.)

        Args:
            fn: any function; one of the notebook's too.
            timeout: seconds, instead of the session's.
            background: return at once.

        Returns:
            What it returned, a sequence over these ranks; a ``BackgroundRun`` with ``background``.

        Raises:
            RankRaisedError, RankExitedError: of the rank that failed first. A rank that raised lives on.
            RunTimeoutError: after ``timeout`` seconds. PayloadError: the function or an argument cannot travel.
            UsageError: ``fn`` is no function, or the ranks work on something.
        """
        if isinstance(fn, str):
            raise UsageError("run() takes a function: execute() takes source code")
        if not callable(fn):
            raise UsageError(f"run() takes a function, got {fn!r:.60}")
        return self._perform(FunctionJob(fn, args, kwargs, views.cell_names()), timeout, background)

    @overload
    def execute(self, code: str, *, timeout: float | None = ..., background: Literal[False] = ...) -> Results[Any]: ...
    @overload
    def execute(self, code: str, *, timeout: float | None = ..., background: Literal[True]) -> BackgroundRun: ...
    def execute(self, code: str, *, timeout: float | None = None, background: bool = False) -> Any:
        """Run source code as a cell in each of these ranks; it sees the rank's variables alone (``push`` sends some).

        Args, results and errors are those of ``run``; the value of a rank is that of the last expression.
        """
        if not isinstance(code, str):
            raise UsageError(f"execute() takes source code, got {code!r:.60}: run() takes a function")
        name = f"<execute {next(self._pool.numbers)}>"
        command = RunCell(textwrap.dedent(code), name, colors=views.colors())
        return self._perform(CellJob(command, {}), timeout, background)

    def push(self, variables: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Bind variables in each of these ranks, to copies of these values. Raises PayloadError for one that cannot
        travel."""
        self._quietly(namespace.bind, {**(variables or {}), **more})

    def pull(self, name: str) -> Results[Any]:
        """A variable of each of these ranks. Raises RankRaisedError (a NameError) where there is none."""
        return self._quietly(namespace.variable, name)

    def _quietly(self, fn: Callable[..., Any], *args: Any) -> Results[Any]:
        return self._pool.run(FunctionJob(fn, args), CommandOptions(view=views.StreamView()), self.ranks)

    def _perform(self, job: Job, timeout: float | None, background: bool) -> Results[Any] | BackgroundRun:
        return self._pool.perform(job, self.ranks, timeout, background)


class Session(RankSubset):
    """Ranks that stay, with their variables, until ``close``; a context manager, which starts them at its beginning.

        with nbspawn.Session(4, backend="gloo") as ranks:
            ranks.run(load_model)
            for loss in ranks.execute("train(1)"):
                print(loss)
            ranks[2].run(inspect_gradients)

    Args:
        nprocs: how many ranks, or 'gpu', 'cpu', 'xla', 'tpu' or 'auto': one a device of that kind.
        timeout: seconds, of each command that brings no own.
        grace_period: seconds between KeyboardInterrupt and SIGTERM when ranks have to be stopped.
        idle_timeout: seconds without a command after which the ranks end; None: never.
        view: how commands are shown; default: as the notebook does, else marked lines on ``sys.stdout``.

    The other arguments are those of ``nbspawn.spawn``. A rank that ends ends the session; ``restart`` starts it again.
    Raises UsageError for arguments that cannot be.
    """

    def __init__(
        self,
        nprocs: int | str,
        *,
        start_method: str = "auto",
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
        devices: Sequence[int] | None = None,
        threads: int | None = None,
        seed: int | None = None,
        log_dir: str | None = None,
        pdb: bool = False,
        debugpy: bool = False,
        show_locals: bool = False,
        timeout: float | None = None,
        grace_period: float = GRACE_PERIOD,
        idle_timeout: float | None = None,
        view: View | None = None,
    ) -> None:
        launch = LaunchOptions(
            nprocs=nprocs,
            start_method=start_method,
            backend=backend,
            env=env or {},
            devices=devices,
            threads=threads,
            seed=seed,
            log_dir=log_dir,
            keep=True,
            idle_timeout=idle_timeout,
            long_group_timeout=pdb,
            debugpy=debugpy,
        )
        command = CommandOptions(
            timeout=timeout, grace_period=grace_period, view=view, pdb=pdb, show_locals=show_locals
        )
        pool = Pool(launch, command)
        super().__init__(pool, range(pool.nprocs))

    def start(self) -> Session:
        """Start the ranks now, unless they live; the first command would do it as well. Returns this session."""
        self._pool.start()
        return self

    def restart(self) -> None:
        """End the ranks and start as many anew, in the same way, without any variables."""
        self._pool.restart()

    def close(self) -> None:
        """End the ranks: idle ones in good order, those that work on something in the background by force."""
        self._pool.close()

    @property
    def alive(self) -> bool:
        """Do all ranks live?"""
        return self._pool.alive

    @property
    def ended(self) -> str:
        """Why there are no ranks any more; '' if there are, or never were any."""
        return self._pool.ended

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, by rank. Raises StartError where there are none."""
        return self._pool.pids()

    def log_path(self, rank: int) -> str:
        """The file that holds all that the rank has printed. Raises StartError where there are no ranks."""
        return self._pool.log_path(rank)

    def __repr__(self) -> str:
        return f"<Session of {len(self)} ranks: {self.ended or ', '.join(dict.fromkeys(self._pool.states()))}>"

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.close()
