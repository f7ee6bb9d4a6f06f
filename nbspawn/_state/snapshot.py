"""A run at one moment, which is all that drawings and the stall rule need to know. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nbspawn._protocol.frames import Frame
from nbspawn._state.run import Run, Source


def no_source(frame: Frame) -> str:
    """The text of no line is known."""
    return ""


@dataclass(frozen=True)
class Snapshot:
    """The ``run`` as it is looked at ``now`` (CLOCK_MONOTONIC seconds). ``source`` finds the lines of other files than
    the running cell's."""

    run: Run
    now: float
    source: Source = no_source

    def text(self, frame: Frame) -> str:
        """The text of a line, without its indentation; '' if it is not known."""
        return self.run.text(frame, self.source)
