"""The input of a command, in the three forms in which a rank can get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any


class SentFd:
    """A file descriptor as an argument of a process that is being started; multiprocessing duplicates it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, sent: Any) -> None:
        self.fd = sent.detach()


@dataclass(frozen=True)
class Inherited:
    """Under fork: the object itself, which the rank inherits from the kernel."""

    value: Any


@dataclass(frozen=True)
class Sent:
    """Packed (_payload/packing.py), for ranks that are being started: the descriptors of its files, the sizes of its
    parts in bytes, and objects that can be pickled only as arguments of a new process."""

    fds: tuple[SentFd, ...]
    sizes: tuple[int, ...]
    spawn_arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Shared:
    """Packed, for ranks that are alive already: the paths of its files, and the sizes of its parts in bytes. Without
    files it is an empty dict."""

    paths: Sequence[str] = ()
    sizes: tuple[int, ...] = ()


Payload = Inherited | Sent | Shared

NOTHING = Shared()
