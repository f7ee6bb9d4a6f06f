"""Who holds the two ends of a TCP connection within this machine, as Linux tells in /proc (proc(5))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MAPPED = f"{0:016X}{socket.htonl(0xFFFF):08X}"
"""What stands before an IPv4 address where a socket of IPv6 uses one: each end may be of another family."""


class End(NamedTuple):
    """A socket, and the user whose process made it."""

    inode: int
    uid: int


def other_ends() -> dict[int, End]:
    """The other end of each connection within this machine, by the inode of the one. Raises OSError if the system does
    not tell, as macOS does not.

    A socket that no process holds any more is left out: it still delivers what was sent, but Linux tells neither its
    inode nor its user, and writes 0 in their place, which is root.
    """
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    if (tcp6 := Path("/proc/net/tcp6")).exists():  # it is not where IPv6 is switched off
        lines += tcp6.read_text().splitlines()[1:]
    ends = {}
    for line in lines:
        _, here, there, _, _, _, _, uid, _, inode, *_ = line.split()
        if inode != "0":
            ends[here.removeprefix(_MAPPED), there.removeprefix(_MAPPED)] = End(int(inode), int(uid))
    return {end.inode: ends[there, here] for (here, there), end in ends.items() if (there, here) in ends}


def held(pid: int) -> set[int]:
    """The inodes of the sockets that the process has open, as far as it may be looked at."""
    found = set()
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed since it was listed
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                if kind == "socket":
                    found.add(int(inode.strip("[]")))
    return found
