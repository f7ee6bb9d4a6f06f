"""The stacks of all ranks: complete, fresh, grouped, and nothing is left of the look."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_functions as ranks
from leftovers import until
from methods import EVERY_METHOD

import nbspawn
from nbspawn._engine.run import native_stacks
from nbspawn._engine.run import stacks as engine_stacks
from nbspawn._protocol.frames import Frame, Position, Stack, users_frames, written_frames
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.messages import Event, Sampled, Started
from nbspawn._protocol.signals import STACK
from nbspawn._render import stacks
from nbspawn._state.run import Run, reduce
from nbspawn._state.snapshot import Snapshot

HERE = ranks.__file__


def frames(text: str) -> tuple[Frame, ...]:
    return users_frames(written_frames(text))


@pytest.fixture
def started(nothing_left: None, tmp_path: Path) -> Any:
    """Starts ranks, waits until they are where they stay, and ends them."""
    contexts = []

    def start(fn: Any, nprocs: int, method: str) -> Any:
        context = nbspawn.spawn(fn, (str(tmp_path),), nprocs=nprocs, start_method=method, join=False)
        contexts.append(context)
        events: list[Event] = []

        def all_there() -> bool:
            events.extend(event for event in context.poll(0.05) if isinstance(event, Started))
            return len(events) == nprocs == len(list(tmp_path.glob("running-*")))

        assert until(all_there)
        return context

    yield start
    for context in contexts:
        context.close()
        for process in context.processes:
            process.close()


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_ranks_in_python_in_native_code_and_with_threads(started: Any, method: str) -> None:
    context = started(ranks.stand_in_different_places, 3, method)
    found = context.look(deep=True, native=range(3))
    assert [frame.name for frame in found[0].frames if frame.line] == ["stand_in_different_places", "pause"]
    assert [frame.name for frame in found[1].frames if frame.line] == ["stand_in_different_places"]
    assert found[0].frames[0].file == HERE == found[1].frames[0].file
    assert found[1].frames[0].line < found[0].frames[0].line, "it holds the GIL two lines above"
    assert [name for name, _ in found[0].threads] == ["feeder"] and found[1].threads == ()
    assert found[0].threads[0][1][-1].name == "wait"


def test_each_look_is_fresh(started: Any, tmp_path: Path) -> None:
    context = started(ranks.stand_here_then_there, 2, "fork")
    assert _functions(context.look(deep=False)) == {"stand_here"}
    (tmp_path / "go").touch()
    assert until(lambda: len(list(tmp_path.glob("there-*"))) == 2)
    assert _functions(context.look(deep=False)) == {"stand_there"}


def _functions(found: dict[int, Stack]) -> set[str]:
    return {stack.frames[1].name for stack in found.values()}


def test_a_rank_that_does_not_answer(started: Any) -> None:
    context = started(ranks.mark_and_sleep, 2, "fork")
    os.kill(context.pids()[1], signal.SIGSTOP)
    assert until(lambda: psutil.Process(context.pids()[1]).status() == psutil.STATUS_STOPPED)
    found = context.look(deep=True)
    assert found[0].frames and not found[1].frames
    run = Run.new(2, "fork", "", "/logs", 0.0)
    assert "Rank 1: not in the cell's code, or stopped by the system" not in stacks.text({0: found[0]}, at(run))
    message = stacks.text(found, at(run))
    assert message[-1] == "Rank 1: starting", "the state is what the run knows of it"


SLOW_WRITER = """
import pathlib, signal, sys, time
stack, rest = map(pathlib.Path, sys.argv[1:])
def write(*_):
    with stack.open("a") as file:
        file.write('Stack (most recent call first):\\n  File "a.py", line 3 in inner\\n')
        file.flush()
        while not rest.exists(): time.sleep(0.001)
        file.write('  File "a.py", line 9 in outer\\n  File "/x/nbspawn/_rank/main.py", line 1 in run\\n')
