"""What is said of ranks whose collective calls differ: by torch's flight recorder, over gloo, in real ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import mismatches
import pytest
import torch
from leftovers import until
from packaging.version import Version

import nbspawn
from nbspawn._protocol.collectives import Collectives
from nbspawn._protocol.messages import Raised
from nbspawn._protocol.questions import COLLECTIVES
from nbspawn._rank.group import flight_recorder
from nbspawn._rank.report import recorder
from nbspawn._state.collectives import findings
from nbspawn._state.run import Run, reduce
from nbspawn._state.snapshot import Snapshot

pytestmark = pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch has no recorder for gloo")


class Program:
    """Three ranks that run it, until they are closed."""

    def __init__(self, program: Callable[[int], None], nprocs: int = 3) -> None:
        self.context: Any = nbspawn.spawn(program, nprocs=nprocs, backend="gloo", join=False)
        self.reports: dict[int, Collectives] = {}
        self.run = Run.new(nprocs, "", "", "", time.monotonic())

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.run, time.monotonic())

    def findings(self) -> list[str]:
        """Ranks that have raised have told it then, as the supervisor has it."""
        events = self.context.poll(0.05)
        self.run = reduce(self.run, events, time.monotonic())
        self.reports.update({rank: found for rank, found in self.context.ask(COLLECTIVES).items() if found})
        self.reports.update({event.rank: event.collectives for event in events if isinstance(event, Raised)})
        return findings(self.snapshot, self.reports)

    def close(self) -> None:
        self.context.close()
        for process in self.context.processes:
            process.close()


@pytest.fixture
def started(nothing_left: None) -> Any:
    programs: list[Program] = []

    def start(program: Callable[[int], None]) -> Program:
        programs.append(Program(program))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


RULE = "All its ranks have to make the same calls in the same order."

MISMATCHES = {
    mismatches.another_collective: [
        "Collective 2 of the default group: ranks 0 and 2 call all_reduce float32[10, 10] (<B>), "
        f"rank 1 calls all_gather float32[4] (<A>). {RULE}"
    ],
    mismatches.another_shape: [
        "Collective 2 of the default group: ranks 0-1 call all_reduce float32[4, 2] (<A>), "
        "rank 2 calls all_reduce float32[4, 3] (<A>). All its ranks have to pass the same shape and dtype."
    ],
    mismatches.another_dtype: [
        "Collective 1 of the default group: rank 0 calls all_reduce int32[4] (<A>), "
        "ranks 1-2 call all_reduce float32[4] (<A>). All its ranks have to pass the same shape and dtype."
    ],
    mismatches.one_call_behind: [
        "Collective 3 of the default group, all_reduce float32[5] (<A>): ranks 0 and 2 are in it, "
        "rank 1 has not reached it (last call: 2, all_reduce) and is at <B>."
    ],
    mismatches.slow_to_report_its_error: [
        "Collective 1 of the default group, all_gather float32[2] (<A>): ranks 0-1 are in it, rank 2 has finished."
    ],
    mismatches.never_called: [
        "Collective 1 of the default group, all_gather_object int64[1] (<A>): rank 0 is in it, "
        "ranks 1-2 have not reached it (no call recorded) and are at <B>."
    ],
    mismatches.returned_early: [
        "Collective 2 of the default group, all_reduce float32[2] (<A>): ranks 0 and 2 are in it, rank 1 has finished."
    ],
    mismatches.other_order_of_groups: [
        "The ranks use two groups in different orders, and wait for each other: "
        "rank 0 waits in collective 1 of group 1 (ranks 0-1), all_reduce float32[2] (<A>); "
        "rank 1 waits in collective 1 of group 2 (ranks 0-1), broadcast float32[3] (<B>)."
    ],
    mismatches.in_another_group: [
        "The ranks use two groups in different orders, and wait for each other: "
        "ranks 1-2 wait in collective 1 of the default group, barrier (<B>); "
        "rank 0 waits in collective 1 of group 1 (ranks 0-1), all_reduce float32[2] (<A>)."
    ],
    mismatches.send_without_receive: [
        "Rank 0 waits in send of float32[4] to rank 2 (<A>), but rank 2 does not receive from it: it is at <B>."
    ],
    mismatches.receive_without_send: [
        "Rank 0 waits in recv of int64[4] from rank 1 (<A>), but rank 1 does not send to it: "
        "it waits in recv of int64[4] from rank 0 (<B>).",
        "Rank 1 waits in recv of int64[4] from rank 0 (<B>), but rank 0 does not send to it: "
        "it waits in recv of int64[4] from rank 1 (<A>).",
    ],
    mismatches.other_tags: [
        "Rank 0 waits in send of float32[4] to rank 1 with tag 3 (<A>), "
        "rank 1 in recv of float32[4] from rank 0 with tag 4 (<B>): the tags differ."
    ],
    mismatches.uneven_batches: [
        "Collective 8 of the default group: rank 0 calls barrier (<B>), "
        f"ranks 1-2 call all_reduce float32[10] (<A>). {RULE}"
    ],
    mismatches.source_goes_ahead: [
        "Collective 1 of the default group, broadcast float32[6] (<A>): rank 0 is in it, rank 1 has passed it, "
        "rank 2 has not reached it (no call recorded) and is at <B>."
    ],
    mismatches.in_a_part: [
        "Collective 1 of group experts (ranks 1-2): rank 1 calls reduce_scatter float32[2] (<A>), "
        f"rank 2 calls all_gather float32[2] (<B>). {RULE}"
    ],
}


@pytest.mark.parametrize("program", MISMATCHES, ids=lambda program: program.__name__)
def test_the_sentence(started: Any, program: Callable[[int], None]) -> None:
    expected = [mismatches.filled(program, text) for text in MISMATCHES[program]]
    found = started(program)
    seen = [[""]]
    until(lambda: seen.append(found.findings()) or seen[-1] == expected)
    assert seen[-1] == expected


def test_nothing_is_wrong_where_tensors_may_differ(started: Any) -> None:
    found = started(mismatches.does_all_right)

    def all_at_the_end() -> bool:
        wrong = found.findings()
        last = [report.groups[0].calls[-1:] for report in found.reports.values()]
        at_the_end = [(call.name, call.inputs) for calls in last for call in calls]
        return at_the_end == [("all_reduce", ("float32[2]",))] * 3 and not wrong

    assert until(all_at_the_end)


def test_a_rank_that_holds_pythons_lock_does_not_answer(started: Any) -> None:
    found = started(mismatches.holds_the_lock)
    head = mismatches.filled(mismatches.holds_the_lock, "Collective 1 of the default group, barrier (<A>): ")
    silent = re.compile(re.escape(f"{head}ranks 0 and 2 are in it, rank 1 has given no sign of life for ") + r"\d+ s.*")
    assert until(lambda: any(map(silent.fullmatch, found.findings())))


def test_an_earlier_group_of_the_same_name_is_not_mistaken_for_this_one(started: Any) -> None:
    found = started(mismatches.makes_its_group_again)
    assert until(lambda: found.findings() == [] and len(found.reports) == 3)
    assert until(lambda: [_numbers(report) for report in found.reports.values() if not found.findings()] == [[1]] * 3)


def _numbers(report: Collectives) -> list[int]:
    return [call.number for call in report.groups[0].calls]


def test_a_call_that_has_ended_is_not_taken_for_the_one_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's thread marks a call after the caller has gone on: seen once in 200 runs on a busy machine."""
    running, ended = {"retired": False, "state": "started"}, {"retired": True, "state": "started"}
    looks = [[running, running], [ended, running]]
    monkeypatch.setattr(flight_recorder, "entries", lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    assert recorder._settled_entries() == [ended, running]
    looks[:] = [[running, running]]  # an asynchronous one
    assert recorder._settled_entries() == looks[0]
