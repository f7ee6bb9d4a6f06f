"""A small process beside the kernel that ends what ranks leave behind in process groups of their own.

A rank takes its group along, but not a child that left it (``start_new_session=True``, ``setsid``; torch.compile's
workers do that). Such a child is known by the run's mark in its environment, or, if it is a fork that runs no new
program, by the rank's lifeline, which it holds open. Jenkins finds the leftovers of a build in the same way.

It runs by itself (``python -I -S guardian.py``) and reads from fd 0, a line for each event: ``+RUN`` a run begins,
``-RUN`` its ranks have ended, where RUN is the run's directory. The end of the file is the end of the kernel, whatever
ended it. Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import signal
import time

MARK = "NBSPAWN_RUN"
"""The environment variable of the run's processes: its directory, behind those of the runs that it runs in."""

LIFELINE = "lifeline"
"""The name of the FIFO in the run's directory that its ranks hold open."""

_TICK = 0.02  # seconds between two looks at what was killed a moment ago
_PATIENCE = 5.0  # seconds: what has not gone by then is stuck in the operating system


def main() -> None:
    """Until the kernel's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all of the kernel's descendants by some
        signal.signal(number, signal.SIG_IGN)
    runs: set[bytes] = set()
    rest = b""
    while told := os.read(0, 65536):
        *lines, rest = (rest + told).split(b"\n")
        for line in lines:
            sign, run = line[:1], line[1:]
            if sign == b"+":
                runs.add(run)
            else:
                runs.discard(run)
                _end({run})
    _end(runs)


def _end(runs: set[bytes]) -> None:
    """Kill every process of these runs, until none is found: one that is about to die may start another."""
    end = time.monotonic() + _PATIENCE
    while runs and (found := _members(runs)) and time.monotonic() < end:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_TICK)


def _members(runs: set[bytes]) -> list[int]:
    spared = {os.getpid(), os.getppid()}  # the kernel may be a rank of another run, and holds its lifelines open
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid not in spared and (_marked(pid, runs) or _holds_lifeline(pid, runs))]


def _marked(pid: int, runs: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # another person's process, or one that has ended
        return False
    name = MARK.encode() + b"="
    values = [b":%b:" % variable[len(name) :] for variable in variables if variable.startswith(name)]
    return any(b":%b:" % run in value for run in runs for value in values)


def _holds_lifeline(pid: int, runs: set[bytes]) -> bool:
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
        if target.removesuffix(b" (deleted)") in {b"%b/%b" % (run, LIFELINE.encode()) for run in runs}:
            return True
    return False


if __name__ == "__main__":
    main()
