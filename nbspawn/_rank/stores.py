"""The store at which ranks make a process group: a file on one machine, node 0's TCPStore on several.

A file needs no port and no look-up of a name: each client of a TCPStore asks DNS for the name of the address that it
connects to, which takes 5 to 10 s where no answer comes.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from nbspawn._protocol.launch import Launch


def store(launch: Launch, name: str, path: str = "") -> Any:
    """A new store for one group, by ``name`` the same in all ranks. On one machine it is the file at ``path``, by
    default one in the run's private directory."""
    import torch.distributed as dist

    place = launch.place
    if place.master is None:
        found = dist.FileStore(path or f"{launch.files.store}{name}", place.total)
        return dist.PrefixStore(name, found) if path else found
    return dist.PrefixStore(f"{place.run_id}/{name}", _client(*place.master, place.slow_dns))


@functools.lru_cache(maxsize=1)
def _client(host: str, port: int, slow_dns: bool) -> Any:
    """This rank's connection to the TCPStore, for all its groups."""
    from torch.distributed import TCPStore

    made: list[Any] = []

    def make() -> None:
        made.append(TCPStore(host, port, is_master=False, wait_for_workers=False))

    if slow_dns:
        # glibc reads RES_OPTIONS when a thread asks for the first time: this one then asks nobody.
        before = os.environ.get("RES_OPTIONS")
        os.environ["RES_OPTIONS"] = "attempts:0"
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before
    if not made:  # the thread's error is raised here, in the rank's own
        make()
    return made[0]
