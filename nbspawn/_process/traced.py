"""Keeps the front end's debugger to the kernel's own code: debugpy's pydevd, once JupyterLab's or VS Code's is on.

pydevd starts every child of the process under itself, and each then waits for a client that no front end gives it:
ranks, the fork server and the guardian would hang. It also traces every thread, and imports take 50 times as long.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_this_thread = threading.local()


def is_on() -> bool:
    """Does this process have such a debugger, or did it have one?"""
    pydevd: Any = sys.modules.get("pydevd")
    return getattr(getattr(pydevd, "SetupHolder", None), "setup", None) is not None


@contextmanager
def not_in_children() -> Iterator[None]:
    """Processes that this thread starts meanwhile are started as if there were none."""
    if not is_on():
        yield
        return
    with sys.modules["pydevd"].skip_subprocess_arg_patch():
        yield


@contextmanager
def suspended() -> Iterator[None]:
    """While this thread does nbspawn's own work, it isn't traced: an import would take 50 times as long, and a
    debugger that stops at each exception would stop where the standard library raises one."""
    if not is_on() or getattr(_this_thread, "suspended", False):
        yield
        return
    debugger = sys.modules["pydevd"].get_global_debugger()
    was_traced = sys.gettrace() is not None or hasattr(sys, "monitoring")
    trace_not(debugger)
    _this_thread.suspended = True
    try:
        yield
    finally:
        _this_thread.suspended = False
        if was_traced:
            debugger.enable_tracing()


def trace_not(debugger: Any) -> None:
    """Have the debugger (a ``PyDB``) not trace this thread, until its ``enable_tracing``."""
    if hasattr(sys, "monitoring"):
        debugger.enable_tracing()  # else, what it knows of the thread is made later, and says that it is traced
    debugger.disable_tracing()


def step_over(folders: Iterable[str]) -> None:
    """Have the debugger, if it is on, treat what is in these folders as it does the kernel itself."""
    if not is_on():
        return
    with suppress(AttributeError, KeyError):  # of another pydevd: then it stops there
        debugger = sys.modules["pydevd"].get_global_debugger()
        as_rule = sys.modules["_pydevd_bundle.pydevd_filtering"].ExcludeFilter
        own = [as_rule(f"{folder}/**", True, True) for folder in folders]
        debugger.set_exclude_filters([*debugger._files_filtering._exclude_filters, *own])


def leave() -> None:
    """In a forked copy of a process with such a debugger: have none, and start children as ever."""
    if not is_on():
        return
    trace_nothing()
    monkey: Any = sys.modules.get("_pydev_bundle.pydev_monkey")
    monkey._get_apply_arg_patching = bool
    sys.modules["_pydevd_bundle.pydevd_constants"].GlobalDebuggerHolder.global_dbg = None
    sys.modules["pydevd"].SetupHolder.setup = None
    threading.current_thread().additional_info = None  # type: ignore[attr-defined]
    if (monitoring := sys.modules.get("_pydevd_sys_monitoring.pydevd_sys_monitoring")) is not None:
        monitoring.reset_thread_local_info()


def trace_nothing() -> None:
    """Have no debugger trace this thread, or those that will be started."""
    sys.settrace(None)
    threading.settrace(None)
    monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID):
        monitoring.set_events(monitoring.DEBUGGER_ID, 0)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)


def thread(target: Callable[..., object], name: str, args: Sequence[Any] = ()) -> threading.Thread:
    """A daemon thread of nbspawn's own, which is neither traced nor stopped."""
    made = threading.Thread(target=target, args=args, name=name, daemon=True)
    made.pydev_do_not_trace = made.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return made