signal.signal(int(sys.stdin.readline()), write)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_stack_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a loaded machine loses its processor between two lines that it writes."""
    files, rest = RunFiles(tmp_path, tmp_path), tmp_path / "rest"
    seen: list[str] = []

    def is_whole(text: str) -> bool:
        seen.append(text)
        if "inner" in text:
            rest.touch()
        return original(text)

    original = engine_stacks.is_whole
    monkeypatch.setattr(engine_stacks, "is_whole", is_whole)
    command = [sys.executable, "-c", SLOW_WRITER, str(files.stack(0)), str(rest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin and rank.stdout
        print(int(STACK), file=rank.stdin, flush=True)
        rank.stdout.readline()
        found = engine_stacks.Stacks(files, None).look({0: rank.pid}, deep=False)
        rank.stdin.close()
    assert found == {0: Stack((Frame("a.py", 9, "outer"), Frame("a.py", 3, "inner")))}
    assert not original(seen[0]) and original(seen[-1])


def test_a_stack_that_is_too_deep_is_whole_where_it_is_cut(tmp_path: Path) -> None:
    def deeper(depth: int) -> str:
        if depth:
            return deeper(depth - 1)
        with (tmp_path / "stack").open("w+") as file:
            faulthandler.dump_traceback(file, all_threads=False)
            file.seek(0)
            return file.read()

    whole = deeper(150)
    assert engine_stacks.is_whole(whole) and len(frames(whole)) == 100
    assert not any(engine_stacks.is_whole(whole[:end]) for end in range(len(whole)))


def test_one_without_an_answer_was_seen_somewhere() -> None:
    """On a full disk no rank can write its stack."""
    here = Position((Frame("cell", 3, "<module>"),))
    run = Run.new(1, "fork", "", "/logs", 0.0, cell="cell", source=("a", "b", "c()"))
    for event in (Started(0, 1, 0.1), Sampled(0, 0.2, here, 0.2, ())):
        run = reduce(run, [event], 0.2)
    assert stacks.text({0: Stack()}, at(run)) == [
        "Rank 0, without an answer, seen last:",
        "  cell, line 3",
        "      c()",
    ]


def test_many_ranks_answer(started: Any) -> None:
    found = started(ranks.mark_and_sleep, 24, "forkserver").look(deep=True, native=range(24))
    assert len(found) == 24 and len({stack.frames for stack in found.values()}) == 1
    assert next(iter(found.values())).frames[-1 - _native(found[0])].name == "mark_and_sleep"


def _native(stack: Stack) -> int:
    return sum(not frame.line for frame in stack.frames)


def test_py_spy_that_may_not_look_or_gives_nonsense_is_no_error(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = started(ranks.mark_and_sleep, 2, "fork")
    for script in ("echo Permission Denied >&2; exit 1", "echo '[]'", "echo '[3]'", "echo nonsense"):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(native_stacks, "_py_spy", lambda program=program: str(program))
        found = context.look(deep=True, native=range(2))
        assert found[0].frames[-1].name == "mark_and_sleep" and not _native(found[0])


DUMP = """Stack (most recent call first):
  File "/site-packages/torch/a.py", line 3 in wait
  File "/tmp/ipykernel_1/2.py", line 12 in <module>
  File "/x/IPython/core/interactiveshell.py", line 3823 in run_code
  File "/tmp/ipykernel_1/2.py", line 1 in <module>
Current thread 0x00007f (most recent call first):
  File "/y.py", line 1 in later
