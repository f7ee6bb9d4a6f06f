"""pdb in a rank: breakpoint(), pdb.set_trace(), IPython's and ipdb's debugger, and a look at the frame that raised.

They read with ``input()``, which asks the kernel (_rank/prompts.py). What is changed here, in this process alone, is
pdb's classes themselves, since all these debuggers are made of them, however they are called:

- the kernel is told when a debugger has stopped the rank, and when the rank goes on;
- an interrupt ends the session: pdb and IPython swallow it, and the rank would stay at its prompt;
- SIGINT stays ours: pdb takes it over at ``continue``;
- the frames above the person's code (under fork those of the kernel, too) are neither shown nor stepped through.

On a signal (``signals.BREAK``) the rank stops where it is: Python runs the handler before its next line, and when the
signal has cut a system call short (``sleep``, a lock) at once; a call into native code has to return first.
"""

from __future__ import annotations

import bdb
import code
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from nbspawn._protocol import signals
from nbspawn._protocol.frames import Frame
from nbspawn._protocol.messages import Raised, Resumed, RunCell, Stopped
from nbspawn._rank.channel import Channel
from nbspawn._rank.info import RankInfo
from nbspawn._rank.outcome import Outcome
from nbspawn._rank.sampler import is_library
from nbspawn._state.run import is_echo

_RANK = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MAIN = os.path.join(_RANK, "main.py")
_PACKAGE = os.path.dirname(os.path.dirname(_RANK)) + os.sep
_RUNS_CELLS = tuple(
    os.path.join(*path)
    for path in (
        ("IPython", "core", "interactiveshell.py"),
        ("IPython", "core", "async_helpers.py"),
        ("ipykernel", "zmqshell.py"),
    )
)


class _Interrupted(BaseException):
    """A KeyboardInterrupt at the prompt, under a name that neither pdb nor IPython handles."""


_early: list[int] = []
"""Signals that came before the rank could be debugged."""

_rank: _Rank
"""Of this process."""


