"""``nbspawn.Session``: kept ranks, as an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from nbspawn._engine.jobs import CellJob, FunctionJob, Job
from nbspawn._engine.options import LaunchOptions, options_of
from nbspawn._payload.names import check
from nbspawn._protocol.messages import RunCell
from nbspawn._rank import jobs
from nbspawn._results import Results
from nbspawn._session import comparison, hooks, views
from nbspawn._session.background import BackgroundRun
from nbspawn._session.comparison import Difference
from nbspawn._session.options import GRACE_PERIOD, CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import View
from nbspawn.errors import UsageError

T = TypeVar("T")


def _if_python(code: str) -> str:
    """IPython, which takes an indentation away before it looks for magics, takes the blanks from lines in strings."""
    try:
        check(code, "<code>", hooks.compiler_flags())
    except (SyntaxError, ValueError):  # ValueError: a NUL
        return ""
    return code


class RankSubset:
    """Some ranks of a session: ``session[2]``, ``session[1:]``, ``session[[0, 2]]``.

    Attributes:
        ranks: the numbers of these ranks.
    """

    def __init__(self, pool: Pool, ranks: Sequence[int]) -> None:
        self._pool = pool
        self.ranks = tuple(ranks)
        """The numbers of these ranks."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, which: int | slice | Sequence[int]) -> RankSubset:
        chosen = [which] if isinstance(which, int) else range(len(self))[which] if isinstance(which, slice) else which
        try:
            ranks = sorted({self.ranks[number] for number in chosen})
        except (IndexError, TypeError):
            ranks = []
        if not ranks:
            raise UsageError(f"there is no rank {which!r}: the indices are 0 to {len(self) - 1}")
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

        The function is sent with the notebook's variables that it uses. Names that the rank itself has bound keep the
        rank's values. (Use ``functools.partial`` if ``fn`` itself has an argument ``timeout`` or ``background``.)

        Args:
            fn: any function; it may be defined in the notebook.
            *args: its arguments after the rank.
            timeout: seconds until the ranks are stopped; None: the session's timeout.
            background: return a handle at once.
            **kwargs: its keyword arguments.

        Returns:
            ``Results``, a sequence of what ``fn`` returned in these ranks. With ``background`` a ``BackgroundRun``.

        Raises:
            RankRaisedError: a rank raised; the error is that of the rank that failed first. The rank stays alive.
            RankExitedError: a rank has ended, which ends the session.
            RunTimeoutError: ``timeout`` seconds have passed.
            PayloadError: the function or an argument cannot be pickled.
            StartError: the ranks could not be started, or have ended.
            UsageError: ``fn`` is not a function, or the ranks are busy.
            KeyboardInterrupt: the user has stopped the command.
        """
        if isinstance(fn, str):
            raise UsageError("run() takes a function: execute() takes source code")
        if not callable(fn):
            raise UsageError(f"run() takes a function, got {fn!r:.60}")
        return self._perform(FunctionJob(fn, args, kwargs, hooks.cell_names()), timeout, background)

    @overload
    def execute(self, code: str, *, timeout: float | None = ..., background: Literal[False] = ...) -> Results[Any]: ...
    @overload
    def execute(self, code: str, *, timeout: float | None = ..., background: Literal[True]) -> BackgroundRun: ...
    def execute(self, code: str, *, timeout: float | None = None, background: bool = False) -> Any:
        """Run source code as a cell in each of these ranks.

        Args:
            code: the source code. It uses the rank's own variables; ``push`` sends variables to the ranks.
            timeout: seconds until the ranks are stopped; None: the session's timeout.
            background: return a handle at once.

        Returns:
            ``Results``, a sequence of the values of the last expression. With ``background`` a ``BackgroundRun``.

        Raises:
            RankRaisedError: a rank raised; the error is that of the rank that failed first. The rank stays alive.
            RankExitedError: a rank has ended, which ends the session.
            RunTimeoutError: ``timeout`` seconds have passed.
            StartError: the ranks could not be started, or have ended.
            UsageError: ``code`` is not a string, or the ranks are busy.
            KeyboardInterrupt: the user has stopped the command.
        """
        if not isinstance(code, str):
            raise UsageError(f"execute() takes source code, got {code!r:.60}: run() takes a function")
        name = f"<execute {next(self._pool.numbers)}>"
        command = RunCell(code, name, colors=hooks.colors(), transformed=_if_python(code), flags=hooks.compiler_flags())
        return self._perform(CellJob(command, {}), timeout, background)

    def push(self, variables: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Set variables in each of these ranks to copies of values.

        Args:
            variables: the values by name.
            **more: further values by name.

        Raises:
            PayloadError: a value cannot be pickled.
            StartError: the ranks could not be started, or have ended.
            UsageError: the ranks are busy.
        """
        self._quietly(jobs.bind, {**(variables or {}), **more})

    def pull(self, name: str) -> Results[Any]:
        """Fetch a variable of each of these ranks.

        Args:
            name: the name of the variable.

        Returns:
            ``Results``, a sequence of its values.

        Raises:
            RankRaisedError: a rank does not have the variable (a NameError).
            StartError: the ranks could not be started, or have ended.
            UsageError: the ranks are busy.
        """
        return self._quietly(jobs.variable, name)

    def diff(self, expression: str, *, rtol: float = 0.0, atol: float = 0.0) -> Difference:
        """Compare the value of an expression over these ranks: a tensor, a state dict, a module, an optimizer, anything
        made of such.

        Each rank evaluates the expression in its own variables. Ranks send digests, and a few chunks of what differs.
        Elements that differ by at most ``atol + rtol * abs(element)`` from those that most ranks have count as equal,
        and so do two NaN.

        Args:
            expression: the source code of the expression.
            rtol: the relative tolerance.
            atol: the absolute tolerance.

        Returns:
            A ``Difference``, which is true if the value differs. Its repr says where, and by how much.

        Raises:
            RankRaisedError: the expression raised in a rank. The rank stays alive.
            StartError: the ranks could not be started, or have ended.
            UsageError: ``expression`` is not one, or the ranks are busy.
        """
        expression, tolerance = comparison.checked(expression, rtol, atol)
        return self._pool.compare(self.ranks, expression, tolerance)

    def _quietly(self, fn: Callable[..., Any], *args: Any) -> Results[Any]:
        return self._pool.run(FunctionJob(fn, args), CommandOptions(view=views.StreamView()), self.ranks)

    def _perform(self, job: Job, timeout: float | None, background: bool) -> Results[Any] | BackgroundRun:
        return self._pool.perform(job, self.ranks, timeout, background)


