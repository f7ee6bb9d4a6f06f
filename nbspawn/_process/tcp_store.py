"""torch's TCPStore, served or reached, also where DNS is slow."""

from __future__ import annotations

import os
import threading
from typing import Any


def tcp_store(host: str, port: int, slow_dns: bool, **how: Any) -> Any:
    """A TCPStore; where DNS is slow, one that asks for no names."""
    from torch.distributed import TCPStore

    def make() -> Any:
        try:
            return TCPStore(host, port, wait_for_workers=False, **how)
        except NotImplementedError:  # torch 2.4: its libuv server cannot take over a socket, the older one can
            return TCPStore(host, port, wait_for_workers=False, use_libuv=False, **how)

    if not slow_dns:
        return make()
    made: list[Any] = []
    # glibc reads RES_OPTIONS when a thread asks for the first time: this new one then asks nobody.
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = "attempts:0"
    try:
        thread = threading.Thread(target=lambda: made.append(make()))
        thread.start()
        thread.join()
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before
    return made[0] if made else make()  # the thread's error comes again here, in the caller's own
