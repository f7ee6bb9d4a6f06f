"""Does the main thread wait for its device (a GPU), and since when?

A call of NCCL returns at once. The host waits later, in ``loss.item()`` or the like: in native code without a frame of
its own, that spins. So this wait is recognised by what stands still: the thread is in the same call, and of the
collectives that it has queued on the device none ends. What the device computes before it gets to them counts, too.
"""

from __future__ import annotations

import os
import re
import sys
from types import FrameType

from nbspawn._accelerators import kinds
from nbspawn._process.imports import is_library
from nbspawn._rank.group import device_groups, flight_recorder
from nbspawn._rank.program import in_thread
from nbspawn._rank.program.running_call import running, value_of

_STANDS = 1.0  # seconds in the same call, before the recorder is asked
_UNCHANGED = 2.0  # seconds without the end of a collective
_LOST = 3.0  # seconds without a watchdog: an error of the device ends it, too, and the wait a moment later
_TORCH = os.path.join("site-packages", "torch", "")
_CALLED = re.compile(r"(?<![\w.\])])([A-Za-z_][\w.]*)\(")
_SYSTEM = frozenset({"time", "posix", "select", "signal", "_signal", "socket", "_socket", "_thread"})
"""Modules whose functions wait for something else."""


class DeviceWait:
    """Looked at by the sampler's thread, some times a second."""

    def __init__(self) -> None:
        self._call: tuple[int, int] | None = None
        self._since = self._changed = 0.0
        self._unended: flight_recorder.Unended | None = None
        self._earlier: flight_recorder.Unended = {}
        self._watched = 0
        """So many groups have been seen with a watchdog each."""
        self._lost: float | None = None

    def begin(self) -> None:
        """A command begins: what has not ended by now is of groups that were aborted."""
        self._call, self._watched = None, 0
        self._earlier = flight_recorder.unended(device=True)

    def since(self, frame: FrameType, now: float, looked: float) -> float | None:
        """The moment since when the thread waits for its device; None if it does not. ``frame`` is its innermost one,
        ``looked`` when it was looked at before."""
        call = id(frame), frame.f_lasti
        if call != self._call:
            self._call, self._since, self._changed, self._unended = call, looked, looked, None
            self._lost = None
            if self._watched != (groups := device_groups.count()) and device_groups.watched():
                self._watched = groups
            return None
        if now - self._since < _STANDS or not kinds.in_use():
            return None
        unended = flight_recorder.unended(device=True)
        unended = {backend: calls for backend, calls in unended.items() if self._earlier.get(backend) != calls}
        if unended != self._unended:
            if self._unended is not None:
                self._changed = looked
            self._unended = unended
        if not unended or now - self._changed < _UNCHANGED or _waits_for_something_else(frame):
            return None
        return self._changed

    def is_in_vain(self, now: float) -> bool:
        """Has NCCL's watchdog ended, in a rank that waits? It would have aborted the process, so that nobody goes on
        with wrong numbers, but for TORCH_NCCL_RETHROW_CUDA_ERRORS (environment.py). That it has lived is known from
        before: it ends within a second, where it does not wait for its dump."""
        if self._watched != device_groups.count() or device_groups.watched():
            self._lost = None
            return False
        self._lost = now if self._lost is None else self._lost
        return now - self._lost >= _LOST


def _waits_for_something_else(frame: FrameType) -> bool:
    """Is this known of the call in which the frame is?"""
    if frame.f_code is in_thread.ends_within.__code__:
        return False  # device.settle
    file = frame.f_code.co_filename
    if is_library(file) and _TORCH not in file and frame.f_globals.get("torch") is not sys.modules["torch"]:
        return True
    called = (value_of(frame, name) for name in _CALLED.findall(running(frame)))
    return any(getattr(one, "__module__", None) in _SYSTEM for one in called)
