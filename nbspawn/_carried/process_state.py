"""What a process hands on to its children, read in the kernel and put into force in a rank: limits, umask, niceness,
processors. A fork server hands on its own, which are as old as it is. The current directory is handed on, too."""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress

from nbspawn._protocol.settings import ProcessState

NO_DIRECTORY = "the current directory has been deleted, and ranks would begin in it: change to another (%cd ~)"

_LIMITS = {name: number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}


def has_directory() -> bool:
    """Is there the directory that this process is in?"""
    try:
        return os.path.isdir(os.getcwd())
    except FileNotFoundError:
        return False


def read() -> ProcessState:
    """The state of this process; takes 50 microseconds."""
    limits: dict[str, tuple[int, int]] = {}
    for name, number in _LIMITS.items():
        with suppress(OSError, ValueError):  # not every kernel has each of them
            limits[name] = resource.getrlimit(number)
    umask: int | None = None
    nice: int | None = None
    processors: tuple[int, ...] = ()
    with suppress(OSError), open("/proc/thread-self/status") as file:  # to ask for it is to set it, for all threads
        if found := re.search(r"^Umask:\s*(\d+)", file.read(), re.MULTILINE):
            umask = int(found[1], 8)
    with suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError, AttributeError):  # not on macOS
        processors = tuple(sorted(os.sched_getaffinity(0)))
    return ProcessState(limits, umask, nice, processors)


def put(wanted: ProcessState) -> None:
    """Have this process be as that one, as far as it may: a lower niceness, or a higher limit, is for root."""
    present = read()
    for name, limits in wanted.limits.items():
        if name in _LIMITS and limits != present.limits.get(name):
            with suppress(OSError, ValueError):
                resource.setrlimit(_LIMITS[name], limits)
    if wanted.umask is not None and wanted.umask != present.umask:
        os.umask(wanted.umask)
    if wanted.nice is not None and wanted.nice != present.nice:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, wanted.nice)
    if wanted.processors and wanted.processors != present.processors:
        with suppress(OSError, AttributeError):
            os.sched_setaffinity(0, wanted.processors)
