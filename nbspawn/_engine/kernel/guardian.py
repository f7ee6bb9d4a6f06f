"""A small process beside the kernel that ends what ranks leave behind in process groups of their own, and removes the
directories of a kernel that was killed.

A rank takes its group along, but not a child that left it (``start_new_session=True``, ``setsid``; torch.compile's
workers do that). Such a child is known by the run's mark in its environment, or, if it is a fork that runs no new
program, by the rank's lifeline, which it holds open. Jenkins finds the leftovers of a build in the same way. A rank
that has closed every descriptor, and so its lifeline, is known by what it has registered, and ended with its group.

It runs by itself (``python -I -S guardian.py MARK LIFELINE RANKS``, the names of the environment variable that marks a
run's processes, and of the FIFO and the register of ranks in its directory) and reads from fd 0, each event ended by a
NUL: ``+RUN`` a run begins, ``-RUN`` its ranks have ended, where RUN is the run's directory. The end of the file is the
end of the kernel, whatever ended it. It reads /proc: Linux only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_TICK = 0.02  # seconds between two searches for what is left
_TIMEOUT = 5.0  # seconds: what has not ended by then is stuck in the operating system


def main() -> None:
    """End what each run's ranks have left when it is over, and the rest when the kernel has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all of the kernel's descendants by some
        signal.signal(number, signal.SIG_IGN)
    _let_go()
    runs: dict[bytes, int] = {}
    rest = b""
    while received := os.read(0, 65536):
        *events, rest = (rest + received).split(b"\0")
        for event in events:
            sign, run = event[:1], event[1:]
            if sign == b"+":
                runs[run] = _register(run)
            else:
                _end({run: runs.pop(run)})
    _end(runs)
    # Nothing may ever run here again: on a node of a cluster, say. (-I -S: what is installed is not in the path.)
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../../.."))
    from nbspawn._engine.kernel.directories import remove_stale

    remove_stale()


def _let_go() -> None:
    """Close all descriptors, also those that C code of the kernel has opened for its children: an HDF5 file stays
    locked until all of them have closed it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.close(fd)
            except OSError:
                continue  # that of the list itself


def _register(run: bytes) -> int:
    """The run's register of ranks, opened: something may delete the directory, or has done so already."""
    try:
        return os.open(b"%b/%b" % (run, os.fsencode(sys.argv[3])), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _end(runs: dict[bytes, int]) -> None:
    """Kill every process of these runs, until none is found: one that is about to die may start another. Each has its
    register, which is closed."""
    end = time.monotonic() + _TIMEOUT
    while runs and (found := _members(runs)) and time.monotonic() < end:
        for pid, kill in found:
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_TICK)
    for register in runs.values():
        os.close(register)


def _members(runs: dict[bytes, int]) -> list[tuple[int, Callable[[int, int], None]]]:
    """Their pids, each with what kills it."""
    spared = {os.getpid(), os.getppid()}  # the kernel may be a rank of another run, and holds its lifelines open
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = [pid for pid in pids if pid not in spared and (_marked(pid, runs) or _holds_lifeline(pid, runs))]
    ranks = [rank for register in runs.values() for rank in _registered(register)]
    return [(pid, os.kill) for pid in found] + [(pid, os.killpg) for pid, since in ranks if started_at(pid) == since]


def _registered(register: int) -> list[tuple[int, str]]:
    """The pid of each rank, and when it began."""
    *stats, _ = os.pread(register, os.fstat(register).st_size, 0).split(b"\0")
    return [(int(stat.split()[0]), _fields(stat)[_BEGAN].decode()) for stat in stats]


def _marked(pid: int, runs: Iterable[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # another user's process, or one that has ended
        return False
    name = os.fsencode(sys.argv[1]) + b"="
    values = [b":%b:" % variable[len(name) :] for variable in variables if variable.startswith(name)]
    return any(b":%b:" % run in value for run in runs for value in values)


def _holds_lifeline(pid: int, runs: Iterable[bytes]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        fds = os.listdir(folder)
    except OSError:
        return False
    for fd in fds:
        try:
            target = os.readlink(f"{folder}/{fd}".encode())
        except OSError:
            continue
        if target.removesuffix(b" (deleted)") in {b"%b/%b" % (run, os.fsencode(sys.argv[2])) for run in runs}:
            return True
    return False


_BEGAN = 19  # in _fields

UNSEEN = "alive"
"""A process of which the system does not say when it began."""


def started_at(pid: int) -> str:
    """When the process began, in the system's own count: with the pid, the name of one process for ever. '' if it has
    ended, waited for or not."""
    fields = _stat(pid)
    if not fields:
        seen = os.path.exists("/proc/self/stat") and not _out_of_descriptors()
        return "" if seen or not _answers(pid) else UNSEEN
    return "" if fields[0] in (b"Z", b"X") else fields[_BEGAN].decode()


def _out_of_descriptors() -> bool:
    """Can this process open no file at all? Then it does not see what is in /proc either."""
    try:
        os.close(os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


def is_alive(pid: int, since: str) -> bool:
    """Does the process live that began at ``since`` (as ``started_at`` has it)? Where that cannot be seen, whether any
    process has its number."""
    return bool(since) and started_at(pid) in (since, UNSEEN)


def stopped(pid: int) -> bool:
    """Does a signal (SIGSTOP) keep the process from running?"""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat; none where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return _fields(file.read())
    except OSError:
        return []


def _fields(stat: bytes) -> list[bytes]:
    """The fields from the state on. The program's name before them may contain anything."""
    return stat.rpartition(b")")[2].split()


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
