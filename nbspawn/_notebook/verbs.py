"""What ``%ranks`` takes: each verb with its argument and its meaning; help, completion and README are made of these."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """``argument`` is 'R' for ranks ('1', '0,2'), or the words that may follow."""

    name: str
    argument: str
    meaning: str

    @property
    def usage(self) -> str:
        """As it is typed: 'auto on|off'."""
        return f"{self.name} {self.argument}".rstrip()


VERBS = (
    Verb("stop", "", "end the ranks; without a name, all"),
    Verb("restart", "", "the same ranks anew, without variables"),
    Verb("interrupt", "", "KeyboardInterrupt in ranks that run something in the background"),
    Verb("wait", "", "wait for that, and answer its questions"),
    Verb("stacks", "", "where each of them stands"),
    Verb(
        "debug",
        "R",
        "open the debugger in a rank that runs; one that is idle stops at the first line of its next cell",
    ),
    Verb("logs", "R", "the path of all that a rank has printed"),
    Verb("auto", "on|off", "run every later plain cell in the ranks, as if `%%ranks` stood above it"),
)
