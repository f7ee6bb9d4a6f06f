"""What counts as wrong in the ranks' collectives, and how much is said of it. (tests/engine has real ranks.)"""

from __future__ import annotations

from typing import Any

from nbspawn._protocol.collectives import Call, Collectives, GroupCalls, Transfer
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Sampled, Started
from nbspawn._render import collectives
from nbspawn._state.collectives import Reports, findings
from nbspawn._state.run import Run, reduce
from nbspawn._state.snapshot import Snapshot

LINE = (Frame("cell", 3, "<module>"),)


def call(number: int = 1, tensor: str = "float32[4]", pending: bool = True, **changes: Any) -> Call:
    made = Call(number, "all_reduce", "gloo:all_reduce", (tensor,), (tensor,), LINE, pending, 10.0)
    return made._replace(**changes)


def told(*calls: list[Call], rank: int | None = None, ranks: tuple[int, ...] | None = None) -> Reports:
    """What each rank tells of the default group."""
    members = tuple(range(len(calls))) if ranks is None else ranks
    return {
        number: Collectives(
            number if rank is None else rank, (GroupCalls("0", "default_pg", members, tuple(made)),), None
        )
        for number, made in enumerate(calls)
    }


def snapshot(nprocs: int, waits: float = 10.0) -> Snapshot:
    """All ranks have waited for so long."""
    run = Run.new(nprocs, "", "", "", 0.0, "cell", ("", "", "dist.all_reduce(x)"))
    for rank in range(nprocs):
        position = Position(LINE, "all_reduce", True)
        run = reduce(run, [Started(rank, 1, 0.0), Sampled(rank, 1.0, position, 1.0, ())], 1.0)
    return Snapshot(run, 1.0 + waits)


def test_as_many_elements_in_another_shape_fit() -> None:
    reports = told([call(tensor="float32[4, 5]")], [call(tensor="float32[20]")])
    assert findings(snapshot(2), reports) == []
    assert "calls all_reduce float32[21]" in findings(snapshot(2), told([call()], [call(tensor="float32[21]")]))[0]


def test_uneven_gathers_fit_if_all_expect_the_same() -> None:
    parts = ("float32[1]", "float32[2]")
    gathers = [
        call(name="all_gather", operation="nccl:all_gather", inputs=(part,), outputs=parts, pending=False)
        for part in parts
    ]
    assert findings(snapshot(2), told([gathers[0]], [gathers[1]])) == []
    other = gathers[1]._replace(outputs=("float32[2]", "float32[2]"))
    assert len(findings(snapshot(2), told([gathers[0]], [other]))) == 1


def test_a_first_call_that_no_gpu_leaves() -> None:
    first = call(operation="nccl:all_reduce", age=40.0)
    [sentence] = findings(snapshot(2), told([first], [first]))
    assert "(line 3): all its ranks have called it, and it has not ended for 40 s. Unless the GPUs" in sentence
    assert "--env NCCL_P2P_DISABLE=1" in sentence
    others = [call(age=40.0), first._replace(age=20.0), first._replace(number=2), first._replace(pending=False)]
    for other in others:  # gloo's; a GPU's that may connect still; one after others; one that has ended
        assert findings(snapshot(2), told([other], [other])) == []


def test_two_backends_of_a_group_count_their_calls_each() -> None:
    """cpu:gloo,cuda:nccl: the same number is of another call there."""
    ended = call(pending=False)
    gloo, nccl = (GroupCalls("0", "default_pg", (0, 1), (ended,), backend) for backend in ("gloo", "nccl"))
    late = nccl._replace(calls=())
    hung = nccl._replace(calls=(call(tensor="float32[8]", operation="nccl:all_reduce"),))
    reports = {0: Collectives(0, (gloo, hung), None), 1: Collectives(1, (gloo, late), None)}
    [sentence] = findings(snapshot(2), reports)
    assert sentence.startswith(
        "Collective 1 of the default group (nccl), all_reduce float32[8] (line 3): rank 0 is in it, rank 1 has not "
    )


def test_a_rank_that_is_ahead_for_a_moment_is_not_reported() -> None:
    reports = told([call(7, pending=True)], [call(6, pending=False)])
    assert findings(snapshot(2, waits=0.5), reports) == []
    assert "rank 1 has not reached it (last call: 6, all_reduce)" in findings(snapshot(2), reports)[0]


def test_a_rank_that_was_seen_last_in_an_earlier_call_is_not_reported() -> None:
    assert findings(snapshot(2), told([call(7, age=0.1)], [call(6, pending=False)])) == []
    receives = {
        rank: Collectives(rank, (), Transfer("recv", "0", 1 - rank, 0, "float32[4]", frames))
        for rank, frames in enumerate((LINE, (Frame("cell", 4, "<module>"),)))
    }
    [sentence] = findings(snapshot(2), receives)
    assert sentence.startswith("Rank 0 waits in recv of float32[4] from rank 1 (line 3), but rank 1 does not send")


def test_of_a_rank_that_has_failed_it_is_not_said_that_it_has_passed_a_call() -> None:
    """Which call of several asynchronous ones has failed is not known."""
    reports = told([call(7)], [call(7, pending=False)], [call(6, pending=False)])
    assert "rank 0 is in it, rank 1 has passed it, rank 2 has not reached it" in findings(snapshot(3), reports)[0]
    assert "rank 0 is in it, rank 2 has not reached it" in findings(snapshot(3), reports, failed={1})[0]


def test_groups_that_each_rank_has_made_for_itself_are_not_compared() -> None:
    reports = told([call()], [call(tensor="int64[9]")], rank=0, ranks=(0,))
    assert findings(snapshot(2), reports) == []
    assert "groups each for itself" in collectives.report("", reports, snapshot(2)).text


def test_a_group_with_processes_of_other_runs_is_not_judged() -> None:
    assert findings(snapshot(2), told([call()], [], ranks=(0, 1, 2, 3))) == []


def test_what_is_said_is_bounded() -> None:
    one_each = told(*([call(tensor=f"float32[{rank + 1}]")] for rank in range(64)))
    [sentence] = findings(snapshot(64), one_each)
    assert "58 more differ" in sentence and len(sentence) < 700
    groups = tuple(GroupCalls(str(name), "undefined", (0, 1), (call(),)) for name in range(30))
    reports = {0: Collectives(0, groups, None), 1: Collectives(1, (), None)}
    assert findings(snapshot(2), reports)[5:] == ["The same of 25 more."]
    shown = collectives.report("Collectives", reports, snapshot(2))
    assert len(shown.text) < 5000 and "and 22 more groups." in shown.text


def test_the_table_is_escaped_in_html() -> None:
    shown = collectives.report("<b>", told([call(name="<i>")]), snapshot(1))
    assert "<i>" not in shown.html and "&lt;i&gt;" in shown.html and "<b>&lt;b&gt;</b>" in shown.html
