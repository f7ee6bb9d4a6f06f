"""Where ranks are and what they use, told by real ranks: positions, waits, gauges; and that nobody is held up."""

from __future__ import annotations

import inspect
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_functions as ranks
from methods import EVERY_METHOD

import nbspawn
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.gauges import SLOT
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Event, Measured, Sampled
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.report.sampler import Sampler
from nbspawn._render import text
from nbspawn._session.views import StreamView
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import RankStatus, Run
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.whereabouts import silent

pytestmark = pytest.mark.usefixtures("nothing_left")
light_methods = pytest.mark.parametrize("method", ["fork", "forkserver"])


class Watch(StreamView):
    """Keeps every event and every state; calls ``act`` with the run after each."""

    def __init__(self, act: Callable[[Run], None] = lambda run: None) -> None:
        super().__init__()
        self.act = act
        self.events: list[Event] = []
        self.seen: list[RankStatus] = []

    def show(self, run: Run, events: Sequence[Event]) -> None:
        super().show(run, events)
        self.events += events
        self.seen += run.ranks
        self.act(run)

    def of(self, kind: type, rank: int) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.rank == rank]


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


@light_methods
def test_a_rank_that_waits_in_a_collective_is_told_from_one_that_has_not_arrived(method: str, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def act(run: Run) -> None:
        late, waiting = run.ranks
        if waiting.state == "waiting" and late.state == "running" and time.monotonic() - waiting.called > 0.8:
            go.touch()

    watch = Watch(act)
    nbspawn.spawn(
        ranks.reduce_when_told, (str(go),), nprocs=2, backend="gloo", start_method=method, view=watch, timeout=120
    )
    last = [status for status in watch.seen if status.rank == 1 and status.state == "waiting"][-1]
    assert (last.position.call, last.position.collective) == ("all_reduce", True)
    assert last.position.frames[-1].line == line_of(ranks.reduce_when_told, "dist.all_reduce")
    assert last.position.frames[-1].name == "reduce_when_told"
    spots = {status.position.frames[-1].line for status in watch.seen if status.rank == 0 and status.position.frames}
    assert line_of(ranks.reduce_when_told, "time.sleep") in spots


@pytest.mark.parametrize(
    ("function", "call", "line"),
    [
        pytest.param(
            ranks.ddp_made_when_told,
            "DistributedDataParallel",
            "torch.nn.parallel.DistributedDataParallel(",
            marks=pytest.mark.extended,
        ),
        pytest.param(ranks.ddp_forward_when_told, "forward", "model(torch.ones", marks=pytest.mark.extended),
        (ranks.ddp_backward_when_told, "backward", "loss.backward()"),
        (ranks.wait_when_told, "wait", "work.wait()"),
    ],
)
def test_a_wait_that_no_python_frame_tells_of(function: Any, call: str, line: str, tmp_path: Path) -> None:
    """In C++, for a rank that has not come so far."""
    go = tmp_path / "go"

    def act(run: Run) -> None:
        if run.ranks[1].state == "waiting" and time.monotonic() - run.ranks[1].called > 1.5:
            go.touch()

    watch = Watch(act)
    nbspawn.spawn(function, (str(go),), 2, backend="gloo", view=watch, timeout=120)
    last = [status for status in watch.seen if status.rank == 1 and status.state == "waiting"][-1]
    assert last.position.call == call
    assert last.position.frames[-1].line == line_of(function, line)


@pytest.mark.parametrize(
    "what",
    [
        "process",
        "thread",
        *(pytest.param(one, marks=pytest.mark.extended) for one in ("any child", "event")),
        pytest.param(
            "work that is done",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="which call of a line runs is not told"),
        ),
    ],
)
def test_a_wait_for_no_rank_is_none(what: str) -> None:
    """Of seconds: a rank counts as idle only then."""
    watch = Watch()
    nbspawn.spawn(ranks.wait_for_nobody, (what,), 2, backend="gloo", view=watch, timeout=120)
    states = [(status.state, status.position.frames[-1].name) for status in watch.seen if status.position.frames]
    assert ("running", "wait_for_nobody") in states
    assert not [state for state in states if state == ("waiting", "wait_for_nobody")]


@pytest.mark.extended
@pytest.mark.timing
def test_each_of_many_short_collectives_is_a_call_of_its_own() -> None:
    watch = Watch()
    nbspawn.spawn(ranks.reduce_for, (3.0,), nprocs=2, backend="gloo", start_method="fork", view=watch, timeout=120)
    called = {status.called for status in watch.seen if status.rank == 0 and status.state == "waiting"}
    assert len(called) > 1
    longest = max(time.monotonic() - status.called for status in watch.seen[-2:])
    assert longest < 1.5


def test_only_changes_are_sent() -> None:
    watch = Watch()
    nbspawn.spawn(ranks.sleep_for, (2.0,), nprocs=1, start_method="fork", view=watch)
    assert 1 <= len(watch.of(Sampled, 0)) <= 3
    assert len(watch.of(Measured, 0)) <= 4


@pytest.mark.extended
def test_gauges() -> None:
    watch = Watch()
    nbspawn.spawn(ranks.work_for, (2.5, 300_000_000), nprocs=1, start_method="fork", view=watch)
    known = [status for status in watch.seen if status.cpu is not None and status.state == "running"]
    assert known[-1].cpu is not None and 0.2 < known[-1].cpu < 1.3  # the machine may have other things to do
    assert known[-1].memory is not None and 300e6 < known[-1].memory < 2e9
    assert known[-1].device_memory == -1


