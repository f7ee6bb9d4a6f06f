"""The ranks of a run as torch's users know them: a ProcessContext to ``join`` or end, and the results."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from typing import Any

from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._engine.run.local import LocalRanks
from nbspawn._protocol.messages import Event, InputReply, InputRequest, Printed, Returned
from nbspawn._render.stream import MergedStream
from nbspawn._results import Results
from nbspawn.errors import rank_error

_TORCH_GRACE = 30.0  # seconds: torch's pause between SIGTERM and SIGKILL when no grace period is given


class LocalContext(LocalRanks):
    """What ``spawn`` and ``start_processes`` return with ``join=False``: torch's ProcessContext, and more. ``pids()``,
    ``processes`` and ``sentinels`` are torch's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        files = self.files  # not self: in a cycle, the ranks' values would wait for the garbage collector
        self._stream = MergedStream(self.nprocs, lambda rank: os.fspath(files.log(rank)), budget=sys.maxsize)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for the ranks, as torch's ``ProcessContext.join`` does. What they print goes to ``sys.stdout``.

        Args:
            timeout: seconds to wait; None for as long as it takes.
            grace_period: when a rank fails, the seconds that the others have to leave by themselves (None: none) before
                SIGTERM, and then again (None: 30 s) before SIGKILL.

        Returns:
            True if all ranks have ended well, False if ``timeout`` was not enough. Ranks that ``interrupt`` or
            ``terminate`` has stopped have not ended well.

        Raises:
            RankRaisedError, RankExitedError: of the rank that failed first, once its peers are stopped.
            KeyboardInterrupt: the wait was interrupted; the ranks run on.
        """
        end = None if timeout is None else time.monotonic() + max(0.0, timeout)
        with InterruptFlag() as interrupted:
            interrupted.wakes(self.wake)
            while True:
                self._pass_on(self.poll(math.inf if end is None else max(0.0, end - time.monotonic())))
                if self.failures and not self.stopping:
                    first = 0.0 if grace_period is None else grace_period
                    self.stop_at(term=first, kill=first + (_TORCH_GRACE if grace_period is None else grace_period))
                if self.all_exited or interrupted.count or (end is not None and time.monotonic() >= end):
                    break
        if interrupted.count:
            raise KeyboardInterrupt
        if not self.all_exited:
            return False
        unfinished = self.failures or self._command.outcomes.unfinished()
        self.close()
        if unfinished:
            raise rank_error(unfinished, self.nprocs)
        return True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt once in every rank that runs."""
        self._signal(signal.SIGINT)

    def terminate(self, grace_period: float = 0.0) -> None:
        """Send every rank SIGTERM now, and SIGKILL after ``grace_period`` seconds; ``poll`` and ``join`` do the
        rest."""
        self._end_all(term=0.0, kill=grace_period)

    def _pass_on(self, events: list[Event]) -> None:
        text = self._stream.feed([event for event in events if isinstance(event, Printed)])
        if self.all_exited:
            text += self._stream.finish(())
        if text:
            print(text, end="", flush=True)
        for event in events:
            if isinstance(event, InputRequest):
                reason = "this rank was started with join=False: nobody can answer"
                self.send(event.rank, InputReply("refused", reason, event.number))

    def results(self) -> Results[Any]:
        """The ranks' values.

        Raises:
            ValueError: ranks run, or one did not return.
        """
        reported = sorted(self._command.outcomes.reported.items())
        values = [outcome.value for _, outcome in reported if isinstance(outcome, Returned)]
        if not self.finished or len(values) < (len(reported) if self._launch.keep else self.nprocs):
            raise ValueError("the ranks have not all returned: join() first")
        return Results(values, [rank for rank, _ in reported])
