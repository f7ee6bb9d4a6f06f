"""Where the rank is and what it uses: a thread that samples some times a second, and sends what has changed.

It reads the main thread's stack. A sample takes 0.2 ms of processor time, most of it because the caches are cold when
the thread wakes up (tests/benchmarks/overhead.py). Numbers are written to the gauges (_protocol/gauges.py), positions
are sent over the channel.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._process import traced
from nbspawn._process.imports import is_library
from nbspawn._protocol.frames import RANK_MAIN, Frame, Position
from nbspawn._protocol.gauges import Gauges
from nbspawn._protocol.messages import Sampled
from nbspawn._rank.group import flight_recorder
from nbspawn._rank.group.device_wait import DeviceWait
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.program.running_call import UNKNOWN, running, value_of
from nbspawn._rank.report.stacks import OtherThreads

_log = logging.getLogger(__name__)

# Seconds between two samples: while the command is young (a short one has a profile too), and afterwards. Samples are
# taken, and sent, at multiples of these on the clock that all processes share: ranks in lock-step are then delayed at
# the same time, not one after another, and the kernel wakes up once for all of them.
_YOUNG = 5.0  # seconds for which a command counts as young
_INTERVAL_YOUNG = 0.1
_INTERVAL = 0.5
_SPACING = 1.0  # seconds between two messages, at least, while each sample differs
_SPACING_AT_REST = 0.1  # the same after two equal samples: a prompt, which may come next, stops the table's updates
_SPACING_PER_RANK = 0.01  # many ranks send fewer messages each, which bounds the kernel's cost
_MEASURE = 0.5  # seconds between two readings of the gauges
_LATEST = 2.0  # seconds between two messages, at most: what a killed rank has not sent is lost
_PAUSED = 0.25  # seconds between two checks for a new command, or a question
_LAST_MESSAGE = 0.2  # seconds for which a failed rank waits for the thread
_UNSENT = 100  # positions that are remembered while the kernel does not read; later time counts to the last of them
_DEPTH = 8  # frames of the user's code that are sent: the outermost, and the innermost others

# torch.distributed's functions that wait for other ranks; not those that only return state (get_rank).
COLLECTIVES = frozenset(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list "
    "destroy_process_group gather gather_object init_process_group monitored_barrier new_group recv recv_object_list "
    "reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send "
    "send_object_list split_group".split()
)
# DistributedDataParallel's backward waits for other ranks in C++, without a Python frame. So does wait() of what an
# asynchronous collective has returned (torch's Work, not a process or a thread). They are assumed to wait when the
# thread has not computed for a while. So are DistributedDataParallel's own functions: its forward sends buffers, its
# constructor compares shapes of parameters.
_AUTOGRAD = os.path.join("torch", "autograd", "__init__.py"), os.path.join("torch", "autograd", "graph.py")
_DISTRIBUTED = os.path.join("torch", "distributed", "")
_WAITS = re.compile(r"(?<![\w.\])])([A-Za-z_][\w.]*)\.wait\(")
_DDP = os.path.join("torch", "nn", "parallel", "distributed.py"), os.path.join("torch", "distributed", "utils.py")
_IDLE = 1.0  # seconds without processor time
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "fn"})


@contextmanager
def sampling(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank runs: sample where it is."""
    sampler = Sampler(info, channel)
    sampler.gauges.write(time.monotonic())  # the first sign of life: the thread's own may be late
    info.on_begin.append(sampler.resume)
    info.on_end.append(sampler.pause)
    thread = traced.thread(sampler.run, "nbspawn-sampler")
    thread.start()

    def end() -> None:
        if thread.is_alive():
            sampler.gauges.write(time.monotonic())  # the thread may be too late
            sampler.running.release()
            thread.join(_LAST_MESSAGE)

    channel.on_failure.append(end)
    yield
    end()


