"""When a rank stops in a debugger: at ``breakpoint()``, when the kernel asks for it, and where an error was raised.

The kernel asks with a signal (``signals.BREAK``). The rank stops where it is: Python runs the handler before its next
line, and when the signal has cut a system call short (``sleep``, a lock) at once; a call into native code has to return
first. What the debugger does then is in _rank/debug/pdb_methods.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from nbspawn._protocol import signals
from nbspawn._protocol.messages import Raised
from nbspawn._rank.debug import attached, pdb_methods
from nbspawn._rank.debug.user_frames import is_rank_code, runs_user_code
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.report.outcome import Outcome

_early: list[int] = []
"""Signals that came before the rank could be debugged."""


@contextmanager
def prompting(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: let the user debug it."""
    pdb_methods.install(info, channel)
    # Ray sets it in each process that connects to a cluster, to a debugger that works in Ray's own processes only.
    if os.environ.get("PYTHONBREAKPOINT", "ray.").startswith("ray."):
        os.environ.pop("PYTHONBREAKPOINT", None)
        sys.breakpointhook = _breakpoint
    signal.signal(signals.BREAK, _break_in)
    if _early:
        break_soon()
    yield


def not_yet() -> None:
    """Until the rank can be debugged: remember that it should be (the signal by default would end the process)."""
    signal.signal(signals.BREAK, lambda signum, frame: _early.append(signum))


def break_soon() -> None:
    """Stop at the user's next line."""
    _break_in(signals.BREAK, sys._getframe())


def post_mortem(info: RankInfo, ended: Outcome, error: BaseException) -> None:
    """Under ``--pdb``: let the user look at the frame that raised ``error``, which ``ended`` will report. Returns
    when they quit or go on, or nobody can be asked."""
    if not (info.command.pdb and isinstance(ended, Raised) and isinstance(error, Exception)):
        return
    if ended.by_quit or ended.lost_peer:
        return
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_next is not None and runs_user_code(frames.tb_frame):
        frames = frames.tb_next
    print(f"{ended.name}: {ended.message}", flush=True)
    try:
        with info.interrupts.enabled():
            if attached.look_at(error, frames):
                return
            debugger = _make()
            debugger.reset()
            debugger.interaction(None, frames)
    except KeyboardInterrupt:
        pass  # the run is being stopped, and the error is what there is to report
    except RuntimeError as refusal:
        print(f"--pdb: {refusal}", flush=True)


def _breakpoint(*args: Any, **kwargs: Any) -> None:
    frame = sys._getframe(1)
    if not attached.stop_at(frame):
        _make().set_trace(frame)


def _make() -> Any:
    import pdb

    ipython: Any = sys.modules.get("IPython.core.debugger")
    if ipython is not None and sys.modules["IPython"].get_ipython() is not None:
        return ipython.Pdb()
    return pdb.Pdb()


def _break_in(signum: int, frame: FrameType | None) -> None:
    """The signal's handler: stop in the user's innermost frame, with what it has called below it."""
    rank = pdb_methods.rank
    if rank.at_prompt or rank.paused_at is not None:
        return
    channel = rank.channel
    if channel.sending or channel.asking:  # and the debugger has something to send and to ask, too
        waiting = channel.on_sent if channel.sending else channel.on_answered
        waiting.append(lambda: _break_in(signum, frame))
        return
    while frame is not None and is_rank_code(frame):
        frame = frame.f_back
    if frame is None:
        return
    if not rank.frames.has(frame):  # but IPython's, before the user's first line or for one of them: at the next
        _break_at_users_next_line(frame)
        return
    if not attached.stop_at(frame):
        rank.broken_into = True
        _make().set_trace(frame)


def _break_at_users_next_line(frame: FrameType | None) -> None:
    users = pdb_methods.rank.frames

    def called(entered: FrameType, event: str, argument: object) -> Any:
        return at_line if users.has(entered) else None

    def at_line(running: FrameType, event: str, argument: object) -> Any:
        if event != "line":
            return at_line
        sys.settrace(None)
        _break_in(signals.BREAK, running)
        return running.f_trace

    while frame is not None:
        if users.has(frame):
            frame.f_trace = at_line
        frame = frame.f_back
    sys.settrace(called)
