"""One command that ranks have been sent: shown, and supervised to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nbspawn._engine.base import Engine
from nbspawn._engine.jobs import Job
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._engine.start import single_process_objects
from nbspawn._results import Results
from nbspawn._session.options import CommandOptions
from nbspawn._session.started import StartedRanks
from nbspawn._session.supervisor import Supervisor
from nbspawn._state.run import Run
from nbspawn.errors import PayloadError


class Command:
    """A command of the ``selected`` ranks, sent at the moment ``started`` (CLOCK_MONOTONIC seconds); its view is open
    when it has been made. ``release`` frees what was held for it."""

    def __init__(
        self,
        ranks: StartedRanks,
        job: Job,
        selected: Sequence[int],
        options: CommandOptions,
        interrupts: InterruptFlag,
        started: float,
        release: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self.interrupts = interrupts
        self.supervisor = Supervisor(options, ranks.engine, interrupts)
        self._release = release
        self._begun = partial(_begun, job=job, selected=selected, started=started, banner=options.banner)
        self._run = self._begun(ranks)
        ranks.used = True
        self.supervisor.open(self._run)

    def finish(self, replace_ranks: Callable[[StartedRanks], None] | None) -> Results[Any]:
        """Supervise the command to its end; returns its results. Other ranks may be started instead, and
        ``replace_ranks``, if there is something that can."""

        def instead(stuck: PayloadError) -> tuple[Engine, Run]:
            assert self.ranks.instead is not None
            assert replace_ranks is not None
            self.ranks = self.ranks.instead(stuck)
            replace_ranks(self.ranks)
            run = self._begun(self.ranks)
            self.ranks.used = True
            return self.ranks.engine, run

        may = self.ranks.instead is not None and replace_ranks is not None
        try:
            return self.supervisor.results(
                self._run, lambda run: self.ranks.regroup_if_broken(run), instead if may else None
            )
        finally:
            self._release()
            self.ranks.cut = self.ranks.cut or self.supervisor.cut


def _begun(ranks: StartedRanks, job: Job, selected: Sequence[int], started: float, banner: str) -> Run:
    """What is known of the run when its command has been sent."""
    nprocs, engine = len(ranks.known), ranks.engine
    how, notes = (("kept ranks", ""), ()) if ranks.used else (ranks.how, ranks.notes)
    run = Run.new(nprocs, *how, engine.log_dir, started, engine.cell, job.source, job.names)
    if ranks.kept:
        run = run.of_kept(selected if ranks.used else None)
    if ranks.used:
        pids = dict(enumerate(engine.pids()))
        run = replace(run, ranks=tuple(replace(rank, pid=pids.get(rank.rank)) for rank in run.ranks))
    notes += (*engine.notes, *single_process_objects.notes(job.variables))
    hosts = tuple(filter(None, map(engine.host, range(nprocs))))
    logs = tuple(map(engine.log_path, range(nprocs))) if hosts else ()
    return replace(run, banner=banner, packed=ranks.packed, notes=notes, hosts=hosts, logs=logs)
