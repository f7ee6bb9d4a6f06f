"""Keeps the front end's debugger to the kernel's own code: debugpy's pydevd, once JupyterLab's or VS Code's is on.

pydevd starts every child of the process under itself, and each then waits for a client that no front end gives it:
ranks, the fork server and the guardian would hang. It also traces every thread, and imports take 50 times as long.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


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


def step_over(folder: str) -> None:
    """Have the debugger, if it is on, treat what is in this folder as it does the kernel itself."""
    if not is_on():
        return
    with suppress(AttributeError, KeyError):  # of another pydevd: then it stops there
        debugger = sys.modules["pydevd"].get_global_debugger()
        own = sys.modules["_pydevd_bundle.pydevd_filtering"].ExcludeFilter(f"{folder}/**", True, True)
        debugger.set_exclude_filters([*debugger._files_filtering._exclude_filters, own])


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


def import_untraced(name: str) -> None:
    """Import this module, in a thread of its own, if this one is traced."""
    if is_on() and name not in sys.modules:
        importing = thread(importlib.import_module, "nbspawn-import", [name])
        importing.start()
        importing.join()
