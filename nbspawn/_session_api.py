"""``nbspawn.Session``: ranks that stay, as an object."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbspawn._engine.devices import resolve
from nbspawn._engine.launch import CellJob, FunctionJob, Job, Options
from nbspawn._protocol.messages import RunCell
from nbspawn._rank import namespace
from nbspawn._rank.seeds import LARGEST
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.pool import Pool
from nbspawn._session.supervisor import GRACE_PERIOD, Terms
from nbspawn._session.views import View
from nbspawn.errors import UsageError


class Members:
    """Some ranks of a session: ``session[2]``, ``session[1:]``, ``session[[0, 2]]``."""

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self._session = session
        self.ranks = tuple(ranks)
        """Their numbers."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, which: int | slice | Sequence[int]) -> Members:
        chosen = [which] if isinstance(which, int) else range(len(self))[which] if isinstance(which, slice) else which
        try:
            ranks = sorted({self.ranks[number] for number in chosen})
        except (IndexError, TypeError):
            ranks = []
        if not ranks:
            raise UsageError(f"there is no rank {which!r} of {len(self)}")
        return Members(self._session, ranks)

    def run(self, what: Callable[..., Any] | str, *args: Any) -> Results:
        """Call ``what(rank, *args)`` in each of these ranks, or run it as a cell if it is source code, and wait.

        A function comes with the notebook's variables that it uses; names that a rank has bound itself stay its own. A
        cell sees the rank's variables alone. Raises as ``nbspawn.spawn``; a rank that raised lives on.
        """
        session = self._session
        job: Job
        if isinstance(what, str):
            if args:
                raise UsageError("source code takes no arguments: push() them to the ranks first")
            job = session.source_job(what)
        elif not callable(what):
            raise UsageError(f"run takes a function or source code, not {what!r:.60}")
        else:
            job = FunctionJob(what, args, views.cell_names(), session.pdb, session.show_locals)
        return session.perform(job, ranks=self.ranks)

    def push(self, variables: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Bind variables in each of these ranks, to copies of these values."""
        self._quietly(namespace.bind, {**(variables or {}), **more})

    def pull(self, name: str) -> Results:
        """A variable of each of these ranks. Raises RankRaisedError (a NameError) where there is none."""
        return self._quietly(namespace.variable, name)

    def _quietly(self, fn: Callable[..., Any], *args: Any) -> Results:
        return self._session.perform(FunctionJob(fn, args), Terms(view=views.StreamView()), self.ranks)


class Session(Pool, Members):
    """``nprocs`` ranks that stay, with their variables, from the first command until ``close``; a context manager.

        with nbspawn.Session(4, backend="gloo") as ranks:
            ranks.run(load_model)
            for loss in ranks.run("train(1)"):
                print(loss)
            ranks[2].run(inspect_gradients)

    The arguments are those of ``nbspawn.spawn``; ``timeout`` and ``grace_period`` are for each command. After
    ``idle_timeout`` seconds without one the ranks end. A rank that ends ends the session; ``restart`` starts it again.
    With ``keep=False`` the ranks end with the first command.
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
        daemon: bool = False,
        timeout: float | None = None,
        grace_period: float = GRACE_PERIOD,
        idle_timeout: float | None = None,
        view: View | None = None,
        keep: bool = True,
    ) -> None:
        ranks, backend, accelerator = resolve(nprocs, backend, env or {}, devices)
        if seed is not None and not (isinstance(seed, int) and 0 <= seed <= LARGEST):
            raise UsageError(f"a seed is a number from 0 to {LARGEST}, not {seed!r:.60}")
        if idle_timeout is not None and not keep:
            raise UsageError("idle_timeout is for ranks that stay, and with keep=False none do: leave one of them out")
        options = Options(
            start_method,
            backend,
            accelerator,
            env or {},
            devices,
            threads,
            log_dir,
            keep,
            pdb,
            debugpy,
            seed=seed,
            daemon=daemon,
        )
        Pool.__init__(self, ranks, options, Terms(timeout, grace_period, view), idle_timeout)
        Members.__init__(self, self, range(ranks))
        self.pdb, self.show_locals = pdb, show_locals
        self._cells = 0

    def source_job(self, source: str) -> CellJob:
        """Source code as a cell that is none of the notebook's."""
        self._cells += 1
        return CellJob(RunCell(textwrap.dedent(source), f"<run {self._cells}>", colors=views.colors()), {})

    def __repr__(self) -> str:
        return f"<Session of {self.nprocs} ranks: {self.ended or ', '.join(dict.fromkeys(self.states()))}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
