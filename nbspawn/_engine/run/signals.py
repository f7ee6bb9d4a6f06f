"""Signals to a rank: to its whole group, or to its main thread alone."""

from __future__ import annotations

import ctypes
import os
import signal


def send(pid: int, number: int) -> None:
    """SIGTERM and SIGKILL go to the rank's group, so that its children go too; before it has one, to the rank."""
    try:
        if number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(pid, number)
                return
            except ProcessLookupError:
                pass
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # ended in this moment


def send_to_main_thread(pid: int, number: int) -> None:
    """A signal to the process may land in a thread of OpenMP or gloo, which has no Python stack to write, and whose
    interruption does not wake the main thread from a system call."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc 2.30
        libc.tgkill(pid, pid, int(number))
    else:
        send(pid, number)


def kill_group(pid: int) -> None:
    """A rank that has ended takes its children along: DataLoader workers, `!cmd &`, subprocesses."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