def peaks(watch: Watch) -> list[str]:
    """What the final table says of each rank."""
    return text.numbers(watch.run, text.rows(Snapshot(watch.run, time.monotonic()))).get("peak", [])


def megabytes(watch: Watch) -> list[int]:
    """The same as numbers."""
    found = peaks(watch)
    assert all(found), (text.table(Snapshot(watch.run, time.monotonic())), watch.seen)
    return [int(peak.removesuffix(" MB")) for peak in found]


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_what_a_rank_uses_for_a_moment_is_its_peak(method: str) -> None:
    """And what this process has used for a moment is not."""
    bytearray(900_000_000)
    watch = Watch()
    nbspawn.spawn(ranks.use_for_a_moment, (200_000_000,), nprocs=2, start_method=method, view=watch)
    found = megabytes(watch)
    assert len(found) == 2 and all(200 < peak < 900 for peak in found), found


def test_the_peak_of_a_rank_that_fails() -> None:
    watch = Watch()
    with pytest.raises(nbspawn.RankRaisedError):
        nbspawn.spawn(ranks.use_and_fail, (200_000_000,), nprocs=1, start_method="fork", view=watch)
    assert megabytes(watch)[0] > 200


def test_each_command_of_kept_ranks_has_its_own_peak() -> None:
    watch = Watch()
    with nbspawn.Session(2, view=watch) as session:
        session.run(ranks.use_for_a_moment, 100_000_000)
        first = megabytes(watch)
        session.run(ranks.use_for_a_moment, 400_000_000)
        second = megabytes(watch)
        session[1].run(ranks.use_for_a_moment, 1)
        idle, last = peaks(watch)
    assert all(250 < later - earlier < 350 for earlier, later in zip(first, second, strict=True)), (first, second)
    assert idle == "" and int(last.removesuffix(" MB")) < first[1] - 50


@pytest.mark.extended
def test_a_rank_that_holds_the_gil_in_native_code_gives_no_sign_of_life() -> None:
    quiet: list[float] = []
    watch = Watch(lambda run: quiet.append(silent(run.ranks[0], time.monotonic())))
    nbspawn.spawn(ranks.hold_the_gil, (4.5,), nprocs=1, start_method="fork", view=watch)
    assert max(quiet) > 3.0
    assert quiet[-1] == 0.0, "it came back"


@pytest.mark.extended
@pytest.mark.timing
def test_the_samples_add_up_to_the_time_at_each_line() -> None:
    watch = Watch()
    began = time.monotonic()
    nbspawn.spawn(ranks.two_steps, (1.5, 0.5), nprocs=1, start_method="fork", view=watch)
    took = time.monotonic() - began
    profile = Profile(watch.run)
    profile.add(watch.events, time.monotonic())
    assert 1.8 <= profile.totals[0] <= took
    seconds = {line.frame.line: line for line in profile.lines.values() if line.frame is not None}
    first = seconds[line_of(ranks.two_steps, "pause(first)")]
    assert first.seconds[0] == pytest.approx(1.5, abs=0.3)
    assert seconds[line_of(ranks.two_steps, "time.sleep(second)")].seconds[0] == pytest.approx(0.5, abs=0.3)
    (below,) = first.below.values()
    assert below.frame is not None and below.frame.name == "pause"
    assert below.seconds == first.seconds
    done = [list(one.seconds) for one in profile.timeline.bins[0] if len(one.seconds) == 1]
    lines = [activity.frame.line for (activity,) in done if activity.frame is not None]
    assert lines == sorted(lines) and len(lines) >= 10, "one after another"


class FakeChannel:
    """The kernel ``reads``, or does not."""

    reads = False

    def __init__(self) -> None:
        self.got: list[Any] = []

    def try_send(self, event: Event) -> bool:
        if self.reads:
            self.got.append(event)
        return self.reads


def test_while_nothing_can_be_sent_no_second_is_lost(tmp_path: Path) -> None:
    """And what is remembered is bounded."""
    files = RunFiles(tmp_path, tmp_path)
    files.gauges.write_bytes(bytes(SLOT.size))
    files.stack(0).touch()
    channel = FakeChannel()
    info = SimpleNamespace(rank=0, launch=SimpleNamespace(files=files, world_size=1))
    sampler = Sampler(info, channel)  # type: ignore[arg-type]
    positions = [Position((Frame("cell", line, "<module>"),)) for line in range(1, 4)]
    for number in range(1000):
        sampler._spend(positions[number % 3], 0.1)
        sampler._spend(positions[number % 3], 0.2)
        assert not sampler._send()
    channel.reads = True
    sampler._looked = 1000.0
    assert sampler._send()
    (message,) = channel.got
    assert len(message.spent) == 100 and message.time == 1000.0, "until the last look"
    assert sum(seconds for _, seconds in message.spent) == pytest.approx(300.0)
    assert message.spent[:99] == tuple((positions[number % 3], pytest.approx(0.3)) for number in range(99))
    assert sampler._send() and channel.got[-1].spent == (), "it is sent once"


def test_a_kernel_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    """As with join=False, and a user who comes back tomorrow."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    channel = Channel(tmp_path / "socket")
    reader, _ = listener.accept()
    event = Sampled(0, 1.0, Position(), 1.0, ())
    offered = [channel.try_send(event) for _ in range(100_000)]
    assert offered[0] and not offered[-1]
    while reader.recv(1 << 20, socket.MSG_DONTWAIT | socket.MSG_PEEK):
        reader.recv(1 << 20)
        if channel.try_send(event):
            break
    assert channel.try_send(event)
    channel.close()
    reader.close()
    listener.close()
