"""What a command works on, in the three ways in which a rank can have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any


class SentFd:
    """A file descriptor as an argument of a process that is being started; multiprocessing duplicates it on the way."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, sent: Any) -> None:
        self.fd = sent.detach()


@dataclass(frozen=True)
class Inherited:
    """Under fork: the object itself, which the rank has from the kernel."""

    value: Any


@dataclass(frozen=True)
class Sent:
    """Packed (_payload/packing.py), for ranks that are being started: its files, the bytes of its parts, and what can
    be pickled only as an argument of a new process."""

    fds: tuple[SentFd, ...]
    sizes: tuple[int, ...]
    spawn_arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Shared:
    """Packed, for ranks that run already: where they open its files, and the bytes of its parts. Without files it is
    an empty dict."""

    paths: Sequence[str] = ()
    sizes: tuple[int, ...] = ()


Payload = Inherited | Sent | Shared

NOTHING = Shared()
