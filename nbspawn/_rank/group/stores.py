"""The store at which ranks make a process group: a file on one machine, node 0's TCPStore on several.

A file needs no port and no look-up of a name: each client of a TCPStore asks DNS for the name of the address that it
connects to, which takes 5 to 10 s where no answer comes.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from typing import Any

from nbspawn._process.tcp_store import tcp_store
from nbspawn._protocol.launch import Launch

_KEPT = 2  # links: the group's, and that of the one before it, in which a thread may still wait
_links: list[str] = []


def store(launch: Launch, name: str, path: str = "") -> Any:
    """A new store for one group, by ``name`` the same in all ranks. On one machine it is the file at ``path``, by
    default one in the run's private directory."""
    import torch.distributed as dist

    place = launch.place
    if place.master is None:
        file = f"{launch.files.store}{name}"
        found = dist.FileStore(_linked(path or file, f"{file}-{os.getpid()}"), place.total)
        return dist.PrefixStore(name, found) if path else found
    return dist.PrefixStore(f"{place.run_id}/{name}", _client(*place.master, place.slow_dns))


def _linked(file: str, link: str) -> str:
    """A path at which this process alone reaches the file, so that ``give_up`` can take it away."""
    try:
        os.symlink(file, link)
    except OSError:  # a full disk, a deleted directory
        return file
    _links.append(link)
    for old in _links[:-_KEPT]:
        _links.remove(old)
        with suppress(OSError):
            os.unlink(old)
    return link


def give_up() -> None:
    """Have each call raise that waits for a key in a file: torch opens it each 10 ms, and here comes to no end of
    links. A later group gets another path, on several machines another connection (the caller closes this one)."""
    _client.cache_clear()
    for link in _links:
        with suppress(OSError):
            os.symlink(link, f"{link}-ended")
            os.replace(f"{link}-ended", link)


@functools.lru_cache(maxsize=1)
def _client(host: str, port: int, slow_dns: bool) -> Any:
    """This rank's connection to the TCPStore, for all its groups."""
    return tcp_store(host, port, slow_dns, is_master=False)
