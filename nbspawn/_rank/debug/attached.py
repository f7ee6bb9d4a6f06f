"""debugpy's debugger (pydevd) on this rank: what the kernel hears of its stops, and the stops that nbspawn asks for.

pydevd speaks the Debug Adapter Protocol with a front end, which shows where the rank is.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from nbspawn._process import traced
from nbspawn._protocol.frames import PACKAGE, Frame
from nbspawn._protocol.messages import Resumed, Stopped
from nbspawn._rank.debug import pdb_methods
from nbspawn._rank.program import stdio


def loaded() -> Any:
    """The module ``pydevd``, imported with debugpy."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # its warning would be shown among the user's output
    hook = sys.breakpointhook
    import debugpy
    import debugpy.server

    sys.breakpointhook = hook  # pydevd's own does nothing while no debugger is attached
    debugpy.configure(subProcess=False)
    return sys.modules["pydevd"]


def end_at_once(debugger: Any) -> None:
    """At the end of the rank its threads would wait for each other, up to 0.7 s, to tell the front end. The kernel
    notices by itself that the rank has ended."""
    atexit.unregister(sys.modules["pydevd"].stoptrace)
    debugger.check_alive_thread.do_kill_pydev_thread()


def watch(debugger: Any) -> None:
    """Before it stops anything: inform the kernel when this debugger (a ``PyDB``) stops the main thread, and have it
    stop only where the user's code is. A step from the last line of a cell leads into what runs the cell."""
    sys.modules["pydevd_tracing"].restore_sys_set_trace_func()  # its own warns about pdb, with ten lines at each step
    # As debugpy's own, nbspawn's frames are neither traced nor shown.
    hidden = PACKAGE, os.path.dirname(sys.modules["debugpy"].__file__ or "")
    sys.modules["_pydevd_bundle.pydevd_api"].PyDevdAPI().set_dont_trace_start_end_patterns(debugger, hidden, ())
    # At a breakpoint there the process would wait for ever: it has none of the threads that speak to the front end.
    os.register_at_fork(after_in_child=traced.leave)
    constants: Any = sys.modules["_pydevd_bundle.pydevd_comm_constants"]
    anywhere = constants.CMD_SET_BREAK, constants.CMD_THREAD_SUSPEND
    running = sys.modules["_pydevd_bundle.pydevd_constants"].STATE_RUN
    wait = debugger.do_wait_suspend

    def do_wait_suspend(thread: Any, frame: FrameType, event: str, arg: Any, exception_type: Any = None) -> None:
        rank = pdb_methods.rank
        if frame is rank.paused_at:
            wait(thread, frame, event, arg, exception_type)
        elif thread.ident != threading.main_thread().ident:
            with _told(frame, by_itself=thread.stop_reason != constants.CMD_THREAD_SUSPEND):
                wait(thread, frame, event, arg, exception_type)
        elif thread.stop_reason == constants.CMD_THREAD_SUSPEND and not rank.frames.called(frame):
            pass  # Pause, or another thread's stop: as soon as the user's code runs
        elif rank.paused_at is not None:
            pass  # Python 3.12: in what pydevd itself calls, when it is about to stop
        elif thread.stop_reason not in anywhere and not rank.frames.has(frame):
            # An exception that is raised, and handled, where IPython formats the cell's error; or the step is in what
            # print() or breakpoint() has called: it goes on.
            stepping = thread.additional_info.pydev_original_step_cmd != -1
            if rank.frames.called(frame) if event != "exception" else stepping:
                thread.additional_info.pydev_state = running
                thread.additional_info.update_stepping_info()
            else:
                go_on()
        else:
            by_itself = thread.stop_reason != constants.CMD_THREAD_SUSPEND
            _pause(frame, False, lambda: wait(thread, frame, event, arg, exception_type), by_itself)

    debugger.do_wait_suspend = do_wait_suspend


def _pause(frame: FrameType, post_mortem: bool, wait: Callable[[], object], by_itself: bool = True) -> None:
    rank = pdb_methods.rank
    with _told(frame, post_mortem, by_itself):
        rank.paused_at = frame
        try:
            wait()
        except BaseException:  # Stop: a kept rank would be paused again by what comes next
            go_on()
            raise
        finally:
            rank.paused_at = None


_stopped: list[FrameType] = []
_telling = threading.RLock()


@contextmanager
def _told(frame: FrameType, post_mortem: bool = False, by_itself: bool = True) -> Iterator[None]:
    """Inform the kernel when the first thread stops, and when the last one goes on: pydevd stops them all. The place is
    that of the one that has stopped ``by_itself``, at a breakpoint."""
    rank, code = pdb_methods.rank, frame.f_code
    with _telling:
        _stopped.append(frame)
        if by_itself or len(_stopped) == 1:
            place = Frame(str.__str__(code.co_filename), frame.f_lineno or 0, str.__str__(code.co_name))
            offset = stdio.log_offset()
            rank.channel.send(Stopped(rank.number, time.monotonic(), place, post_mortem, offset, graphical=True))
    try:
        yield
    finally:
        with _telling:
            _stopped.remove(frame)
            if not _stopped:
                rank.channel.send(Resumed(rank.number, time.monotonic(), soon=False))


def go_on() -> None:
    """Have pydevd neither pause nor step."""
    sys.modules["_pydevd_bundle.pydevd_thread_lifecycle"].resume_threads("*")


@contextmanager
def tracing() -> Iterator[None]:
    """While this thread runs the user's code: trace it, if a debugger is attached. Imports and what else the rank does
    for itself would take several times as long."""
    before = sys.gettrace()
    if (debugger := _attached()) is not None:
        debugger.enable_tracing()
    try:
        yield
    finally:
        if (debugger := _attached()) is not None:  # it may have been switched on meanwhile
            traced.trace_not(debugger)
            sys.settrace(before)


def stop_at(frame: FrameType) -> bool:
    """Stop at this frame, if a debugger is attached; returns whether one is."""
    debugger = _attached()
    if debugger is None:
        return False
    # Not pydevd.settrace, which stops at the frame's next line: the statements of a cell are programs of their own.
    thread = threading.current_thread()
    constants: Any = sys.modules["_pydevd_bundle.pydevd_comm_constants"]

    def wait() -> None:
        debugger.set_suspend(thread, constants.CMD_SET_BREAK)
        debugger.do_wait_suspend(thread, frame, "line", None)

    _pause(frame, False, wait)
    return True


def look_at(error: BaseException, frames: TracebackType | None) -> bool:
    """Stop where the error was raised, innermost of these frames, if a debugger is attached; returns whether one is."""
    debugger = _attached()
    if debugger is None or frames is None:
        return False
    innermost = frames
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    frame, raised = innermost.tb_frame, (type(error), error, frames)
    stop = debugger.do_stop_on_unhandled_exception
    _pause(frame, True, lambda: stop(threading.current_thread(), frame, {}, raised))
    return True


def _attached() -> Any:
    """The debugger (a ``PyDB``) if a front end is attached to it; else None."""
    pydevd: Any = sys.modules.get("pydevd")
    return pydevd.get_global_debugger() if pydevd is not None and pydevd._is_attached() else None
