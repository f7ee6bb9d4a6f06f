"""The commands of ``%ranks``, each with its argument and its meaning: for help, completion and the reference."""

from __future__ import annotations

import textwrap
from typing import NamedTuple


class Verb(NamedTuple):
    """``argument`` is 'R' for ranks ('1', '0,2'), 'EXPR' for an expression, or the allowed words."""

    name: str
    argument: str
    meaning: str

    @property
    def usage(self) -> str:
        """The command as in help: 'auto on|off'."""
        return f"{self.name} {self.argument}".rstrip()


VERBS = (
    Verb("stop", "", "end the ranks; without a name, those of all sessions"),
    Verb("restart", "", "start the same ranks again, without their variables"),
    Verb("interrupt", "", "raise KeyboardInterrupt in ranks that run in the background"),
    Verb("wait", "", "wait for the background run, and answer its prompts"),
    Verb("stacks", "[native]", "show the stack of each rank; native code of those that stand still, or else of all"),
    Verb("collectives", "", "show the last collectives of each process group, and which ranks do not agree"),
    Verb("vars", "", "show each variable of the ranks, and where the ranks have other values"),
    Verb("memory", "", "show what takes each rank's memory: tensors by variable, what is shared, what torch caches"),
    Verb(
        "debug",
        "R",
        "open the debugger in a busy rank; an idle one stops at the first line of its next cell",
    ),
    Verb("diff", "EXPR", "compare the value of an expression over the ranks: what differs, where, and by how much"),
    Verb("logs", "R", "show the path of a rank's log, or of a local copy if the log is on another machine"),
    Verb("release", "", "give back the nodes of a cluster that no ranks use"),
    Verb("auto", "on|off", "run every later plain cell in the ranks, as if it began with `%%ranks`"),
    Verb("help", "", "show these commands, and the options of `%%ranks`"),
)


def explained() -> str:
    """The commands with their meanings, in 80 columns."""
    indent = max(len(verb.usage) for verb in VERBS) + len("  %ranks   ")
    lines = ["%ranks alone lists the ranks; with a command it acts on them, @NAME on a session:", ""]
    for verb in VERBS:
        begin = f"  %ranks {verb.usage}".ljust(indent)
        lines.append(textwrap.fill(verb.meaning, 80, initial_indent=begin, subsequent_indent=" " * indent))
    return "\n".join(lines)
