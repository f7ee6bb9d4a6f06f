"""The loop that watches a command: on an engine without processes, under its clock."""

from __future__ import annotations

import inspect
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine

import nbspawn
from nbspawn._engine.base import Engine
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._payload.packing import Value
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import (
    Event,
    InputReply,
    InputRequest,
    Printed,
    Raised,
    Resumed,
    Returned,
    Sampled,
    Started,
    Stopped,
)
from nbspawn._render.report import Report
from nbspawn._results import Results
from nbspawn._session import supervisor
from nbspawn._session.options import CommandOptions
from nbspawn._session.supervisor import REPORTS, Supervisor
from nbspawn._session.views import Action
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run

SOURCE = ("%%spawn 2", "x = 1", "dist.barrier()", "time.sleep(60)")
HERE = Frame("cell", 2, "<module>")
LOOK, DEEP = "look, deep=False", "look, deep=True"
GENTLY = (0.0, 3.0, 5.0)
KILL = (None, None, 0.0)


class FakeView:
    """Notes what it is given. ``answers`` are given in order, the call of one first, which may take its time."""

    def __init__(self, *answers: Callable[[], InputReply | None]) -> None:
        self.present = True
        self.run = Run.new(0, "", "", "", 0.0)
        self.notices: list[str] = []
        self.prompts: list[str] = []
        self.reports: list[Report] = []
        self.pressed: deque[Action] = deque()
        self.closed = False
        self._answers = deque(answers)

    def actions(self) -> Sequence[Action]:
        return [self.pressed.popleft() for _ in range(len(self.pressed))]

    def open(self, run: Run, profile: Profile) -> None:
        self.run, self.profile = run, profile

    def show(self, run: Run, events: Sequence[Event]) -> None:
        self.run = run

    def notify(self, text: str) -> None:
        if text:
            self.notices.append(text)

    def ask(self, prompt: str, password: bool) -> InputReply | None:
        self.prompts.append(prompt)
        return self._answers.popleft()()

    def show_report(self, report: Report) -> None:
        self.reports.append(report)

    def close(self, run: Run) -> bool:
        self.run, self.closed = run, True
        return False


class Play:
    """A command of two ranks. Its parts are there to be scripted before it is run."""

    def __init__(self, *answers: Callable[[], InputReply | None], nprocs: int = 2) -> None:
        self.flag = InterruptFlag()
        self.view = FakeView(*answers)
        self.engine = FakeEngine(nprocs)

    def press(self, times: int = 1) -> Callable[[], None]:
        return lambda: self.flag.press(times)

    def click(self, what: str, *ranks: int) -> Callable[[], None]:
        return lambda: self.view.pressed.append(Action(what, ranks))

    def think(self, seconds: float, kind: str = "text", text: str = "") -> Callable[[], InputReply]:
        """An answer of the user, after some time."""

        def answer() -> InputReply:
            self.engine.now += seconds
            return InputReply(kind, text)

        return answer

    def run(self, *script: tuple[float, Any], obey: str = "interrupt", **options: Any) -> Results[Any]:
        nprocs = self.engine.nprocs
        started = [(0.0, Started(rank, 100 + rank, 0.0)) for rank in range(nprocs)]
        self.engine = FakeEngine(nprocs, *started, *script, obey=obey)
        supervisor = Supervisor(CommandOptions(view=self.view, **options), self.engine, self.flag, self.engine.clock)
        run = Run.new(nprocs, "fork", "", self.engine.log_dir, 0.0, "cell", SOURCE)
        supervisor.open(run)
        return supervisor.results(run)

    @property
    def did(self) -> list[tuple[float, object]]:
        """What the engine was asked to do, beside waking up."""
        return [(round(at, 3), what) for at, what in self.engine.did if what != "wake"]


def raised(rank: int, at: float, name: str = "ValueError") -> tuple[float, Event]:
    return at, Raised(rank, at, name, "", "", (), 2, 0)


def returned(rank: int, at: float) -> tuple[float, Event]:
    return at, Returned(rank, at, Value.of(rank * 10).result, 0)


def test_the_fake_is_an_engine() -> None:
    for name, member in vars(Engine).items():
        if name.startswith("_"):
            continue
        fake = getattr(FakeEngine, name, None) or getattr(FakeEngine(2), name)
        if inspect.isfunction(member):
            wanted, found = inspect.signature(member), inspect.signature(fake)
            assert list(wanted.parameters.values()) == list(found.parameters.values()), name


def test_results() -> None:
    play = Play()
    assert list(play.run(returned(1, 1.0), returned(0, 2.0), timings=True)) == [0, 10]
    assert play.did == [] and play.view.closed
    assert play.view.run.notes[0].startswith("Time: ") and play.view.run.counts == {"done": 2}


def test_results_tell_what_each_rank_did_when() -> None:
    play = Play()
    works, waits = Position((HERE,)), Position((HERE._replace(line=3),), "barrier", True)
    spent = (works, 0.5), (waits, 1.0)
    results = play.run((1.5, Sampled(1, 1.5, waits, 0.5, spent)), returned(0, 2.0), returned(1, 2.0))
    parts = [(row["rank"], round(row["seconds"], 3), row["source"], row["waiting"]) for row in results.timeline]
    assert parts == [(1, 0.5, "x = 1", False), (1, 1.0, "dist.barrier()", True)]
    assert play.view.profile.totals == {1: 1.5}, "the view has been given the same"


# ---------------------------------------------------------------- Stop


def test_one_press() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt, match=r"Ranks stood at line 7\."):
        play.run((1.0, play.press()))
    assert play.did == [(1.0, GENTLY)]
    assert play.engine.did[0] == (1.0, "wake"), "a poll that waits is ended"
    assert play.view.run.counts == {"interrupted": 2} and play.view.closed


@pytest.mark.parametrize(("obey", "ended"), [("interrupt", 1.0), ("SIGTERM", 4.0), ("SIGKILL", 6.0)])
def test_ranks_are_watched_until_they_have_ended(obey: str, ended: float) -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, play.press()), obey=obey)
    assert play.engine.now == ended


def test_a_press_before_the_wait_ends_it_too() -> None:
    flag, woken = InterruptFlag(), []
    flag.press()
    flag.wakes(lambda: woken.append("once"))
    assert woken == ["once"]
    flag.press()
    assert woken == ["once"] * 2


def test_two_presses() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt) as caught:
        play.run((1.0, play.press()), (2.0, play.press()), obey="SIGTERM", grace_period=60.0)
    assert play.did == [(1.0, (0.0, 60.0, 62.0)), (2.0, LOOK), (2.0, KILL)]
    assert str(caught.value).startswith("Ranks stood at line 7. When they were killed: Ranks 0-1:")
    assert play.engine.now == 2.0 and play.view.run.counts == {"killed": 2}


def test_two_presses_at_once() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, play.press(2)))
    assert play.did == [(1.0, LOOK), (1.0, KILL)]


def test_a_press_while_stopping() -> None:
    play = Play()
    with pytest.raises(nbspawn.RankRaisedError, match="rank 1 of 2: ValueError"):
        play.run(raised(1, 1.0), (2.0, play.press()), obey="SIGTERM")
    assert play.did == [(1.25, (0.0, 2.75, 4.75)), (2.0, LOOK), (2.0, KILL)]


def test_the_views_stop_is_a_press() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, play.click("stop")))
    assert play.did == [(1.0, GENTLY)]


def test_quit_in_the_debugger_stops_all() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run(raised(0, 1.0, "BdbQuit"))
    assert play.did == [(1.0, GENTLY)]
    assert play.view.run.ranks[0].detail == "quit in the debugger (line 2)"


def test_off_the_main_thread_a_press_counts_and_signals_are_left_alone() -> None:
    play = Play()
    before = signal.getsignal(signal.SIGINT)
    handlers, errors = [], []

    def work() -> None:
        with play.flag:
            try:
                play.run((1.0, play.press()), (1.0, lambda: handlers.append(signal.getsignal(signal.SIGINT))))
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert handlers == [before] and play.did == [(1.0, GENTLY)]


# ---------------------------------------------------------------- failures


def test_a_failure_and_its_collecting_time() -> None:
    play = Play(nprocs=3)
    with pytest.raises(nbspawn.RankRaisedError) as caught:
        play.run(raised(1, 1.0), raised(0, 1.2, "KeyError"))
    assert play.did == [(1.25, (0.0, 2.75, 4.75))]
    assert caught.value.rank == 1 and [other.rank for other in caught.value.others] == [0]
    assert caught.value.lines[-2:] == (
        "Ranks stood at line 7 and were stopped.",
        "The logs in /no/such/logs were deleted.",
    )


def test_when_all_have_ended_nothing_is_collected() -> None:
    play = Play()
    with pytest.raises(nbspawn.RankRaisedError):
        play.run(raised(1, 1.0), raised(0, 1.1))
    assert play.did == [] and play.engine.now == 1.1


def test_a_failure_with_no_grace_period() -> None:
    play = Play()
    with pytest.raises(nbspawn.RankRaisedError):
        play.run(raised(1, 1.0), grace_period=0.0)
    assert play.did == [(1.0, (0.0, 0.0, 2.0))]


def test_a_failure_while_a_rank_is_at_a_breakpoint() -> None:
    play = Play()
    play.view = FakeView(play.think(100.0, text="c"))
    with pytest.raises(nbspawn.RankRaisedError, match="rank 1 of 2"):
        play.run(
            (0.9, Stopped(0, 0.9, HERE, False)),
            (0.9, InputRequest(0, "ipdb> ", False, 0)),
            raised(1, 1.0),
            (102.0, Resumed(0, 102.0, soon=False)),
        )
    assert play.view.notices == ["Rank 1 has failed: ValueError (line 2)."]
    assert play.did == [(101.0, "to 0: c"), (102.25, (0.0, 2.75, 4.75))]


def test_a_breakpoint_that_comes_because_a_peer_has_failed() -> None:
    play = Play()
    play.view = FakeView(play.think(10.0, text="c"))
    with pytest.raises(nbspawn.RankRaisedError, match="rank 1 of 2"):
        play.run(
            raised(1, 1.0),
            (1.2, Stopped(0, 1.2, HERE, False)),
            (1.2, InputRequest(0, "ipdb> ", False, 0)),
            (11.3, Resumed(0, 11.3, soon=False)),
            returned(0, 11.4),
        )
    assert play.view.prompts == ["[0] ipdb> "] and play.did == [(11.2, "to 0: c")]


def test_who_leaves_a_post_mortem_ends_those_of_the_peers() -> None:
    play = Play(nprocs=3)
    play.view = FakeView(play.think(10.0, text="q"))
    at_prompts = [
        (1.0, event)
        for rank in (0, 1)
        for event in (Stopped(rank, 1.0, HERE, True), InputRequest(rank, "ipdb> ", False, 0))
    ]
    with pytest.raises(nbspawn.RankRaisedError, match="rank 0 of 3"):
        play.run(*at_prompts, (12.0, Resumed(0, 12.0, soon=True)), raised(0, 12.0))
    assert play.view.prompts == ["[0] ipdb> "], "rank 1 is not asked any more"
    assert play.did == [(11.3, "to 0: q"), (12.25, (0.0, 2.75, 4.75))]


def test_an_error_is_completed() -> None:
    explained: list[BaseException] = []
    with pytest.raises(nbspawn.RankRaisedError) as caught:
        Play().run(raised(1, 1.0), explain=explained.append)
    assert explained == [caught.value]


# ---------------------------------------------------------------- time


def test_timeout() -> None:
    play = Play()
    with pytest.raises(nbspawn.RunTimeoutError) as caught:
        play.run(timeout=2.2)
    assert play.did == [(2.2, DEEP), (2.2, GENTLY)]
    assert str(caught.value).splitlines() == [
        "the timeout of 2.2 s is over.",
        "Ranks 0-1:",
        "  train.py, line 7, in train",
        "The logs in /no/such/logs were deleted.",
    ]


def test_timeout_with_no_grace_period() -> None:
    play = Play()
    with pytest.raises(nbspawn.RunTimeoutError):
        play.run(timeout=1.0, grace_period=0.0)
    assert play.did == [(1.0, DEEP), (1.0, (0.0, 0.1, 2.1))]


