"""File descriptors that belong to the kernel alone: every process that is forked from it lets go of them at once.

A lifeline works only if nobody but the kernel holds its writing end, and a forked rank, a DataLoader worker or a
nested run would each inherit it.
"""

from __future__ import annotations

import os
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


def _let_go() -> None:
    for fd in _kernel_only:
        try:
            os.close(fd)
        except OSError:
            continue  # the person's own code closed it, for example os.closerange
    _kernel_only.clear()
    for action in _in_child:
        action()


os.register_at_fork(after_in_child=_let_go)
