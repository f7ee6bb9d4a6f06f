"""The ranks of a run as torch's users know them: a ProcessContext to ``join``, and the results."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._engine.local import LocalRanks
from nbspawn._protocol.messages import Event, InputReply, InputRequest, Printed, Returned
from nbspawn._render.stream import MergedStream
from nbspawn._results import Results
from nbspawn.errors import rank_error

_TORCH_GRACE = 30.0  # seconds: torch's pause between SIGTERM and SIGKILL when no grace period is given


class LocalContext(LocalRanks):
    """``pids`` and ``join`` are torch's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        files = self.files  # not self: in a cycle, the ranks' values would wait for the garbage collector
        self._stream = MergedStream(self.nprocs, lambda rank: os.fspath(files.log(rank)), budget=sys.maxsize)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """torch's ``ProcessContext.join``: True if all ranks have ended well, False if ``timeout`` seconds were not
        enough; raises RankRaisedError or RankExitedError for the rank that failed first, once its peers are stopped.
        Ranks that ``interrupt`` or ``terminate`` has stopped have not ended well.

        When a rank fails, the others get ``grace_period`` seconds to leave by themselves (none if None), then SIGTERM,
        then the same time again (30 s if None) until SIGKILL. What ranks print goes to ``sys.stdout``.
        """
        end = None if timeout is None else time.monotonic() + max(0.0, timeout)
        with InterruptFlag() as interrupted:
            interrupted.on_press = self.wake
            while True:
                self._pass_on(self.poll(math.inf if end is None else max(0.0, end - time.monotonic())))
                if self.failures and not self.stopping:
                    first = 0.0 if grace_period is None else grace_period
                    self.stop_at(term=first, kill=first + (_TORCH_GRACE if grace_period is None else grace_period))
                if self.over or interrupted.count or (end is not None and time.monotonic() >= end):
                    break
        if interrupted.count:
            raise KeyboardInterrupt
        if not self.over:
            return False
        unfinished = self.failures or self._outcomes.unfinished(time.monotonic())
        self.close()
        if unfinished:
            raise rank_error(unfinished, self.nprocs)
        return True

    def _pass_on(self, events: list[Event]) -> None:
        text = self._stream.feed([event for event in events if isinstance(event, Printed)])
        if self.over:
            text += self._stream.finish(())
        if text:
            print(text, end="", flush=True)
        for event in events:
            if isinstance(event, InputRequest):
                self.send(event.rank, InputReply("refused", "this rank was started with join=False: nobody can answer"))

    def results(self) -> Results[Any]:
        """The ranks' values; raises ValueError while ranks run, or if one did not return."""
        said = sorted(self._outcomes.said.items())
        values = [outcome.value for _, outcome in said if isinstance(outcome, Returned)]
        if not self.settled or len(values) < (len(said) if self._launch.keep else self.nprocs):
            raise ValueError("the ranks have not all returned: join() first")
        return Results(values, [rank for rank, _ in said])
