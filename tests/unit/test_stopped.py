"""``diff`` at the debugger's prompt: what is sent when, and what ends it; without processes."""

from __future__ import annotations

import pytest

from nbspawn._protocol.frames import Frame
from nbspawn._protocol.messages import Event, Exited, InputReply, Inspect, Inspected, Resumed, Stopped
from nbspawn._protocol.value_digests import Entries, Entry
from nbspawn._session.debugger_diff import StoppedComparison, asked_for
from nbspawn.errors import UsageError


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("diff model", "model"),
        ("  diff  model --rtol 1 ", "model --rtol 1"),
        ("diff == other", "== other"),
        ("diff = 3", None),
        ("diff", None),
        ("diff.max()", None),
        ("difference", None),
        ("p diff", None),
    ],
)
def test_the_command(text: str, given: str | None) -> None:
    assert asked_for(InputReply("text", text)) == given
    assert asked_for(InputReply("eof", text)) is None


class Play:
    def __init__(self, *stopped: int, nprocs: int = 3) -> None:
        self.comparison = StoppedComparison("x", stopped, nprocs)
        self.number = 0

    def questions(self) -> dict[int, str]:
        unsent = self.comparison.unsent()
        assert all(isinstance(question, Inspect) for _, question in unsent)
        self.number = unsent[-1][1].number if unsent else self.number
        return {rank: question.question for rank, question in unsent}

    def answer(self, rank: int, value: Entries | None = None, error: str = "", number: int | None = None) -> None:
        self.comparison.fold(Inspected(rank, self.number if number is None else number, value, error))


def report(digest: bytes) -> Entries:
    return Entries((Entry("", "str", digest, repr(digest)),), False)


def test_to_the_end() -> None:
    play = Play(0, 2)
    assert play.questions() == {0: "evaluate", 2: "evaluate"} and play.questions() == {}
    early = play.number
    play.answer(2)
    assert play.questions() == {}
    play.answer(0)
    assert play.questions() == {0: "report", 2: "report"}
    play.answer(0, report(b"a"), number=early)
    play.answer(0, report(b"a"))
    play.answer(1, report(b"c"))
    assert play.questions() == {} and play.comparison.text is None, "late answers and other ranks do not count"
    play.answer(2, report(b"b"))
    assert play.questions() == {0: "forget", 2: "forget"}
    assert play.comparison.text == (
        "x differs between the ranks.\n  str: b'a' in rank 0, b'b' in rank 2\nRank 1 has not stopped: not compared."
    )


def test_errors_are_gathered() -> None:
    play = Play(0, 1, 2)
    play.questions()
    play.answer(1, error="NameError: x")
    play.answer(0)
    play.answer(2, error="NameError: x")
    assert play.comparison.text == "[1-2] *** NameError: x"
    assert play.questions() == dict.fromkeys(range(3), "forget")


@pytest.mark.parametrize("event", [Exited(2, 1.0, -9), Resumed(2, 1.0, False)])
def test_a_rank_that_leaves_ends_it(event: Event) -> None:
    play = Play(0, 2)
    play.questions()
    play.comparison.fold(Stopped(1, 1.0, Frame("cell", 1, "f"), False))
    assert play.comparison.text is None
    play.comparison.fold(event)
    assert play.comparison.text == "rank 2 has left its prompt: nothing is compared."


def test_one_rank_is_not_enough() -> None:
    with pytest.raises(UsageError, match="diff compares ranks that have stopped, and only rank 1 has"):
        Play(1)