def test_a_prompt_pauses_the_timeout() -> None:
    play = Play()
    play.view = FakeView(play.think(100.0, text="n"))
    with pytest.raises(nbspawn.RunTimeoutError):
        play.run((1.0, InputRequest(0, "name? ", False, 0)), timeout=2.0)
    assert play.did[0] == (101.0, "to 0: n")
    # Not exactly a second later: the time counts from the poll that brought the question.
    stopped = next(at for at, what in play.did if isinstance(what, tuple))
    assert 102.0 <= stopped <= 102.5


def test_what_stood_still_when_ranks_were_stopped_is_noted() -> None:
    play = Play()
    waits = Position((Frame("cell", 3, "<module>"),), "barrier", True)
    works = Position((Frame("cell", 4, "<module>"),))
    with pytest.raises(nbspawn.RunTimeoutError):
        play.run((1.0, Sampled(0, 1.0, waits, 1.0, ())), (1.0, Sampled(1, 1.0, works, 1.0, ())), timeout=11.0)
    assert play.view.run.notes == (
        "When the ranks were stopped: Rank 0 has waited 10 s in barrier (line 3). Rank 1 is at line 4: time.sleep(60).",
    )


def test_the_stacks_of_ranks_that_stand_still_are_shown_once() -> None:
    play = Play()
    waits = Position((Frame("cell", 3, "<module>"),), "barrier", True)
    play.run((1.0, Sampled(0, 1.0, waits, 1.0, ())), returned(0, 100.0), returned(1, 100.0))
    [(text, html)] = play.view.reports
    assert text.startswith("Where the ranks stand after 36.0 s, no progress for 30 s\n") and "<details>" in html
    assert play.did == [(36.0, DEEP)]


def test_the_stacks_that_the_user_asks_for() -> None:
    play = Play()
    play.run((1.0, play.click("stacks")), returned(0, 2.0), returned(1, 2.0))
    [(text, html)] = play.view.reports
    assert text.startswith("Where the ranks stand after 1.0 s\n") and "<details open>" in html


@pytest.mark.parametrize("what", REPORTS)
def test_a_report_is_of_the_moment_at_which_it_was_asked_for(what: str) -> None:
    """Not of when all ranks have answered, which may be seconds later."""
    play = Play()
    slowly = (0.5, lambda: setattr(play.engine, "answer_takes", 3.0))
    play.run(slowly, (1.0, play.click(what)), returned(0, 9.0), returned(1, 9.0))
    [(text, _)] = play.view.reports
    assert " after 1.0 s\n" in text


# ---------------------------------------------------------------- prompts


def test_an_interrupt_at_the_prompt_stops_the_ranks_before_the_rank_gets_it() -> None:
    play = Play()
    play.view = FakeView(play.think(5.0, "interrupt"))
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, InputRequest(0, "name? ", False, 0)))
    assert play.did == [(6.0, GENTLY), (6.0, "to 0: interrupt")]


def test_nobody_is_asked_who_is_not_there() -> None:
    play = Play()
    play.view.present = False
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, InputRequest(0, "name? ", False, 0)), (50.0, play.press()), timeout=2.0)
    assert play.view.prompts == [] and play.did == [(50.0, GENTLY)], "and timeouts are paused"


def test_nobody_is_asked_while_ranks_are_stopped() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, play.press()), (2.0, InputRequest(0, "sure? ", False, 0)), obey="SIGTERM")
    assert play.view.prompts == []


def test_who_leaves_without_an_answer_is_asked_again() -> None:
    play = Play()
    play.view = FakeView(lambda: None, play.think(0.0, text="n"))
    play.run((1.0, InputRequest(0, "name? ", False, 0)), returned(0, 2.0), returned(1, 2.0))
    assert play.view.prompts == ["[0] name? "] * 2


