"""What a rank still tells when C++ code ends it: an exception that nothing catches, such as gloo's in its own thread.

That calls ``std::terminate``, which aborts the process. faulthandler finds no Python code in such a thread, and
what the main thread waits for would be lost: https://en.cppreference.com/w/cpp/error/set_terminate.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._process import traced
from nbspawn._protocol.frames import Frame, users_frames
from nbspawn._protocol.messages import Aborting
from nbspawn._rank.program import stdio
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.report import recorder

_TELLING = 2.0  # seconds: who terminates may hold a lock of torch's
_LIBRARIES = {"linux": "libstdc++.so.6", "darwin": "libc++abi.dylib"}
_HANDLER = ctypes.CFUNCTYPE(None)


@contextmanager
def telling(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: tell, before ``std::terminate`` aborts it, where it was."""
    set_handler = _set_terminate()
    if set_handler is None:
        yield
        return

    def terminated() -> None:
        if channel.own:
            teller = traced.thread(_tell, "nbspawn-terminating", (info, channel))
            teller.start()
            teller.join(_TELLING)
        previous()  # C++'s own: it writes what was thrown, and aborts

    handler = _HANDLER(terminated)
    previous = set_handler(handler)
    yield
    set_handler(previous)


def _set_terminate() -> Callable[[Any], Any] | None:
    """C++'s, as the ABI names it; None where no library is in C++ yet, or the system has another."""
    try:
        library = ctypes.CDLL(_LIBRARIES[sys.platform], mode=os.RTLD_NOLOAD)
        found = library["_ZSt13set_terminatePFvvE"]
    except (KeyError, OSError, AttributeError):
        return None
    found.argtypes, found.restype = [_HANDLER], _HANDLER
    return found


def _tell(info: RankInfo, channel: Channel) -> None:
    now, main = time.monotonic(), sys._current_frames().get(threading.main_thread().ident or 0)
    stack = users_frames(
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_stack(main)
        if frame.f_code.co_filename != __file__  # where it is the main thread that terminates
    )
    cell = getattr(info.command, "filename", None)
    lines = [frame.line for frame in stack if frame.file == cell]
    shown = traceback.format_list([(*frame[:2], frame.name, None) for frame in stack])
    text = "".join(["Traceback (most recent call last):\n", *shown])
    recorded = recorder.report()
    channel.send(Aborting(info.rank, now, text, lines[-1] if lines else None, stdio.log_offset(), recorded))
