"""Goes through what variables lead to, as far as a millisecond lets it: their parts, and the parts of these."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from multiprocessing import queues
from typing import Any

from nbspawn._payload.diagnosis import attributes, parts

_LOOKED_INTO = 200  # objects
_PARTS = 100  # of one object
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def findings(variables: Mapping[str, object], judge: Callable[[Any], str | None]) -> Iterator[tuple[str, str]]:
    """What ``judge`` has to say of these variables and of what they use (functions by their names, containers and
    objects by what is in them), each with the path that leads there. '' says nothing, and None that there is no need to
    look into it. What it has said something of is not looked into either."""
    seen: dict[int, object] = {}  # which keeps them: the number of one that has gone may be another's
    found: deque[tuple[str, object]] = deque(variables.items())
    while found and len(seen) < _LOOKED_INTO:
        path, value = found.popleft()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        # What is asked may raise: an object's class is not bound to be like others.
        with suppress(Exception):
            if said := judge(value):
                yield path, said
            elif said is not None and not _is_closed(value):
                found.extend((path + step, part) for step, part in islice(_parts(value), _PARTS))


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of an object, also of executors, queues and a DataLoader's iterators, which parts() takes for things
    that are what they are."""
    inside = list(islice(parts(value), _PARTS))
    if not inside and not issubclass(type(value), (type, threading.Thread, io.IOBase)):
        inside = [(f".{name}", part) for name, part in attributes(value).items()]
    yield from inside


_KERNELS_OWN = ("ipykernel", "IPython", "comm", "zmq", "tornado", "asyncio")


def _is_closed(value: object) -> bool:
    """Is not to be looked into: modules, and classes that are not the notebook's, whose state is their library's matter
    (tqdm's class has a thread for which no bar waits); torch's data, of which there is much and which is nothing but
    data; what renews itself after a fork, logging's locks and multiprocessing's queues; the kernel itself, which
    widgets lead to, and which a rank lets go of; mappings that may read a file for each item."""
    kind = type(value)
    return (
        issubclass(kind, types.ModuleType)
        or (issubclass(kind, type) and value.__module__ != "__main__")
        or kind.__module__.partition(".")[0] in ("logging", *_KERNELS_OWN)
        or issubclass(kind, queues.Queue)
        or (issubclass(kind, Mapping) and not issubclass(kind, dict))
        or _is_data(kind)
    )


def _is_data(kind: type) -> bool:
    """A tensor, or a module or an optimizer of a class of torch's own. (One of the user's may hold anything.)"""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):  # its import has failed, or has not ended
        return False
    own = kind.__module__.partition(".")[0] == "torch"
    return issubclass(kind, torch.Tensor) or (own and issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)))
