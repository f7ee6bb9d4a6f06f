"""``%%spawn``: parse the line, hand the cell on, show what comes back; nothing else."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class

from nbspawn.notebook import arguments


@magics_class
class SpawnMagics(Magics):
    """The magics of ``%load_ext nbspawn``."""

    @cell_magic
    def spawn(self, line: str, cell: str) -> Any:
        # IPython shows the docstring at `%%spawn?`: it is the usage, set below.
        from nbspawn.engine.devices import count_ranks
        from nbspawn.engine.launch import Options
        from nbspawn.errors import RankExitedError, RankRaisedError, UsageError
        from nbspawn.notebook import cell as cells
        from nbspawn.notebook import front_end
        from nbspawn.session import GRACE_PERIOD, Session

        given = arguments.parse(line)
        if given.help:
            print(arguments.PARSER.format_help())
            return None
        if not cell.strip():
            raise UsageError("the cell is empty: write what the ranks should run below the %%spawn line")
        shell = self.shell
        options = Options(
            given.start_method,
            given.backend,
            dict(given.env),
            given.devices,
            given.threads,
            given.log_dir,
            given.pdb or shell.call_pdb,
            given.debugpy,
            given.locals,
        )
        grace = GRACE_PERIOD if given.grace_period is None else given.grace_period
        session = Session(
            count_ranks(given.nprocs), options, given.timeout, grace, front_end.view(shell, given.view, given.lines)
        )
        try:
            job = cells.job(shell, line, cell)
            results = session.run(job)
        except (RankRaisedError, RankExitedError) as error:
            error.lines += tuple(cells.advice(shell, error.summary))
            error.args = (error.summary,)  # the cell shows the traceback by itself; this is the front end's one line
            if shell.call_pdb:
                cells.debugged_already(shell)
            raise
        if given.out:
            shell.user_ns[given.out] = results
            return None
        return None if results.empty or job.command.silent else results


SpawnMagics.spawn.__doc__ = arguments.PARSER.format_help()
