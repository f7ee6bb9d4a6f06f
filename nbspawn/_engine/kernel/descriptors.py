"""File descriptors of the kernel: those that every forked process has to close, and how many there may be.

A lifeline works only if no other process holds its writing end, and a forked rank, a DataLoader worker or a nested run
would each inherit it. nbspawn's own descriptors are closed at once in the child. The kernel's sockets are passed to
the rank, which closes them (``kernel_sockets``).
"""

from __future__ import annotations

import functools
import os
import resource
import socket
import stat
from collections.abc import Callable

_kernel_only: set[int] = set()
_in_child: list[Callable[[], None]] = []


def close_after_fork(fd: int) -> int:
    """Mark ``fd`` to be closed in forked children; returns it. Across exec O_CLOEXEC does the same."""
    _kernel_only.add(fd)
    return fd


def unmark(fd: int) -> int:
    """Unmark ``fd``, which other code is about to close; returns it."""
    _kernel_only.discard(fd)
    return fd


def close(fd: int) -> None:
    """Close a marked descriptor."""
    os.close(unmark(fd))


def after_fork_in_child(action: Callable[[], None]) -> None:
    """Call ``action`` in every forked child, to reset state that is valid only in the kernel."""
    _in_child.append(action)


def kernel_sockets() -> tuple[tuple[int, int], ...]:
    """(descriptor, inode) of this process's listening sockets and of the connections that they have accepted.

    A rank that outlives its kernel with these sockets open prevents a restarted kernel from binding its ports ("Address
    already in use").
    """
    sockets = []
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.append((int(name), status.st_ino, *_port(int(name), status.st_ino)))
        except OSError:
            continue  # closed since it was listed (the listing's own descriptor)
    ports = {port for _, _, port, listens in sockets if listens}
    return tuple((fd, inode) for fd, inode, port, _ in sockets if port in ports)


@functools.lru_cache(maxsize=1024)
def _port(fd: int, inode: int) -> tuple[int, bool]:
    """The socket's own TCP port (0 if it has none), and whether it listens there. Raises OSError, which is not cached,
    for a socket that is neither listening nor connected yet."""
    with socket.socket(fileno=os.dup(fd)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, False
        listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        if not listens:
            found.getpeername()
        return found.getsockname()[1], listens


def _close_in_child() -> None:
    """Close the marked descriptors, but keep their numbers in use: the objects that own them will close these once
    more, and could then close an unrelated file."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _kernel_only:
        try:
            os.fstat(fd)
            os.dup2(null, fd, inheritable=False)
        except OSError:
            continue  # the user's own code closed it, for example os.closerange
    os.close(null)
    _kernel_only.clear()
    for action in _in_child:
        action()


os.register_at_fork(after_in_child=_close_in_child)


def check_limit(count: int, kind: str, needed: int) -> None:
    """Raises StartError if this process may not open ``needed`` more files for so many 'ranks' or 'nodes'."""
    from nbspawn.errors import StartError  # imports torch, which %load_ext must not wait for

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        needed += len(os.listdir("/dev/fd"))
    except OSError as refusal:
        raise StartError(
            f"this process cannot open one more file ({refusal.strerror}), and {count} {kind} need {needed}: close "
            "some, or raise the limit (ulimit -n) and start the kernel again"
        ) from None
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise StartError(
            f"{count} {kind} need {needed} open files in this process, and the system allows {limit}: "
            f"choose fewer {kind}, or raise the limit (ulimit -n) and start the kernel again"
        )
