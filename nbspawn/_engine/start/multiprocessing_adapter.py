"""multiprocessing's start of processes, as far as nbspawn changes it (docs/private_names.md lists the names).

Every change is undone when the block that needs it is left.
"""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, reduction, resource_tracker, spawn, util
from typing import Any


@contextmanager
def starting() -> Iterator[None]:
    """See start_contexts.py: hide ``__main__``'s origin, and leave the default start method open."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    default: Any = context._default_context
    settled = default._actual_context
    try:
        yield
    finally:
        default._actual_context = settled
        main.__dict__.update(hidden)


def prepared(process: Any, popen: Any) -> bytes:
    """What a server's child reads first: where it is (``sys.path``, directory, arguments), then the process. What may
    be pickled only now duplicates its descriptors through ``popen``."""
    data = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        with starting():
            reduction.dump(spawn.get_preparation_data(process._name), data)
        reduction.dump(process, data)
    finally:
        context.set_spawning_popen(None)
    return data.getvalue()


@contextmanager
def in_own_group() -> Iterator[None]:
    """Have multiprocessing's resource tracker, if it is started meanwhile, leave the kernel's process group first of
    all. It imports nothing from the notebook's folder, where a user may have a ``queue.py`` (``python -c`` has that
    folder first in its path).

    At its shutdown ipykernel sends SIGTERM to all of its group and waits for them to end. The resource tracker ignores
    SIGTERM, so every restart would take 2.5 s longer, at the end of which the kernel is killed. It ends by itself when
    the kernel has gone.

    All else that starts processes, and what other threads start, is left alone: meanwhile the user's own code may do
    that.
    """
    original, here = util.spawnv_passfds, threading.get_ident()

    def start(path: bytes, arguments: list[str], fds: list[int]) -> int:
        if threading.get_ident() == here:
            *options, code = arguments
            arguments = [*options, f"import sys; sys.path[:1] = []; import os; os.setpgid(0, 0); {code}"]
        return original(path, arguments, fds)

    tracker: Any = resource_tracker
    tracker.util = types.SimpleNamespace(**{**vars(util), "spawnv_passfds": start})
    try:
        yield
    finally:
        tracker.util = util
