"""Frees a kept rank that an interrupt does not reach, because it waits for a peer in gloo's native code.

Python runs signal handlers between its own instructions only, and gloo's ``abort()`` wakes nobody. When a connection
to a peer ends, though, every call that waits for it raises; so that is what happens here, and the interrupt that has
waited for the call to return follows at once. A rank that does not stay needs none of this: it is killed.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from nbspawn.rank.channel import Channel
from nbspawn.rank.launch import RankInfo

_PATIENCE = 0.3  # seconds that an interrupt may wait for Python


@contextmanager
def freeing(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives, if it is kept."""
    if info.launch.keep:
        info.on_look.append(lambda waits: _free(info) if waits else None)
    yield


def _free(info: RankInfo) -> None:
    if info.interrupts.unheeded(_PATIENCE):
        _hang_up()


def _hang_up() -> None:
    """End the connections that native code holds to processes of this machine: gloo's, of whichever group. Python's own
    sockets stay, and so does the store."""
    store = int(os.environ["MASTER_PORT"])
    pythons = {thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)}
    for fd in {int(name) for name in os.listdir("/dev/fd")} - pythons:
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    here, there = found.getsockname(), found.getpeername()
                    if here[0] == there[0] and store not in (here[1], there[1]):
                        found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed since it was listed, or not connected
