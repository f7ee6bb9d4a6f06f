"""multiprocessing's start of processes, as far as nbspawn changes it (docs/private_names.md lists the names).

Every change is undone when the block that needs it is left.
"""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, context, forkserver, reduction, resource_tracker, spawn, util
from typing import Any


@contextmanager
def starting() -> Iterator[None]:
    """See contexts.py: hide ``__main__``'s origin, and leave the default start method open."""
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
def listening_at(address: str) -> Iterator[None]:
    """Have a fork server that is started meanwhile listen at this path."""
    with _replaced(connection, "arbitrary_address", lambda family: address, users=(forkserver,)):
        yield


@contextmanager
def beginning_with(statements: str) -> Iterator[None]:
    """Have multiprocessing's two helpers, the fork server and the resource tracker, run ``statements`` first of all:
    they leave the kernel's process group. They import nothing from the notebook's folder, where a user may have a
    ``queue.py`` (``python -c`` has that folder first in its path).

    At its shutdown ipykernel sends SIGTERM to all of its group and waits for them to end. The resource tracker ignores
    SIGTERM, so every restart would take 2.5 s longer, at the end of which the kernel is killed. Both helpers end by
    themselves when the kernel has gone.
    """

    def start(path: bytes, arguments: list[str], fds: list[int]) -> int:
        *options, code = arguments
        begin = f"import sys; sys.path[:1] = []; import os; {statements}"
        return util.spawnv_passfds(path, [*options, f"{begin}; {code}"], fds)

    with _replaced(util, "spawnv_passfds", start, users=(forkserver, resource_tracker)):
        yield


@contextmanager
def _replaced(
    module: types.ModuleType, function: str, replacement: Callable[..., Any], users: Sequence[Any]
) -> Iterator[None]:
    """Have other modules (``users``) find ``replacement`` in ``module``, in this thread.

    All else that they find there, and what other threads find, stays as it is: meanwhile the user's own code may start
    multiprocessing's fork server, or connect to it.
    """
    original, here = getattr(module, function), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args, **kwargs)

    name = module.__name__.rpartition(".")[2]
    stand_in = types.SimpleNamespace(**{**vars(module), function: chosen})
    for user in users:
        setattr(user, name, stand_in)
    try:
        yield
    finally:
        for user in users:
            setattr(user, name, module)
