"""The rank's ``__main__``: whose variables are the kernel's, and whose its own.

A function that is sent brings the variables that it uses, and they become the rank's, as they were the notebook's. A
kept rank may have bound some of these names itself meanwhile (the model that it trains): those stay as they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbspawn._carried import replaced
from nbspawn._payload import packing
from nbspawn._protocol import shared_memory
from nbspawn._protocol.payload import Inherited, Payload, Sent

_received: dict[str, Any] = {}
_NOTHING = object()


def of_rank() -> dict[str, Any]:
    """What cells and the notebook's functions have as globals."""
    return vars(sys.modules["__main__"])


def receive(payload: Payload) -> Any:
    """What a command works on, whichever way it comes."""
    if isinstance(payload, Inherited):
        return payload.value
    if isinstance(payload, Sent):
        fds, arguments = [sent.fd for sent in payload.fds], payload.spawn_arguments
    elif payload.paths:
        fds, arguments = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in payload.paths], ()
    else:
        return {}
    try:
        with _own_names_stay():
            loaded = packing.load(fds, payload.sizes, arguments, of_rank())
        replaced.put(loaded)
        return loaded
    finally:
        shared_memory.close(fds)


@contextmanager
def _own_names_stay() -> Iterator[None]:
    """While something is loaded that the kernel has sent: keep the names that the rank has bound."""
    namespace = of_rank()
    before = dict(namespace)
    came: dict[str, Any] = {}
    try:
        yield
    finally:  # it may have failed, or been stopped, half way
        for name, value in list(namespace.items()):
            had = before.get(name, _NOTHING)
            if had is value:
                continue
            if had is _NOTHING or had is _received.get(name, _NOTHING):
                came[name] = value
            else:
                namespace[name] = had
    for name, value in came.items():
        _replace(before.get(name, _NOTHING), value)
        _received[name] = value


def put(variables: Mapping[str, Any]) -> None:
    """Have these variables, whoever had them before."""
    namespace = of_rank()
    for name, value in variables.items():
        _replace(namespace.get(name, _NOTHING), value)
    namespace.update(variables)


def _replace(old: Any, new: Any) -> None:
    """Have what exists of a function or a class follow, if it is defined anew. Scripts define nothing anew, and need no
    IPython."""
    if "IPython" in sys.modules:
        from nbspawn._rank.edit import autoreload

        autoreload.follow(old, new)