class Session(RankSubset):
    """Kept ranks: they stay alive, with their variables, until ``close``. As a context manager it starts and ends
    them::

        with nbspawn.Session(4, backend="gloo") as ranks:
            ranks.run(load_model)
            for loss in ranks.execute("train(1)"):
                print(loss)
            ranks[2].run(inspect_gradients)

    The session ends when one of its ranks ends; ``restart`` starts it again.

    Args:
        nprocs: the number of ranks; or 'gpu', 'xla', 'tpu' (one per device), 'cpu' (one per core), 'auto' (what fits).
        start_method: as for ``nbspawn.spawn``.
        backend: as for ``nbspawn.spawn``.
        env: as for ``nbspawn.spawn``.
        devices: as for ``nbspawn.spawn``.
        threads: as for ``nbspawn.spawn``.
        seed: as for ``nbspawn.spawn``.
        log_dir: as for ``nbspawn.spawn``.
        pdb: as for ``nbspawn.spawn``.
        debugpy: as for ``nbspawn.spawn``.
        show_locals: as for ``nbspawn.spawn``.
        timeout: seconds until the ranks are stopped, for each command without a timeout of its own; None: no limit.
        grace_period: seconds between KeyboardInterrupt and SIGTERM when ranks are stopped.
        autoreload: before each command the ranks reload modules that were edited on disk.
        idle_timeout: seconds without a command after which the ranks are ended; None: never.
        view: how commands are shown; None: the notebook's default view, or in a script lines marked with their ranks
            on ``sys.stdout``.
        on: as for ``nbspawn.spawn``.
        nnodes: as for ``nbspawn.spawn``.

    Raises:
        UsageError: an argument is invalid.
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
        autoreload: bool = False,
        idle_timeout: float | None = None,
        view: View | None = None,
        on: str = "local",
        nnodes: int | None = None,
    ) -> None:
        given = locals()
        pool = Pool(options_of(LaunchOptions, {**given, "keep": True}), options_of(CommandOptions, given))
        super().__init__(pool, range(pool.nprocs))

    def start(self) -> Session:
        """Start the ranks now, unless they are alive. (Otherwise the first command starts them.)

        Returns:
            This session.

        Raises:
            StartError: the ranks could not be started.
        """
        self._pool.start()
        return self

    def restart(self) -> None:
        """End the ranks, and start them again with the same options, without their variables.

        Raises:
            StartError: the ranks could not be started.
        """
        self._pool.restart()

    def close(self) -> None:
        """End the ranks. Idle ranks exit cleanly; ranks that run in the background are killed."""
        self._pool.close()

    @property
    def alive(self) -> bool:
        """Are all ranks alive?"""
        return self._pool.alive

    @property
    def ended(self) -> str:
        """Why the ranks have ended; '' if they are alive, or were never started."""
        return self._pool.ended

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank.

        Raises:
            StartError: there are no ranks.
        """
        return self._pool.pids()

    def log_path(self, rank: int) -> str:
        """The path of the log with a rank's whole output.

        Args:
            rank: the number of the rank.

        Returns:
            The path.

        Raises:
            StartError: there are no ranks.
        """
        return self._pool.log_path(rank)

    def __repr__(self) -> str:
        return f"<Session of {len(self)} ranks: {self.ended or ', '.join(dict.fromkeys(self._pool.states()))}>"

    def _ipython_display_(self, **_: Any) -> None:
        hooks.display(self._pool, repr(self))

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.close()
