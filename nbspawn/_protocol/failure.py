"""How one rank failed, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass

ECHO = "lost the connection to a rank that had ended"


@dataclass(frozen=True)
class Failure:
    """How one rank failed. Times are CLOCK_MONOTONIC seconds."""

    rank: int
    pid: int
    time: float
    exitcode: int | None
    """As in ``Process.exitcode``; None if the rank raised."""
    what: str
    """One line: 'KeyError: 'hieght'' or 'terminated with signal SIGSEGV'."""
    traceback: str = ""
    """Of a rank that a signal ended: its Python stack, where there is one."""
    rendered: tuple[str, ...] = ()
    line: int | None = None
    """The line of the cell, 1-based."""
    log_path: str = ""
    node: int = 0
    """The machine that the rank was on, 0 for the first."""
    host: str = ""
    """Its name, if there are several."""
    time_error: float = 0.0
    """``time`` is right to so many seconds: the clocks of other machines are known through messages only."""
    lost_peer: bool = False
    """Was it raised in a collective, and says that the other side does not answer?"""
    culprit: str = ""
    """The variable that the rank could not load, if it failed with that."""
    missing: tuple[str, ...] = ()
    """The names that the cell uses and the rank does not have, if it failed with a NameError."""
    message: str = ""
    """The exception's whole text, of bounded length."""
    is_echo: bool = False
    """Has it lost a peer that is known to have ended? Then that is why it failed."""

    @property
    def summary(self) -> str:
        """``what``, and the cell's line where there is one."""
        return with_line(ECHO if self.is_echo else self.what, self.line)


def with_line(text: str, line: int | None) -> str:
    """'KeyError: 'hieght' (line 8)'; without a line, the text alone."""
    return text if line is None else f"{text} (line {line})"