@contextmanager
def prompting(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives, the person can debug it."""
    import pdb

    global _rank
    _rank = _Rank(info, channel)
    adapt(pdb.Pdb)
    pdb.Pdb.get_stack = _rank.showing(pdb.Pdb.get_stack)  # type: ignore[method-assign]
    pdb.Pdb.cmdloop = _leaving(pdb.Pdb.cmdloop)  # type: ignore[method-assign]
    pdb.Pdb.set_trace = _at_once(pdb.Pdb.set_trace)  # type: ignore[method-assign]
    for name in ("user_call", "user_return"):
        setattr(pdb.Pdb, name, _rank.between_statements(getattr(pdb.Pdb, name)))
    pdb.Pdb.nosigint = property(lambda debugger: True, lambda debugger, value: None)  # type: ignore[attr-defined]
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _breakpoint
    signal.signal(signals.BREAK, _rank.break_in)
    if _early:
        break_soon()
    yield


def adapt(kind: type) -> None:
    """Have a class of debuggers (pdb's own; IPython's, which overrides these methods) be this rank's."""
    for name, adapted in (
        ("interaction", _rank.telling),
        ("format_stack_entry", _rank.naming),
        ("stop_here", _rank.in_the_persons_code),
    ):
        setattr(kind, name, adapted(getattr(kind, name)))
    kind.do_interact = _interact  # type: ignore[attr-defined]


def not_yet() -> None:
    """Until the rank can be debugged, remember the wish for it (which by default would end the process)."""
    signal.signal(signals.BREAK, lambda signum, frame: _early.append(signum))


def break_soon() -> None:
    """Stop at the person's next line."""
    _rank.break_in(signals.BREAK, sys._getframe())


def post_mortem(info: RankInfo, ended: Outcome, error: BaseException) -> None:
    """Under ``--pdb``: let the person look at the frame that raised ``error``, of which ``ended`` will tell. Returns
    when they quit, or nobody can be asked."""
    if not (info.command.pdb and isinstance(ended, Raised) and isinstance(error, Exception)):
        return
    if ended.by_quit or is_echo(f"{ended.name}: {ended.message}"):
        return
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_next is not None and _runs_ranks(frames.tb_frame):
        frames = frames.tb_next
    print(f"{ended.name}: {ended.message}", flush=True)
    try:
        with info.interrupts.enabled():
            debugger = _make()
            debugger.reset()
            debugger.interaction(None, frames)
    except KeyboardInterrupt:
        pass  # the run is being stopped, and the error is what there is to tell
    except RuntimeError as refusal:
        print(f"--pdb: {refusal}", flush=True)


def _breakpoint(*args: Any, **kwargs: Any) -> None:
    frame = sys._getframe(1)
    if not attached(frame):
        _make().set_trace(frame)


def _nobody(frame: FrameType) -> bool:
    return False


attached: Callable[[FrameType], bool] = _nobody
"""Stops at a frame and says True if another debugger is attached (_rank/listener.py)."""


def _make() -> Any:
    import pdb

    ipython: Any = sys.modules.get("IPython.core.debugger")
    if ipython is not None and sys.modules["IPython"].get_ipython() is not None:
        return ipython.Pdb()
    return pdb.Pdb()


class _Rank:
    """What the debuggers' methods have to know of the rank."""

    def __init__(self, info: RankInfo, channel: Channel) -> None:
        self._rank = info.rank
        self._info = info
        self._channel = channel
        self._inside = False
        self._broken_into = False

    @property
    def _cell(self) -> str | None:
        command = self._info.command
        return command.filename if isinstance(command, RunCell) else None

    @property
    def _names(self) -> Mapping[str, str]:
        return self._info.names

    def break_in(self, signum: int, frame: FrameType | None) -> None:
        """The signal's handler: stop in the person's innermost frame, with what it has called below it."""
        if self._inside:
            return
        if self._channel.sending or self._channel.asking:  # and the debugger has something to send and to ask, too
            waiting = self._channel.on_sent if self._channel.sending else self._channel.on_answered
            waiting.append(lambda: self.break_in(signum, frame))
            return
        while frame is not None and frame.f_code.co_filename.startswith(_RANK):
            frame = frame.f_back
        if frame is None:
            return
        if not self._is_theirs(frame):  # but IPython's, before their first line or for one of theirs: at the next
            self._wait_for_theirs(frame)
            return
        if not attached(frame):
            self._broken_into = True
            _make().set_trace(frame)

    def _wait_for_theirs(self, frame: FrameType | None) -> None:
        def called(entered: FrameType, event: str, argument: object) -> Any:
            return at_line if self._is_theirs(entered) else None

        def at_line(running: FrameType, event: str, argument: object) -> Any:
            if event != "line":
                return at_line
            sys.settrace(None)
            self.break_in(signals.BREAK, running)
            return running.f_trace

        while frame is not None:
            if self._is_theirs(frame):
                frame.f_trace = at_line
            frame = frame.f_back
        sys.settrace(called)

    def _is_theirs(self, frame: FrameType) -> bool:
        """Is it the cell's code, or the function's that ranks run, or has that called it?"""
        calls = list(_calls(frame))
        if self._cell is not None:
            return any(called.f_code.co_filename in self._names for called in calls)
        caller = calls[-1].f_back if calls else None
        if caller is None or (caller.f_code.co_filename, caller.f_code.co_name) != (_MAIN, "_run"):
            return False
        return not calls[-1].f_code.co_filename.startswith(_PACKAGE)

    def _persons(self, frame: FrameType) -> FrameType:
        """The innermost frame that is not a library's, of those that led to this one; else this one."""
        for called in _calls(frame):
            if called.f_code.co_filename in self._names or not is_library(called.f_code.co_filename):
                return called
        return frame

    def telling(self, interaction: Callable[..., None]) -> Callable[..., None]:
        """Tell the kernel of each session, once: IPython's ``interaction`` calls pdb's."""

        def told(debugger: Any, frame: FrameType | None, *args: Any, **kwargs: Any) -> None:
            if self._inside:
                interaction(debugger, frame, *args, **kwargs)
                return
            self._inside = True
            shown = self._persons(frame) if self._broken_into and frame is not None else frame
            self._channel.send(Stopped(self._rank, time.monotonic(), _place(shown, *args), frame is None))
            try:
                interaction(debugger, frame, *args, **kwargs)
            except _Interrupted:
                raise KeyboardInterrupt from None
            finally:
                self._inside = False
                soon = debugger.quitting or frame is None or debugger.stoplineno != -1
                self._channel.send(Resumed(self._rank, time.monotonic(), soon))

        return told

    def showing(self, get_stack: Callable[..., Any]) -> Callable[..., Any]:
        """The stack from the cell on, or from the person's function."""

        def below(debugger: Any, *args: Any) -> Any:
            stack, current = get_stack(debugger, *args)
            while len(stack) > 1 and stack[-1][0].f_code.co_filename.startswith(_RANK):
                del stack[-1]  # an input() of theirs that raised is theirs, not our code below it
            current = min(current, len(stack) - 1)
            files = [frame.f_code.co_filename for frame, _ in stack]
            first = max((number + 1 for number, file in enumerate(files) if file.startswith(_RANK)), default=0)
            if self._cell in files[first:]:
                first = files.index(self._cell, first)
            for frame, _ in stack:
                frame.f_trace_lines = True  # the sampler marks library frames with it (_rank/sampler.py)
            if self._broken_into:
                self._broken_into = False
                current = [frame for frame, _ in stack].index(self._persons(stack[-1][0]))
            return stack[first:], max(0, current - first)

        return below

    def naming(self, format_stack_entry: Callable[..., str]) -> Callable[..., str]:
        """'Cell In[5]', as in tracebacks, where IPython has a temporary file's path."""

        def named(*args: Any, **kwargs: Any) -> str:
            text = format_stack_entry(*args, **kwargs)
            for file, name in self._names.items():
                text = text.replace(file, name)
            return text

        return named

    def between_statements(self, stop: Callable[..., None]) -> Callable[..., None]:
        """From one statement of a cell the next step leads to the next one: no stop at its return, and at its call."""

        def stopped(debugger: Any, frame: FrameType, *args: Any) -> None:
            statement = frame.f_code.co_name.startswith(("<module>", "<cell line"))  # the latter in Colab
            if not statement or frame.f_code.co_filename not in self._names:
                stop(debugger, frame, *args)

        return stopped

    def in_the_persons_code(self, stop_here: Callable[..., bool]) -> Callable[..., bool]:
        """Neither in what runs the cell, nor in what that calls by itself."""

        def here(debugger: Any, frame: FrameType) -> bool:
            return self._is_theirs(frame) and stop_here(debugger, frame)

        return here


def _place(frame: FrameType | None, raised: Any = None, *_: Any) -> Frame:
    """The line at which the session begins: ``frame``'s, or that of the innermost frame of a traceback."""
    if frame is not None:
        return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    frames = getattr(raised, "__traceback__", raised)
    while frames.tb_next is not None:
        frames = frames.tb_next
    code = frames.tb_frame.f_code
    return Frame(code.co_filename, frames.tb_lineno, code.co_name)


def _leaving(cmdloop: Callable[..., None]) -> Callable[..., None]:
    def leaving(debugger: Any, intro: Any = None) -> None:
        debugger.completekey = None  # else readline is imported, and writes to the terminal
        try:
            cmdloop(debugger, intro)
        except KeyboardInterrupt:
            raise _Interrupted from None
        if sys.version_info < (3, 13) and debugger.curframe is not None:  # what the person has assigned there
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(debugger.curframe), ctypes.c_int(0))

    return leaving


