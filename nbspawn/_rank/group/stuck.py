"""Unblocks a rank that does not handle an interrupt, because it waits for a peer in native code.

Python runs signal handlers only between its own instructions. gloo's ``abort()`` wakes no call, but when the connection
to a peer is closed, every call that waits for it raises. So this module closes the connections; NCCL's groups are
aborted, and what waits for the device goes on. While groups are being made, ranks wait in the store, or for NCCL's
first connection: if the rank does not go on, these are closed, too. The interrupt, which was pending until the call
returned, is handled at once: ``finally`` blocks run, and a kept rank keeps its variables.
"""

from __future__ import annotations

import gc
import glob
import mmap
import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from nbspawn._process import traced
from nbspawn._protocol import gauges
from nbspawn._rank.group import device_groups, stores
from nbspawn._rank.program import connections
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

_MAX_PENDING = 0.3  # seconds for which an interrupt may be pending


@contextmanager
def unblocking(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: release it, on Stop, from what it waits for."""
    unblocker = _Unblocker(info)
    info.on_begin.append(unblocker.reset)  # a look at the handled interrupt may not come before the next one
    info.on_look.append(unblocker.look)
    yield


class _Unblocker:
    """Looks at the interrupt, in the sampler's thread."""

    def __init__(self, info: RankInfo) -> None:
        self._interrupts = info.interrupts
        self._inherited, self._slots = _sockets(), gauges.mapped(info.launch.files.gauges)
        place = info.launch.place
        self._elsewhere = {address for node, address in enumerate(place.addresses) if node != place.node}
        self._abort: threading.Thread | None = None
        self._closed = False

    def reset(self) -> None:
        self._abort, self._closed = None, False

    def look(self, waits: bool) -> None:
        if not self._interrupts.unhandled(_MAX_PENDING):
            self.reset()
            return
        if self._abort is None and device_groups.exist():
            self._abort = traced.thread(device_groups.abort, "nbspawn-abort")
            self._abort.start()
        if self._abort is not None and self._abort.is_alive():  # which has connections, too
            return
        if waits or self._abort is not None:  # NCCL's first call computes while it waits
            if self._closed:
                stores.give_up()
            _shut_down(_sockets() - self._inherited, _rank_test(self._slots, self._elsewhere), every=self._closed)
            self._closed = True


def _shut_down(sockets: set[tuple[int, int]], to_a_rank: Callable[[socket.socket], bool], every: bool) -> None:
    """Shut down the connections of native code to ranks of this run: those of gloo, of all groups. Connections to the
    store, where the next group meets, stay open unless it is ``every`` one. So does the socket at which NCCL waits for
    its first connection: https://github.com/NVIDIA/nccl/blob/master/src/bootstrap.cc. gloo's, which would end the
    process, is in an event loop, as other servers' are."""
    pythons = {thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)}
    store = os.environ.get("MASTER_PORT")
    served = _in_event_loops() if every else set()
    for fd in {fd for fd, _ in sockets} - pythons - served:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:  # closed since, or not connected
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                shut = every and device_groups.exist()
            else:
                ports = str(found.getsockname()[1]), str(found.getpeername()[1])
                shut = every if store in ports else to_a_rank(found)
            if shut:
                found.shutdown(socket.SHUT_RDWR)


def _in_event_loops() -> set[int]:
    """The descriptors of this process that an epoll watches."""
    found = set[int]()
    for path in glob.glob("/proc/self/fdinfo/*"):
        with suppress(OSError), open(path) as file:  # closed since
            found.update(int(line.split()[1]) for line in file if line.startswith("tfd:"))
    return found


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
