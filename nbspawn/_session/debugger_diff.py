"""``diff EXPR`` at a debugger's prompt: a comparison over all ranks that have stopped, which stay at their prompts.

The supervisor's loop goes on meanwhile: it sends what is to be sent, and passes on what comes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from nbspawn._protocol.messages import (
    Event,
    Exited,
    InputReply,
    Inspect,
    Inspected,
    Leaving,
    Raised,
    Resumed,
    Returned,
)
from nbspawn._session import comparison
from nbspawn._session.comparison import Inspection
from nbspawn._state.wording import name_ranks, ranges
from nbspawn.errors import UsageError

_numbers = itertools.count(1)  # of questions: a late answer to an earlier comparison is not for this one
_COMMAND = re.compile(r"diff\s+(?!=[^=])(?P<given>.+)", re.DOTALL)  # but not the assignment `diff = x`


def asked_for(reply: InputReply) -> str | None:
    """What stands behind ``diff`` in the user's answer; None if that is another command."""
    command = _COMMAND.fullmatch(reply.text.strip()) if reply.kind == "text" else None
    return command and command["given"]


class StoppedComparison:
    """A comparison of what is ``given``, over the ranks that have ``stopped``, of so many. Raises UsageError."""

    def __init__(self, given: str, stopped: Sequence[int], nprocs: int) -> None:
        expression, tolerance = comparison.parse(given)
        if len(stopped) < 2:
            raise UsageError(f"diff compares ranks that have stopped, and only rank {stopped[0]} has")
        self.text: str | None = None
        """The outcome, when there is one."""
        self._talk = comparison.conversation(expression, tuple(stopped), nprocs, tolerance)
        self._stopped, self._nprocs = tuple(stopped), nprocs
        self._answers: dict[int, Inspected] = {}
        self._unsent: list[tuple[int, Inspect]] = []
        self._ask(next(self._talk))

    def unsent(self) -> list[tuple[int, Inspect]]:
        """What is to be sent to ranks now."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def _ask(self, question: Inspection) -> None:
        self._asked, self._number = question.ranks, next(_numbers)
        inspect = Inspect(self._number, question.name, question.arguments)
        self._unsent += [(rank, inspect) for rank in question.ranks]

    def fold(self, event: Event) -> None:
        """Take note of what a rank does."""
        if self.text is not None or event.rank not in self._asked:
            return
        if isinstance(event, (Resumed, Returned, Raised, Leaving, Exited)):
            self._end(f"rank {event.rank} has left its prompt: nothing is compared.")
        elif isinstance(event, Inspected) and event.number == self._number:
            self._answers[event.rank] = event
            if len(self._answers) == len(self._asked):
                self._go_on()

    def _go_on(self) -> None:
        answers, self._answers = self._answers, {}
        failed: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            if answer.error:
                failed.setdefault(answer.error, []).append(rank)
        if failed:
            self._end("\n".join(f"[{ranges(ranks)}] *** {error}" for error, ranks in failed.items()))
            return
        try:
            self._ask(self._talk.send({rank: answer.value for rank, answer in sorted(answers.items())}))
        except StopIteration as outcome:
            others = [rank for rank in range(self._nprocs) if rank not in self._stopped]
            verb = "has" if len(others) == 1 else "have"
            note = f"\n{name_ranks(others)} {verb} not stopped: not compared." if others else ""
            self._end(f"{outcome.value!r}{note}")

    def _end(self, text: str) -> None:
        self.text = text
        self._ask(Inspection(self._stopped, "forget"))
