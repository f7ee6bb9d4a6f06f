"""Unblocks a kept rank that does not handle an interrupt, because it waits for a peer in native code.

Python runs signal handlers only between its own instructions. gloo's ``abort()`` wakes no call, but when the connection
to a peer is closed, every call that waits for it raises. So this module closes the connections; NCCL's groups are
aborted, and what waits for the device goes on. The interrupt, which was pending until the call returned, is handled at
once. A one-shot rank needs none of this: it is killed.
"""

from __future__ import annotations

import gc
import mmap
import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from nbspawn._protocol import gauges
from nbspawn._rank import connections, device_groups, traced
from nbspawn._rank.channel import Channel
from nbspawn._rank.info import RankInfo

_MAX_PENDING = 0.3  # seconds for which an interrupt may be pending


@contextmanager
def unblocking(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives, if it is a kept one."""
    if info.launch.keep:
        inherited, slots = _sockets(), gauges.mapped(info.launch.files.gauges)
        place = info.launch.place
        aborts: list[threading.Thread] = []
        elsewhere = {address for node, address in enumerate(place.addresses) if node != place.node}

        def look(waits: bool) -> None:
            if not info.interrupts.unhandled(_MAX_PENDING):
                aborts.clear()
                return
            if not aborts and device_groups.exist():
                aborts.append(traced.thread(device_groups.abort, "nbspawn-abort"))
                aborts[0].start()
            if waits and not any(abort.is_alive() for abort in aborts):  # which has connections, too
                _shut_down(_sockets() - inherited, _rank_test(slots, elsewhere))

        info.on_begin.append(aborts.clear)  # a look at the handled interrupt may not come before the next one
        info.on_look.append(look)
    yield


def _shut_down(sockets: set[tuple[int, int]], to_a_rank: Callable[[socket.socket], bool]) -> None:
    """Shut down the connections of native code to ranks of this run: those of gloo, of all groups. Connections to the
    store stay open: the next group meets there."""
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
    """(descriptor, inode) of each open socket of this process. Those that were open when it became a rank belong to the
    kernel or the fork server: a shutdown would end them there, too. (macOS has no inodes for sockets.)"""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed since it was listed
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _rank_test(slots: mmap.mmap, elsewhere: Collection[str]) -> Callable[[socket.socket], bool]:
    """A function that tests whether the other end of a connection belongs to a rank of this run: also to this one
    itself, if it serves the store of the cell's own group. Where the system does not report the owners, every process
    of this machine counts as a rank; so does every process of the other nodes, whose addresses are ``elsewhere``."""
    try:
        ends = connections.other_ends()
    except OSError:
        return lambda found: bool(found.getsockname()[0] == found.getpeername()[0])
    of_ranks = set().union(*(connections.open_sockets(pid) for pid in gauges.processes(slots)))
    to_ranks = {inode for inode, end in ends.items() if end.inode in of_ranks}
    return lambda found: (
        os.fstat(found.fileno()).st_ino in to_ranks or found.getpeername()[0].removeprefix("::ffff:") in elsewhere
    )