class Sampler:
    """Runs in the thread; releasing the lock ``running`` ends it after a last message. (An Event's timed wait costs as
    much as a sample.)"""

    def __init__(self, info: RankInfo, channel: Channel) -> None:
        self.running = threading.Lock()
        self.running.acquire()
        self._rank = info.rank
        self._channel = channel
        self._others = OtherThreads(info.launch.files, info.rank)
        self._info = info
        self.gauges = Gauges(info.launch.files.gauges, info.rank)
        self._main = threading.main_thread().ident
        # macOS has no clock of a single thread; there a rank counts as computing whenever any of its threads does.
        of_thread = getattr(time, "pthread_getcpuclockid", lambda thread: time.CLOCK_PROCESS_CPUTIME_ID)
        self._clock = of_thread(self._main)
        self._spacing = max(_SPACING, _SPACING_PER_RANK * info.launch.world_size)
        self._device_wait = DeviceWait()
        self._own: dict[str, bool] = {}
        self._spent: list[tuple[Position, float]] = []
        self._at = (Position(), 0.0)
        self._looked = 0.0
        self._command = 0
        self._paused = False
        self._failed = False
        self._lock = threading.Lock()

    def pause(self) -> None:
        """Called by the main thread of a kept rank when a command has ended: send the last sample of it."""
        with self._lock:
            self._paused = True
            self.gauges.write(time.monotonic())
            if self._spent:
                self._send()

    def resume(self) -> None:
        """Called by the main thread when the next command begins."""
        self.gauges.begin()
        self._spent.clear()  # of the last command: what could not be sent
        self._device_wait.begin()
        self._command += 1
        self._paused = False

    def run(self) -> None:
        """Sample, add up, send. At the start of a command the thread is not woken: that may last only a millisecond."""
        while True:
            if self._paused:
                if self.running.acquire(timeout=_PAUSED):
                    return
                self._call_looks(waits=False)
            else:
                try:
                    if self._watch(self._command):
                        return
                except Exception:  # without the thread there would be no sign of life, and no answer to any question
                    _log.log(logging.DEBUG if self._failed else logging.ERROR, "a sample has failed", exc_info=True)
                    self._failed = True

    def _watch(self, command: int) -> bool:
        """Sample one command, until it has ended or another one runs; True if the rank ends."""
        seen = Position()
        since = time.monotonic()
        used, measured, idle_since = time.clock_gettime(self._clock), since, since
        self._looked = since
        self._at = (seen, since)
        sent, sent_at = self._at, since - self._spacing  # the first position is sent at once
        young_until = since + _YOUNG
        interval = pause = _INTERVAL_YOUNG  # a command that is over at once needs no sample
        while not self.running.acquire(timeout=pause + interval - time.monotonic() % interval):
            now, pause = time.monotonic(), 0.0
            interval = _INTERVAL_YOUNG if now < young_until else _INTERVAL
            with self._lock:
                if self._paused or self._command != command:
                    return False
                here, fresh, may_wait, of_device = self._position(now, idle=now - idle_since >= _IDLE)
                self._others.write_if_requested()
                if now // _MEASURE > measured // _MEASURE:
                    measured = now
                    self.gauges.look_at_the_device()
                    self.gauges.write(now)
                used_before, used = used, time.clock_gettime(self._clock)
                # A call with a Python frame is recognised; one into C is the same if its thread has not computed since.
                worked = used - used_before > (now - self._looked) / 10
                if here != seen or (fresh if here.call else worked):
                    seen, since = here, self._looked
                if worked or since == self._looked:
                    idle_since = now
                if of_device is not None and not here.collective:
                    here, began = here._replace(device=True), of_device
                    if self._device_wait.is_in_vain(now):
                        print("NCCL has failed (see above), and the GPU will not end its collectives.", file=sys.stderr)
                        os.kill(os.getpid(), signal.SIGABRT)
                elif may_wait and now - idle_since >= _IDLE:
                    here, began = here._replace(call=here.call or may_wait, collective=True), since
                else:
                    began = since
                self._at = (here, began)
                self._spend(here, now - self._looked)
                self._looked = now
                stands = now - began > 1.5 * interval
                due = _LATEST if self._at == sent else _SPACING_AT_REST if stands else self._spacing
                if now // due > sent_at // due and self._send():
                    sent, sent_at = self._at, now
            self._call_looks(here.collective or now - idle_since >= _IDLE)
        self._send()
        return True

    def _call_looks(self, waits: bool) -> None:
        for look in self._info.on_look:
            try:
                look(waits)
            except Exception:  # the thread has more to do, and the user's code nothing to do with it
                _log.exception("rank %d: %r has failed", self._rank, look)

    def _spend(self, position: Position, seconds: float) -> None:
        if self._spent and (self._spent[-1][0] == position or len(self._spent) == _UNSENT):
            position, before = self._spent.pop()
            seconds += before
        self._spent.append((position, seconds))

    def _send(self) -> bool:
        """What was spent until the last look."""
        sent = self._channel.try_send(Sampled(self._rank, self._looked, *self._at, tuple(self._spent)))
        if sent:
            self._spent.clear()
        return sent

    def _position(self, now: float, idle: bool) -> tuple[Position, bool, str, float | None]:
        """The main thread's position, whether its innermost library call has begun since the last sample, if it is
        ``idle``, in what it may wait for other ranks though no collective is to be seen ('' if in nothing), and since
        when it waits for its device (None if it does not)."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        innermost = frame
        below: list[FrameType] = []
        mine: list[Frame] = []
        while frame is not None:
            code = frame.f_code
            if self._is_own(code.co_filename):
                # Not of a subclass of str, which the kernel would have to load.
                file, name = str.__str__(code.co_filename), str.__str__(code.co_name)
                mine.append(Frame(file, frame.f_lineno or code.co_firstlineno, name))
            elif code.co_filename == RANK_MAIN:
                break  # under fork the kernel's own frames follow
            elif not mine:
                below.append(frame)
            frame = frame.f_back
        mine.reverse()
        frames = tuple(mine if len(mine) <= _DEPTH else [mine[0], *mine[-_DEPTH + 1 :]])
        if not mine:  # in nbspawn's own calls before the cell (init_process_group), or after it
            below = [frame for frame in below if is_collective(frame)]
        call, collective = "", False
        for frame in below:  # innermost first
            name = str.__str__(frame.f_code.co_name)
            if is_collective(frame):
                call, collective = name, True
            elif not collective and name not in _WRAPPERS and not name.startswith("_"):
                call = name
        may_wait = _may_wait(innermost, below) if idle and innermost is not None and not collective else ""
        of_device = self._device_wait.since(innermost, now, self._looked) if innermost is not None else None
        return Position(frames, call, collective), bool(below) and _first_seen(below[-1]), may_wait, of_device

    def _is_own(self, file: str) -> bool:
        own = self._own.get(file)
        if own is None:
            own = file in self._info.command.names or not is_library(file)
            self._own[file] = own
        return own


def _may_wait(innermost: FrameType, below: Sequence[FrameType]) -> str:
    """The call in which a thread that does not compute may wait for other ranks: ``below`` are the calls of its user's
    code."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    if kinds.in_use() and not flight_recorder.unended(device=False):
        return ""  # a device computes, as in backward
    if below and below[0].f_code.co_filename.endswith(_DDP):
        return "DistributedDataParallel"
    if any(frame.f_code.co_filename.endswith(_AUTOGRAD) for frame in below):
        return "backward"
    if any(frame.f_code.co_name == "wait" and _DISTRIBUTED in frame.f_code.co_filename for frame in below):
        return "wait"
    return "wait" if _waits_for_work(innermost, theirs=not below) else ""


def _waits_for_work(frame: FrameType, theirs: bool) -> bool:
    """Is the frame in wait() of a Work? Where that cannot be told: is the line the user's?"""
    source = running(frame)
    if ".wait(" not in source:
        return False
    called = _WAITS.search(source)
    value = UNKNOWN if called is None else value_of(frame, called[1])
    return theirs if value is UNKNOWN else type(value).__module__.startswith("torch")


def is_collective(frame: FrameType) -> bool:
    return frame.f_code.co_name in COLLECTIVES and frame.f_code.co_filename.endswith(_C10D)


def _first_seen(frame: FrameType) -> bool:
    """Is this the first sample of this call? A frame lives as long as its call, so the frame itself is marked, in a
    field that is not used in a library's frame. (A reference to the frame would keep the call's tensors alive.)"""
    if frame.f_trace_lines:
        frame.f_trace_lines = False
        return True
    return False