"""


def test_the_users_part_of_the_first_dump() -> None:
    assert frames(DUMP) == (
        Frame("/tmp/ipykernel_1/2.py", 12, "<module>"),
        Frame("/site-packages/torch/a.py", 3, "wait"),
    )
    assert engine_stacks.is_whole(DUMP) and not engine_stacks.is_whole(DUMP.partition("in run_code")[0])
    assert frames("") == frames("Fatal Python error: Aborted\n") == ()


def _text(frame: Frame) -> str:
    return f"text of {frame.line}"


def at(run: Run) -> Snapshot:
    return Snapshot(run, 1.0, _text)


CELL = "/tmp/ipykernel_1/2.py"
RUN = Run.new(8, "fork", "", "/logs", 0.0, CELL, ("%%spawn 8", "import x", "x.go(1 < 2)"), {CELL: "Cell In[4]"})
AT_3 = Frame(CELL, 3, "<module>")
IN_TORCH = Frame("/v/lib/python3.11/site-packages/torch/x.py", 7, "go")


def test_ranks_with_the_same_stack_are_one_group_and_library_paths_are_short() -> None:
    found = {0: Stack((AT_3, IN_TORCH)), 3: Stack((AT_3, IN_TORCH)), 1: Stack((AT_3, Frame("libc.so.6", 0, "read")))}
    assert stacks.text(found, at(RUN)) == [
        "Ranks 0 and 3:",
        "  Cell In[4], line 3",
        "      x.go(1 < 2)",
        "  torch/x.py, line 7, in go",
        "      text of 7",
        "Rank 1:",
        "  Cell In[4], line 3",
        "      x.go(1 < 2)",
        "  native: read (libc.so.6)",
    ]
    page = stacks.html("Where <now>", found, at(RUN), open_=False)
    assert "x.go(1 &lt; 2)" in page and "Where &lt;now&gt;" in page and "<details>" in page and " open" not in page


@pytest.mark.parametrize(
    "seen", [(AT_3,), (AT_3._replace(name="<cell line: 1>"),), (), (Frame(CELL, 2, "<module>"),)], ids=repr
)
def test_a_rank_waits_where_its_stack_still_is(seen: tuple[Frame, ...]) -> None:
    """It may have left what it was seen in last (the process group's rendezvous, before the cell) for a call that holds
    Python's lock."""
    run = RUN
    for event in (Started(0, 1, 0.1), Sampled(0, 0.2, Position(seen, "barrier", True), 0.2, ())):
        run = reduce(run, [event], 0.2)
    heading, *_ = stacks.text({0: Stack((AT_3, IN_TORCH))}, replace(at(run), now=10.2))
    assert heading == ("Rank 0, waiting 10.0 s in barrier:" if seen[:1] and seen[0].line == 3 else "Rank 0:")
    written = AT_3._replace(file="/tmp/\\xe9.py")  # by faulthandler, in a file of that name
    here = Position((AT_3._replace(file="/tmp/é.py"),), "barrier", True)
    run = reduce(RUN, [Started(0, 1, 0.1), Sampled(0, 0.2, here, 0.2, ())], 0.2)
    assert stacks.text({0: Stack((written,))}, replace(at(run), now=10.2))[0] == "Rank 0, waiting 10.0 s in barrier:"


def test_a_short_wait_is_told_if_the_stack_shows_it() -> None:
    """A rank that calls barrier() again and again may be in something else since it was seen there."""
    run = reduce(RUN, [Started(0, 1, 0.1), Sampled(0, 0.2, Position((AT_3,), "barrier", True), 0.2, ())], 0.2)
    for innermost, heading in ("barrier", "Rank 0, waiting in barrier:"), ("backward", "Rank 0:"):
        assert stacks.text({0: Stack((AT_3, IN_TORCH._replace(name=innermost)))}, at(run))[0] == heading


def test_other_threads_are_folded() -> None:
    thread = ("loader", (Frame("/a/lib/python3.11/queue.py", 5, "get"), IN_TORCH))
    found = {rank: Stack((AT_3,), (thread,)) for rank in range(2)}
    assert stacks.text(found, at(RUN))[-1] == "  thread loader: torch/x.py, line 7, in go"
    page = stacks.html("Where", found, at(RUN), open_=True)
    assert page.count("1 other thread<") == 1 and "queue.py, line 5, in get" in page


def test_deep_stacks_and_many_groups_are_cut() -> None:
    deep = tuple(Frame(CELL, line, "f") for line in range(1, 100))
    message = stacks.text({0: Stack(deep)}, at(RUN))
    assert "  ... 75 more calls" in message and message[1] == "  Cell In[4], line 1, in f"
    assert "  Cell In[4], line 99, in f" in message and len(message) < 60
    many = {rank: Stack((Frame(CELL, rank + 1, "f"),)) for rank in range(30)}
    message = stacks.text(many, at(Run.new(30, "fork", "", "/logs", 0.0, CELL, (), {})))
    assert message[-1] == "and 18 more stacks, of other ranks"
