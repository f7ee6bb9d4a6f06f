"""Pickles what other processes cannot import: functions and classes of the notebook, and what is like them, by value.

This is cloudpickle with these differences:

- a function of the notebook refers to *its* namespace, where cloudpickle writes a dict of the globals that it uses: in
  the other process its globals are ``__main__``, so that the functions that were sent see a cell bind ``lr`` anew.
- functions of one closure share its variables there, too, and keep the name of the cell or file that they are from.
- classes have an identity (_payload/classes.py), and are made without running the notebook's code (_payload/making.py).
- what is in a module that the other process does not find travels by value (_payload/importable.py).
- what plain pickle writes as a name of ``__main__`` travels by value as well (_payload/definitions.py).
"""

from __future__ import annotations

import functools
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbspawn._payload import annotated, classes, cloudpickle_adapter, definitions, importable, imported, mentioned
from nbspawn._payload.cloudpickle_adapter import Reducer, Sink
from nbspawn._process.garbage import uncollected


class ByValue:
    """Pickles one object. ``namespace`` is what functions of the notebook have as globals. With ``digest`` on the way
    from a rank to the kernel: it distinguishes classes by what is pickled of them."""

    def __init__(self, namespace: dict[str, Any] | None, digest: Callable[[object], str] | None = None) -> None:
        self._namespace = namespace
        self._digest = digest
        self._annotated: set[str] = set()
        """Names in the annotations of what has been pickled."""
        self._words: set[str] = set()
        """And words in strings within these."""
        self._sent: set[str] = set()
        self._not_to_be_imported: list[str] = []
        self.modules: set[str] = set()
        """Which are imported when this is loaded, or run."""

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
            cloudpickle_adapter.pickle_by_name(self._not_to_be_imported)

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
        if kind is types.ModuleType:
            return self._module
        if kind is types.CellType:
            return _cell
        if kind is types.CodeType:
            return cloudpickle_adapter.reduce_code
        if kind is functools.cached_property:
            return _cached_property
        if definitions.is_definition(kind):
            return self._definition
        if kind in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            return _weak_dict
        if definitions.is_mark(kind):
            return definitions.reduce_mark
        if kind is WithAnnotated:
            return self._with_annotated
        if kind is _Annotated:
            return self._one_annotated
        if issubclass(kind, annotated.ALIASES):
            return self._alias
        if definitions.may_be_one_of_a_kind(kind) and not cloudpickle_adapter.has_reducer(kind):
            return self._one_of_a_kind
        return None

    def _reduce_function(self, function: types.FunctionType) -> Any:
        self._look_for_module(function.__module__)
        reduced = self._function(function, self.is_by_value(function))
        if function.__globals__ is not self._namespace:
            return reduced
        self._note_annotations(function)
        self.modules.update(imported.by_code(function.__code__))
        if along := mentioned.in_function(function):
            make, args, (attributes, slots), *rest = reduced
            slots = {**slots, "__globals__": {**along, **slots["__globals__"]}}
            return make, args, (attributes, slots), *rest
        return reduced

    def _class(self, cls: type) -> Any:
        self._look_for_module(cls.__module__)
        if cls.__module__ == "__main__":
            self._note_annotations(cls)
        return classes.reduce(cls, self._by_default, self._digest)

    def _module(self, module: types.ModuleType) -> Any:
        self._look_for_module(module.__name__)
        return NotImplemented

    def _look_for_module(self, name: Any) -> None:
        """Have what is in it travel by value, if the other process does not find it by its name. (A ``__module__`` may
        be anything.)"""
        if self._digest is None and type(name) is str:
            self.modules.add(name)
            if not importable.is_importable(name):
                self._not_to_be_imported += cloudpickle_adapter.pickle_by_value(name)

    def _definition(self, obj: Any) -> Any:
        self._look_for_module(obj.__module__)
        return classes.reduce_definition(obj, self._digest)

    def _one_of_a_kind(self, obj: Any) -> Any:
        return definitions.reduce_one_of_a_kind(obj, returning=self._digest is not None)

    def _alias(self, alias: Any) -> Any:
        self._note_annotations(alias)
        return NotImplemented

    def _note_annotations(self, obj: Any) -> None:
        if self._digest is None:
            names, words = annotated.in_object(obj)
            self._annotated |= names
            self._words |= words

    def _with_annotated(self, obj: WithAnnotated) -> Any:
        self._sent.update(obj.variables)
        return _first, (obj.by_name, _Annotated())

    def _one_annotated(self, _: object) -> Any:
        """The next of these variables, and then the others: its own annotations may name some. Without those that
        cannot travel, or are large: nobody may ask for them."""
        namespace = self._namespace or {}
        found = {name: namespace[name] for name in self._annotated if name in namespace}
        found |= annotated.sent_along(self._words, namespace)
        for name in sorted(found.keys() - self._sent):
            self._sent.add(name)
            if self._is_small(found[name]) and len(self._sent) < _MOST:
                return _bind, (name, found[name], _Annotated())
        return _bind, ()

    def _is_small(self, value: object) -> bool:
        """Can it travel, in so many bytes?"""
        pickler = type(self)(self._namespace)
        try:
            pickler.dump(value, _Limited())
        except Exception:
            return False
        return not getattr(pickler, "buffers", ())


class _Limited:
    """Takes what is not long."""

    def __init__(self) -> None:
        self._length = 0

    def write(self, data: bytes, /) -> None:
        self._length += len(data)
        if self._length > _LONG:
            raise OverflowError


class WithAnnotated:
    """Variables as they are pickled, ``by_name``, and behind them those that only annotations of theirs name."""

    def __init__(self, variables: Mapping[str, object], by_name: object) -> None:
        self.variables, self.by_name = variables, by_name


class _Annotated:
    """Stands for those in the stream. There they are in each other: pickle's recursion must not go too deep."""


_MOST = 200
_LONG = 1_000_000  # bytes


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
    """Reduce a cached property, which before Python 3.12 has a lock that is nobody's state."""
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


def _first(obj: Any, _: object) -> Any:
    return obj


def _bind(name: str = "", value: object = None, _: object = None) -> None:
    if name:
        _current.namespace[name] = value


def _loaded_into() -> dict[str, Any]:
    return _current.namespace  # type: ignore[no-any-return]


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill(cell: types.CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents
