"""multiprocessing in a rank, which is like a program: it may choose its start method, and its processes have all of it.

multiprocessing pickles functions and classes of ``__main__`` by name, and has the new process run the main script again
to find them. A rank has no script that could be run. So what it sends to such a process, at its start and later through
queues, carries them by value.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from multiprocessing import context, process, reduction
from typing import Any

from nbspawn._payload import classes
from nbspawn._payload.by_value import ByValue, loading
from nbspawn._payload.cloudpickle_adapter import Reducer


def begin(default_method: str | None) -> None:
    """Be the main process of a program that has just begun. Its default start method is the notebook's, and it may set
    another one."""
    default: Any = context._default_context
    default._actual_context = None
    if default_method is not None:
        default._default_context = default.get_context(default_method)
    own: Any = process.current_process()
    own.name, own._identity = "MainProcess", ()
    process._parent_process = None  # type: ignore[attr-defined]
    serve()


def serve() -> None:
    """Have processes that this one starts load what the notebook defines: in a rank, and in a process that it
    starts."""
    reduction.dump = _dump


def _dump(obj: object, file: Any, protocol: Any = None) -> None:
    """multiprocessing calls it only to start a process that is not forked. Later ones may be sent functions as well."""
    reduction.ForkingPickler.dumps = _dumps  # type: ignore[method-assign, assignment]
    file.write(_dumps(obj))


def _dumps(obj: object, protocol: Any = None) -> bytes:
    stream = io.BytesIO()
    _Pickler(vars(sys.modules["__main__"])).dump(obj, stream)
    return pickle.dumps(_Sent(stream.getvalue()))


class _Pickler(ByValue):
    """A pickler with the reducers of multiprocessing, and of torch.multiprocessing: a tensor's memory is shared."""

    def reducer(self, kind: type) -> Reducer | None:
        registered: Callable[[Any], Any] | None = reduction.ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
        return registered or super().reducer(kind)


class _Sent:
    """A stream that has to be loaded into ``__main__``."""

    def __init__(self, stream: bytes) -> None:
        self._stream = stream

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return _load, (self._stream,)


def _load(stream: bytes) -> Any:
    serve()
    namespace = vars(sys.modules["__main__"])
    with classes.new_classes_are_the_kernels(namespace), loading(namespace):
        return pickle.loads(stream)
