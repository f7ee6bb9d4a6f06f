"""How ranks end when they are killed at an awkward moment: nobody may take one that is about to die for idle."""

from __future__ import annotations

import select
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import rank_functions as ranks
from leftovers import alive, until

from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.launch import resolve_start, start
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.run import signals
from nbspawn._engine.run.local_context import LocalContext
from nbspawn._payload.packing import Value
from nbspawn._protocol.messages import Event, Returned, Started

pytestmark = pytest.mark.usefixtures("nothing_left")


def kept(method: str, fn: Any, *args: Any) -> LocalContext:
    """Two ranks that stay when ``fn`` has returned, as a pool has them."""
    job = FunctionJob(fn, args)
    options = LaunchOptions(nprocs=2, start_method=method, keep=True)
    return start(job.command, resolve_start(job, options), options, job.inherited)


def unread(context: LocalContext, rank: int) -> bytes:
    """What has come from the rank, and stays in the kernel's socket."""
    connection: socket.socket = context._resources.hub._connections[rank]._socket
    return connection.recv(1 << 20, socket.MSG_PEEK) if select.select([connection], [], [], 0)[0] else b""


@pytest.mark.parametrize("signal", ["term", "kill"])
def test_a_kept_rank_that_is_killed_when_it_has_just_returned_is_not_idle(
    method: str, signal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Stop twice the pool gave such a rank its next command, which then ended with the rank."""
    context = kept(method, ranks.wait_for_file, str(tmp_path / "go"), 7)
    pids = context.pids()
    events: list[Event] = []

    def all_have_started() -> bool:
        events.extend(context.poll(0.05))
        return sum(isinstance(event, Started) for event in events) == 2

    assert until(all_have_started)
    (tmp_path / "go").touch()
    assert until(lambda: all(b"Returned" in unread(context, rank) for rank in range(2)))

    # On a busy machine a process that was sent a signal goes on for a while.
    send = signals.send
    late: list[threading.Timer] = []

    def send_late(pid: int, number: int) -> None:
        late.append(threading.Timer(0.3, send, (pid, number)))
        late[-1].start()

    monkeypatch.setattr(signals, "send", send_late)
    context.stop_at(**{signal: 0.0})

    def finished() -> bool:
        events.extend(context.poll(0.05))
        return context.finished

    try:
        assert until(finished)
        assert not any(map(alive, pids))
        assert context.all_exited and not context.all_alive
        assert sum(isinstance(event, Returned) for event in events) == 2, "their last messages came"
    finally:
        for timer in late:
            timer.join()
        context.dispose()


def test_a_kept_rank_that_was_only_interrupted_is_idle_once_it_has_returned(method: str, tmp_path: Path) -> None:
    context = kept(method, ranks.wait_for_file, str(tmp_path / "go"), 7)
    try:
        (tmp_path / "go").touch()
        assert until(lambda: context.poll(0.05) is not None and context.finished)
        context.stop_at(interrupt=0.0)
        assert context.finished and context.all_alive and not context.failures
        assert list(context.results()) == [7, 7]
    finally:
        context.dispose()


def test_what_belongs_to_an_earlier_command_is_not_taken_for_this_ones(method: str, tmp_path: Path) -> None:
    """A rank that was late would answer the next command with its old value."""
    context = kept(method, ranks.wait_for_file, str(tmp_path / "go"), 7)
    events: list[Event] = []

    def all_have_started() -> bool:
        events.extend(context.poll(0.05))
        return sum(isinstance(event, Started) for event in events) == 2

    assert until(all_have_started)
    old = Returned(0, 1.0, Value.of("old").result, 0)
    context._received(old, 0)
    assert old not in context.poll(0.0) and not context.finished

    (tmp_path / "go").touch()
    assert until(lambda: events.extend(context.poll(0.05)) or context.finished)
    assert list(context.results()) == [7, 7]
    context.dispose()
