"""Frees a kept rank that an interrupt does not reach, because it waits for a peer in gloo's native code.

Python runs signal handlers between its own instructions only, and gloo's ``abort()`` wakes nobody. When a connection
to a peer ends, though, every call that waits for it raises; so that is what happens here, and the interrupt that has
waited for the call to return follows at once. A rank that does not stay needs none of this: it is killed.
"""

from __future__ import annotations

import gc
import mmap
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from nbspawn._protocol import gauges
from nbspawn._rank import connections
from nbspawn._rank.channel import Channel
from nbspawn._rank.info import RankInfo

_PATIENCE = 0.3  # seconds that an interrupt may wait for Python


@contextmanager
def freeing(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives, if it is kept."""
    if info.launch.keep:
        inherited, slots = _sockets(), gauges.mapped(info.launch.files.gauges)

        def look(waits: bool) -> None:
            if waits and info.interrupts.unheeded(_PATIENCE):
                _hang_up(_sockets() - inherited, _judge(slots))

        info.on_look.append(look)
    yield


def _hang_up(sockets: set[tuple[int, int]], to_a_rank: Callable[[socket.socket], bool]) -> None:
    """End the connections that native code holds to ranks of this run: gloo's, of whichever group. The store stays: the
    next group meets there."""
    pythons = {thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)}
    store = os.environ.get("MASTER_PORT")
    for fd in {fd for fd, _ in sockets} - pythons:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:  # closed since, or not connected
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ports = str(found.getsockname()[1]), str(found.getpeername()[1])
            if store not in ports and to_a_rank(found):
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of each that is open in this process. What was open when it became a rank is the kernel's or
    the fork server's: to shut it down ends it there, too. (macOS has no inodes for sockets.)"""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed since it was listed
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _judge(slots: mmap.mmap) -> Callable[[socket.socket], bool]:
    """Tells whether the other end of a connection is held by a rank of this run; by this one itself, if it serves the
    store at which the cell's own group meets. Where the system does not tell, all of this machine count as ranks."""
    try:
        ends = connections.other_ends()
    except OSError:
        return lambda found: bool(found.getsockname()[0] == found.getpeername()[0])
    held = set().union(*(connections.held(pid) for pid in gauges.processes(slots)))
    to_ranks = {inode for inode, end in ends.items() if end.inode in held}
    return lambda found: os.fstat(found.fileno()).st_ino in to_ranks
