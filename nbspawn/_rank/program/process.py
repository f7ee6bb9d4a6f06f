"""Makes a process a rank of its own: its session, its death with the kernel, its interrupts, its open sockets."""

from __future__ import annotations

import _thread
import ctypes
import fcntl
import functools
import math
import mmap
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from nbspawn._rank.program.channel import Channel

_F_SETSIG = 10  # <fcntl.h>, Linux; Python names it only since 3.13 or so
_KILLS = hasattr(signal, "SIGRTMIN")  # has the system this?
_PR_SET_PDEATHSIG = 1
_HIGH = 512  # half of the usual limit of 1024 descriptors

_libc = ctypes.CDLL(None)

forked_from_notebook = False
"""Did this rank begin with the notebook's objects? main.py sets it."""


def own_session() -> None:
    """Leave the kernel's process group: jupyter_client interrupts that group as a whole, and only the kernel decides
    what reaches a rank. A group of its own also lets one ``killpg`` take the rank's children along.

    A session of its own, as under torchrun: Linux shares the processors out among sessions first (sched(7),
    autogroup). In the kernel's, ranks in lock-step preempt each other when they wake: a loop of small collectives took
    up to 1.3 times as long.
    """
    os.setsid()


def register(ranks: Path) -> None:
    """Have the guardian know this rank, whatever it does to its descriptors, and though its kernel may be killed before
    it has heard of it. Linux only, as the guardian."""
    with suppress(OSError), open("/proc/self/stat", "rb") as stat, open(ranks, "ab") as file:
        file.write(stat.read() + b"\0")


def die_with_kernel(lifeline: Path) -> None:
    """Have the operating system kill this process group when the kernel's end of the FIFO closes.

    torch asks for SIGINT at the death of the *thread* that started the rank: wrong signal (a rank in C code does not
    notice it) and wrong moment (a launcher thread may end early), so that is cleared first. On Linux ``F_SETSIG``
    makes the end of the FIFO a SIGKILL, with no help from this process, its GIL or its fork server. Elsewhere a
    thread watches it. Opening the FIFO here gives this rank a file description of its own, and so an owner of its
    own for the signal.
    """
    _clear_parent_death_signal()
    fd = move_to_high_fd(os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if _KILLS:
        _kill_at_end(fd, -os.getpgrp())
        # An end that came before that is told by no signal, nor by poll() if it came before this end was opened.
        with suppress(BlockingIOError):
            if not os.read(fd, 1):
                os.killpg(os.getpgrp(), signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(fd,), name="nbspawn-lifeline", daemon=True).start()


@contextmanager
def killed_at_its_end(fd: int) -> Iterator[None]:
    """Have the operating system kill this process if the other end of this pipe is closed meanwhile. Nothing is ever
    written to it: the signal for that may come after what was written has been read. Linux only."""
    if _KILLS:
        _kill_at_end(fd, os.getpid())
        if select.select([fd], [], [], 0)[0]:  # it came before that
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        yield
    finally:
        if _KILLS:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)


def _kill_at_end(fd: int, owner: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETOWN, owner)
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _clear_parent_death_signal() -> None:
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, 0)


def _watch(fd: int) -> None:
    select.select([fd], [], [])
    os.killpg(os.getpgrp(), signal.SIGKILL)


def move_to_high_fd(fd: int) -> int:
    """Move the file to a high number, which code that closes the low ones (``os.closerange(3, 256)``) does not find;
    and no file that it opens then has this number, and what is written to it."""
    lowest = min(_HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved


def prefer_as_oom_victim() -> None:
    """When memory runs out, the system is to end this process rather than the kernel, which holds the notebook's
    variables: https://man7.org/linux/man-pages/man5/proc_pid_oom_score_adj.5.html. Linux only."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def close_kernel_sockets(foreign: Iterable[tuple[int, int]]) -> None:
    """After fork: put /dev/null in place of the kernel's own sockets, given as (descriptor, inode).

    The numbers stay taken, so that no library closes a stranger's file by mistake; the inode tells a number that the
    kernel has used again since.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, inode in foreign:
        try:
            if os.fstat(fd).st_ino == inode:
                os.dup2(null, fd, inheritable=False)
        except OSError:
            continue  # the kernel has closed it since
    os.close(null)


def not_interactive() -> None:
    """A rank is a program, as under torchrun: libraries that ask for ``sys.ps1`` (Lightning) would refuse to start
    several processes. IPython sets it, in the kernel and in a shell of its own."""
    for name in ("ps1", "ps2", "ps3"):
        vars(sys).pop(name, None)


class Interrupts:
    """The rank's SIGINT handler: raises KeyboardInterrupt once for each interrupt that the kernel announced.

    VS Code signals every descendant of the kernel, a terminal its whole foreground group: whoever sends, a signal
    that the kernel did not announce (in the run's ``interrupts`` file) is not for this rank.
    """

    def __init__(self, announcements: Path, rank: int) -> None:
        with open(announcements, "rb") as file:
            self._announced = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._rank = rank
        self._seen = 0
        self._pending = False
        self._own = False
        self._unhandled_since = math.inf
        self._enabled = False
        self._channel: Channel | None = None

    def install(self, channel: Channel) -> None:
        """Take SIGINT over; SIGTERM ends the rank at once, as it would end a fresh process."""
        self._channel = channel
        signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._notice_own()
        self(signal.SIGINT, None)  # one that was announced before there was a handler for it

    def begin(self, announced: int) -> None:
        """Begin a new command: interrupts up to the number that was ``announced`` before it were for an earlier one. A
        library may have put its own handler in the place of this one (Lightning, which ignores a second Stop)."""
        signal.signal(signal.SIGINT, self)
        self._seen, self._pending, self._own, self._unhandled_since = announced, False, False, math.inf
        self(signal.SIGINT, None)

    def _notice_own(self) -> None:
        """Handle those, too, that the user's code sends to its own process; a handler is not told who has sent it."""
        for module, name in ((_thread, "interrupt_main"), (signal, "raise_signal"), (os, "kill")):
            setattr(module, name, self._noticed(getattr(module, name)))

    def _noticed(self, send: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(send)
        def noticed(*args: Any) -> None:
            *to, signum = args or (signal.SIGINT,)
            self._own = self._own or (signum == signal.SIGINT and to in ([], [os.getpid()]))
            send(*args)

        return noticed

    def unhandled(self, seconds: float) -> bool:
        """Has an announced interrupt not come through to Python for so long? To be asked again and again, from another
        thread."""
        if self._announced[self._rank] == self._seen:
            self._unhandled_since = math.inf
            return False
        self._unhandled_since = min(self._unhandled_since, time.monotonic())
        return time.monotonic() - self._unhandled_since >= seconds

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """While the user's code runs: raise interrupts. One that came before is raised on entry."""
        self._enabled = True
        try:
            self._raise_pending()
            yield
        finally:
            self._enabled = False

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """While the rank reports: postpone interrupts, since nothing of the user's runs any more that one could end."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        announced, own = self._announced[self._rank], self._own
        self._own = False
        if announced == self._seen and not own:
            return
        self._seen = announced
        self._pending = True
        if self._channel is not None and self._channel.sending:
            self._channel.on_sent.append(self._raise_pending)
        else:
            self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending and self._enabled:
            self._pending = False
            raise KeyboardInterrupt
