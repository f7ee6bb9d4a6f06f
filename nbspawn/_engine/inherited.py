"""File descriptors that belong to the kernel alone: every process that is forked from it lets go of them.

A lifeline works only if nobody but the kernel holds its writing end, and a forked rank, a DataLoader worker or a
nested run would each inherit it. Those of our own are closed at once; of the rest, a rank is told.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
from collections.abc import Callable

_kernel_only: set[int] = set()
_in_child: list[Callable[[], None]] = []


def keep_from_children(fd: int) -> int:
    """Mark ``fd``; returns it. Files that are opened with O_CLOEXEC need this against fork only."""
    _kernel_only.add(fd)
    return fd


def forget(fd: int) -> int:
    """Unmark ``fd``, which is about to be closed by another's hand; returns it."""
    _kernel_only.discard(fd)
    return fd


def close(fd: int) -> None:
    """Close a marked descriptor."""
    os.close(forget(fd))


def when_forked(action: Callable[[], None]) -> None:
    """Call ``action`` in every forked child: state of the kernel that means nothing there."""
    _in_child.append(action)


def kernel_sockets() -> tuple[tuple[int, int], ...]:
    """(descriptor, inode) of this process's listening sockets and of the connections that they have accepted.

    A rank that outlived its kernel with them open would keep a restarted kernel from binding its ports ("Address
    already in use").
    """
    held = []
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                held.append((int(name), status.st_ino, *_port(int(name), status.st_ino)))
        except OSError:
            continue  # closed since it was listed (the listing's own descriptor)
    ports = {port for _, _, port, listens in held if listens}
    return tuple((fd, inode) for fd, inode, port, _ in held if port in ports)


@functools.lru_cache(maxsize=1024)
def _port(fd: int, inode: int) -> tuple[int, bool]:
    """The socket's own TCP port (0 if it has none), and whether it listens there. Raises OSError, which no cache keeps,
    for one that is neither listening nor connected yet."""
    with socket.socket(fileno=os.dup(fd)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, False
        listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        if not listens:
            found.getpeername()
        return found.getsockname()[1], listens


def _let_go() -> None:
    """The numbers stay taken until the objects that hold them go: these close them once more, and would then close a
    stranger's file."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _kernel_only:
        try:
            os.fstat(fd)
            os.dup2(null, fd, inheritable=False)
        except OSError:
            continue  # the person's own code closed it, for example os.closerange
    os.close(null)
    _kernel_only.clear()
    for action in _in_child:
        action()


os.register_at_fork(after_in_child=_let_go)