def test_break_into_ranks() -> None:
    play = Play()
    play.view = FakeView(play.think(0.0, text="c"))
    play.run(
        (1.0, play.click("debug", 0, 1)),
        (1.1, Stopped(0, 1.1, HERE, False)),
        (1.1, InputRequest(0, "ipdb> ", False, 0)),
        (2.5, play.click("debug", 0)),
        (4.0, Resumed(0, 4.0, soon=False)),
        returned(0, 6.0),
        returned(1, 6.0),
    )
    broken = [(at, what) for at, what in play.did if "break" in str(what)]
    assert broken[:2] == [(1.0, "break into 0"), (1.0, "break into 1")]
    assert play.view.notices[0] == "[1] running\nRank 1 will stop at the next line of Python, when that call returns."
    assert broken[2:] == [(4.0, "break into 0")], "at its prompt it is left alone"


def test_nobody_is_broken_into_while_ranks_are_stopped() -> None:
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, play.press()), (2.0, play.click("debug", 0)), obey="SIGTERM")
    assert play.did == [(1.0, GENTLY)]


# ---------------------------------------------------------------- what fails beside the run


class Broken(FakeView):
    """Can neither show nor close."""

    def show(self, run: Run, events: Sequence[Event]) -> None:
        super().show(run, events)
        if any(isinstance(event, Printed) for event in events):
            raise BrokenPipeError("the front end is gone")

    def show_report(self, report: Report) -> None:
        raise ValueError("it is too large")


def test_a_view_that_raises_costs_the_run_nothing() -> None:
    play = Play()
    play.view = Broken()
    results = play.run((1.0, Printed(0, ("x",), "")), (1.5, play.click("stacks")), returned(0, 2.0), returned(1, 2.0))
    assert len(results) == 2 and play.view.closed
    assert play.view.run.notes == (
        "The view has failed, and the ranks ran on without it: BrokenPipeError: the front end is gone",
        "Looking for stacks has failed, and the ranks ran on without it: ValueError: it is too large",
    )


@pytest.mark.parametrize(
    "owner, name",
    [
        (supervisor, "stall"),
        (supervisor.stacks, "text"),
        (supervisor.RecordedCollectives, "watched"),
        (supervisor.RecordedCollectives, "note_end"),
        (supervisor.Profile, "add"),
        (FakeEngine, "look"),
        (FakeEngine, "ask"),
        (FakeEngine, "stacks"),
    ],
)
def test_a_diagnosis_that_fails_hides_no_error(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    assert callable(getattr(owner, name))
    monkeypatch.setattr(owner, name, broken)
    play = Play()
    with pytest.raises(nbspawn.RankRaisedError):
        play.run(raised(0, 1.0))
    play = Play()
    with pytest.raises(nbspawn.RunTimeoutError):
        play.run(timeout=40.0)
    play = Play()
    with pytest.raises(KeyboardInterrupt):
        play.run((1.0, play.press()), (2.0, play.press()), obey="SIGKILL")
    play = Play()
    assert len(play.run(returned(0, 1.0), returned(1, 1.0))) == 2


# ---------------------------------------------------------------- nobody watches the ranks


def fail() -> None:
    raise BrokenPipeError("no poll any more")


def test_ranks_that_cannot_be_watched_are_stopped() -> None:
    play = Play()
    with pytest.raises(BrokenPipeError):
        play.run((1.0, fail), obey="SIGTERM")
    assert play.did == [(1.0, GENTLY)] and play.engine.now == 4.0
    assert play.view.closed and play.view.run.counts == {"killed": 2}


def test_a_press_kills_ranks_that_nobody_watches() -> None:
    play = Play()
    with pytest.raises(BrokenPipeError):
        play.run((1.0, fail), (2.0, play.press()), obey="SIGTERM")
    assert play.did[:2] == [(1.0, GENTLY), (2.0, KILL)] and play.engine.now == 2.0


def test_what_has_to_be_done_afterwards_is_done_whatever_happens() -> None:
    play = Play()
    engine = FakeEngine(2, (1.0, fail))
    watching = Supervisor(CommandOptions(view=play.view), engine, play.flag, engine.clock)
    watching.open(Run.new(2, "fork", "", engine.log_dir, 0.0))
    with pytest.raises(BrokenPipeError):
        watching.results(play.view.run, lambda run: replace(run, notes=("tidied",)))
    assert play.view.run.notes == ("tidied",)
