"""Which process and user own the ends of TCP connections within this machine, from Linux's /proc (proc(5))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MAPPED = f"{0:016X}{socket.htonl(0xFFFF):08X}"
"""The prefix of an IPv4 address in an IPv6 socket: the two ends may be of different families."""


class End(NamedTuple):
    """A socket's inode, and the user id of the process that made it."""

    inode: int
    uid: int


def other_ends() -> dict[int, End]:
    """The other end of each connection within this machine, by the inode of the one end. Raises OSError if the system
    does not report it, as on macOS.

    A socket that no process has open any more is left out. It still delivers what was sent, but Linux writes 0 for its
    inode and its user, and 0 is root's id.
    """
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    if (tcp6 := Path("/proc/net/tcp6")).exists():  # missing if IPv6 is disabled
        lines += tcp6.read_text().splitlines()[1:]
    ends = {}
    for line in lines:
        _, here, there, _, _, _, _, uid, _, inode, *_ = line.split()
        if inode != "0":
            ends[here.removeprefix(_MAPPED), there.removeprefix(_MAPPED)] = End(int(inode), int(uid))
    return {end.inode: ends[there, here] for (here, there), end in ends.items() if (there, here) in ends}


def open_sockets(pid: int) -> set[int]:
    """The inodes of the sockets that the process has open; empty if it may not be inspected."""
    found = set()
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed since it was listed
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                if kind == "socket":
                    found.add(int(inode.strip("[]")))
    return found