def _interact(debugger: Any, arg: str) -> None:
    """A console over the frame's variables. ``exit()`` leads back: a notebook has no end of file to type."""
    frame = debugger.curframe
    shows, sys.displayhook = sys.displayhook, debugger.displayhook  # a cell's values are shown when it ends
    try:
        code.interact("exit() leads back to the debugger", local={**frame.f_globals, **frame.f_locals}, exitmsg="")
    except SystemExit:
        pass
    finally:
        sys.displayhook = shows


def _at_once(set_trace: Callable[..., None]) -> Callable[..., None]:
    """Stop here, not at the next line: the statements of a cell are programs of their own, and the last has none."""

    def at_once(debugger: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
        frame = frame or sys._getframe(1)
        set_trace(debugger, frame, **kwargs)
        sys.settrace(None)
        debugger.interaction(frame, None)
        if debugger.quitting:
            raise bdb.BdbQuit
        if debugger.stoplineno != -1 or debugger.breaks:
            sys.settrace(debugger.trace_dispatch)

    return at_once


def _calls(frame: FrameType) -> Iterator[FrameType]:
    """The frame, and those that called it, up to the person's outermost."""
    called: FrameType | None = frame
    while called is not None and not _runs_ranks(called):
        yield called
        called = called.f_back


def _runs_ranks(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_RANK) or file.endswith(_RUNS_CELLS)
