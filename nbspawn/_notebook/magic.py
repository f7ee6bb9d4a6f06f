"""``%%spawn``, ``%%ranks`` and ``%ranks``: parse the line, pass on the cell, show the result; nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from IPython.core import error
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from nbspawn._carried import process_state
from nbspawn._engine.kernel import interrupt_flag
from nbspawn._notebook import arguments, front_end
from nbspawn._notebook.auto import AutoMode
from nbspawn._process import traced

if TYPE_CHECKING:
    from nbspawn._engine.jobs import CellJob
    from nbspawn._session.pool import Pool

_IMPORTS = "torch is being imported into the notebook, for its first ranks …"
_AUTO = "⇉ AUTO MODE: every plain cell runs in these ranks, until `%ranks auto off`"


def _without_own_frames(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Raise errors without nbspawn's own frames, for handlers that do not ask ``_render_traceback_``: rich's would show
    the way through nbspawn. The front end's debugger doesn't see them, either."""

    @wraps(magic)
    def run(*args: Any) -> Any:
        _rich_traceback_guard = True  # rich leaves out the frames up to this one
        try:
            with traced.suspended():
                return magic(*args)
        except BaseException as error:
            if hasattr(error, "_render_traceback_"):
                raise error.with_traceback(None) from error.__cause__
            raise

    return run


@magics_class
class SpawnMagics(Magics):
    """The magics of ``%load_ext nbspawn``. ``sessions`` maps names to kept ranks and background runs; '' is the name of
    kept ranks without one."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.sessions: dict[str, Pool] = {}
        self.auto = AutoMode(shell)

    @cell_magic
    @_without_own_frames
    def spawn(self, line: str, cell: str) -> Any:
        # IPython shows the docstring at `%%spawn?`: it is the usage, set below.
        if "torch" not in sys.modules and not process_state.has_directory():
            raise error.UsageError(process_state.NO_DIRECTORY)  # an import of torch would end this process: MKL exits
        first = "torch" not in sys.modules
        with front_end.saying(self.shell, _IMPORTS) if first else nullcontext(), interrupt_flag.deferred():
            from nbspawn._notebook import cell as cells
            from nbspawn._notebook import ranks
            from nbspawn._session.pool import Pool
            from nbspawn.errors import UsageError

        given = arguments.parse(line)
        if given.help:
            print(arguments.PARSER.format_help())
            return None
        _refuse_empty(cell, "%%spawn")
        if given.name and not (given.keep or given.background):
            raise UsageError("--name needs --keep or --background: other ranks end with the cell")
        name = ranks.name_for(self.sessions, given)
        pool = Pool(arguments.launch_options(given, self.shell.call_pdb))
        _refuse_absent(given, pool)
        job = cells.job(self.shell, line, cell)
        try:
            return self._run(pool, job, given)
        finally:
            if given.keep or given.background:
                self.sessions[name] = pool

    @line_cell_magic
    @_without_own_frames
    def ranks(self, line: str, cell: str | None = None) -> Any:
        with interrupt_flag.deferred():
            from nbspawn._notebook import cell as cells
            from nbspawn._notebook import ranks
            from nbspawn.errors import UsageError

        if cell is None:
            return ranks.do(line, self.sessions, self.auto)
        given = arguments.parse(line, arguments.RANKS_PARSER)
        if given.help:
            print(arguments.RANKS_PARSER.format_help())
            return None
        _refuse_empty(cell, "%%ranks")
        pool = ranks.find(self.sessions, arguments.session_name(given.which), self.auto)
        if absent := [name for name in given.push if name not in self.shell.user_ns]:
            raise UsageError(f"the notebook has no variable {absent[0]!r} to push")
        if given.background and given.pull:
            raise UsageError("--pull cannot be used with --background: pull in another cell, after handle.result()")
        asked = arguments.selected(given.which, pool.nprocs)
        _refuse_absent(given, pool)
        if given.autoreload:
            pool.follow_edits()
        job = cells.job(self.shell, line, cell, "" if given.auto else "%%ranks", given.push)
        result = self._run(pool, job, given, asked)
        for name in given.pull:
            self.shell.user_ns[name] = ranks.pulled(pool, asked, name)
        return result

    def _run(self, pool: Pool, job: CellJob, given: Any, asked: Sequence[int] | None = None) -> Any:
        from nbspawn._notebook import cell as cells
        from nbspawn._notebook import gpu_memory
        from nbspawn._payload.diagnosis import RETURN_ANOTHER
        from nbspawn._state.wording import name_ranks
        from nbspawn.errors import RankExitedError, RankRaisedError

        shell = self.shell
        on_memory = partial(gpu_memory.advice, shell.user_ns, pool, self.sessions)
        options = arguments.command_options(
            given,
            shell.call_pdb,
            None if given.background else front_end.view(shell, given),
            _AUTO if getattr(given, "auto", False) else "",
            partial(cells.explain, shell, pool=pool, kept=asked is not None, on_memory=on_memory),
        )
        if given.background:
            view = front_end.background_view(shell, given)
            outcome: Any = pool.run_in_background(job, options, view, asked)
            silent, unsent = False, {}
        else:
            try:
                outcome = pool.run(job, options, asked)
            except (RankRaisedError, RankExitedError):
                if shell.call_pdb:
                    cells.debugged_already(shell)
                raise
            silent, unsent = outcome.empty or job.command.silent, outcome.unsent
        if given.out:
            shell.user_ns[given.out] = outcome
            if unsent:
                only = f"{given.out} has the text only of what {name_ranks(unsent).lower()} returned"
                print(f"{only}: {next(iter(unsent.values()))}. {RETURN_ANOTHER}")
            return None
        return None if silent else outcome


def _refuse_empty(cell: str, magic: str) -> None:
    from nbspawn.errors import UsageError

    if not cell.strip():
        raise UsageError(f"the cell is empty: write what the ranks should run below the {magic} line")


def _refuse_absent(given: Any, pool: Pool) -> None:
    from nbspawn.errors import UsageError

    if absent := [rank for rank in given.local_ranks_filter or () if rank >= pool.nprocs]:
        raise UsageError(f"--local-ranks-filter {absent[0]}: there is no such rank, the last one is {pool.nprocs - 1}")


SpawnMagics.spawn.__doc__ = arguments.PARSER.format_help()
SpawnMagics.ranks.__doc__ = arguments.RANKS_PARSER.format_help()
