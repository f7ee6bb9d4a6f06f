"""Pickles what other processes cannot import: functions and classes of the notebook, and what is like them, by value.

This is cloudpickle with these differences:

- a function of the notebook refers to *its* namespace, where cloudpickle writes a dict of the globals that it uses: in
  the other process its globals are ``__main__``, so that the functions that were sent see a cell bind ``lr`` anew.
- functions of one closure share its variables there, too.
- classes have an identity (_payload/classes.py), and are made without running the notebook's code (_payload/making.py).
- what plain pickle writes as a name of ``__main__`` travels by value as well (_payload/definitions.py).
"""

from __future__ import annotations

import functools
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._payload import classes, cloudpickle_adapter, definitions, mentioned
from nbspawn._payload.cloudpickle_adapter import Reducer, Sink
from nbspawn._protocol.garbage import uncollected


class ByValue:
    """Pickles one object. ``namespace`` is what functions of the notebook have as globals. With ``digest`` on the way
    from a rank to the kernel: it distinguishes classes by what is pickled of them."""

    def __init__(self, namespace: dict[str, Any] | None, digest: Callable[[object], str] | None = None) -> None:
        self._namespace = namespace
        self._digest = digest

    def dump(self, obj: object, sink: Sink) -> None:
        """Raises whatever a part of ``obj`` raises when it is pickled."""
        pickler = cloudpickle_adapter.make_pickler(sink, self.keep_in_band, self.reducer)
        if self._namespace is not None:
            pickler.replace_globals(self._namespace, _Namespace())
        self._by_default: Reducer = pickler.reduce_by_default
        self._function: Callable[[Any, bool], Any] = pickler.reduce_function
        try:
            pickler.dump(obj)
        finally:
            # The cycle would keep what was pickled alive until the next garbage collection.
            del self._by_default, self._function

    def keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Is this memory part of the stream?"""
        return True

    def is_by_value(self, function: types.FunctionType) -> bool:
        """Does it travel by value, although something has its name?"""
        return False

    def reducer(self, kind: type) -> Reducer | None:
        """How objects of this type are reduced; None: as their own ``__reduce__`` says."""
        if issubclass(kind, type):
            return self._class
        if issubclass(kind, types.FunctionType):
            return self._reduce_function
        if kind is types.CellType:
            return _cell
        if kind is functools.cached_property:
            return _cached_property
        if definitions.is_definition(kind):
            return self._definition
        if kind in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            return _weak_dict
        if definitions.is_mark(kind):
            return definitions.reduce_mark
        if definitions.may_be_one_of_a_kind(kind) and not cloudpickle_adapter.has_reducer(kind):
            return self._one_of_a_kind
        return None

    def _reduce_function(self, function: types.FunctionType) -> Any:
        reduced = self._function(function, self.is_by_value(function))
        if function.__globals__ is self._namespace and (along := mentioned.in_function(function)):
            make, args, (attributes, slots), *rest = reduced
            slots = {**slots, "__globals__": {**along, **slots["__globals__"]}}
            return make, args, (attributes, slots), *rest
        return reduced

    def _class(self, cls: type) -> Any:
        return classes.reduce(cls, self._by_default, self._digest)

    def _definition(self, obj: Any) -> Any:
        return classes.reduce_definition(obj, self._digest)

    def _one_of_a_kind(self, obj: Any) -> Any:
        return definitions.reduce_one_of_a_kind(obj, returning=self._digest is not None)


def _cell(cell: types.CellType) -> Any:
    """Empty first, because what is in it may lead back to the function."""
    try:
        contents = (cell.cell_contents,)
    except ValueError:
        contents = None
    return _empty_cell, (), contents, None, None, _fill


def _weak_dict(mapping: Any) -> Any:
    """``functools.singledispatch`` has one."""
    return type(mapping), (dict(mapping),)


def _cached_property(cached: Any) -> Any:
    """Before Python 3.12 it has a lock, which is nobody's state."""
    return functools.cached_property, (cached.func,), {"attrname": cached.attrname, "__doc__": cached.__doc__}


# ---------------------------------------------------------------- called by the stream, when it is loaded

_current = threading.local()  # the load that this thread is in


@contextmanager
def loading(namespace: dict[str, Any]) -> Iterator[None]:
    """Functions that are loaded meanwhile have ``namespace`` as globals."""
    before = getattr(_current, "namespace", None)
    _current.namespace = namespace
    try:
        with uncollected():
            yield
    finally:
        _current.namespace = before


class _Namespace:
    """Stands for the notebook's namespace in the stream."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return _loaded_into, ()


def _loaded_into() -> dict[str, Any]:
    return _current.namespace  # type: ignore[no-any-return]


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill(cell: types.CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents
