"""Where a rank is: on a signal it writes its main thread's stack to a file, even from inside C code."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from nbspawn._protocol import signals
from nbspawn._protocol.frames import Frame, ThreadsAt
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.wire import pickled
from nbspawn._rank.program import process

_INTERNAL = ("nbspawn-", "pydevd.")
_DEPTH = 100  # frames of one stack; faulthandler has the same bound


def write_on_signal(path: Path) -> None:
    """Write the stack to ``path`` at each ``STACK``; faulthandler needs neither the GIL nor the bytecode loop."""
    faulthandler.register(signals.STACK, file=_opened(path), all_threads=False)


def report_crashes(path: Path) -> None:
    """On a segfault or an abort, write the Python stack to ``path``, unless PYTHONFAULTHANDLER is 0."""
    if os.environ.get("PYTHONFAULTHANDLER", "1") != "0":
        faulthandler.enable(file=_opened(path), all_threads=False)


def _opened(path: Path) -> int:
    """A high descriptor: faulthandler writes to this number, even if the user's code closes and reuses it."""
    return process.move_to_high_fd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))


class OtherThreads:
    """The stacks of a rank's other threads, written to a file after the main thread has written its own.

    faulthandler could write them in its signal handler, but it would read frames that a running thread is changing, and
    could crash. So nbspawn's own thread checks whether the main thread's stack was requested.
    """

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._main_file = files.stack(rank)
        self._path = files.threads(rank)
        self._seen = self._main_file.stat().st_size

    def write_if_requested(self) -> None:
        """Write the stacks if the main thread's was requested since the last call; costs 2 us if not."""
        try:
            size = os.stat(self._main_file).st_size
        except OSError:  # a cleaner of temporary files has deleted it
            return
        if size == self._seen:
            return
        self._seen = size
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        found = tuple(
            (name, tuple(_frames(frame)))
            for ident, frame in sys._current_frames().items()
            if ident != main and not (name := names.get(ident, "unnamed")).startswith(_INTERNAL)
        )
        whole = self._path.with_suffix(".new")
        try:
            whole.write_bytes(pickled(ThreadsAt, (size, found)))
            whole.replace(self._path)
        except OSError:
            pass  # a full disk; the main thread's stack is still available


def _frames(frame: FrameType | None) -> list[Frame]:
    """The stack that ends with ``frame``, outermost frame first."""
    found: list[Frame] = []
    while frame is not None and len(found) < _DEPTH:
        found.insert(0, Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found
