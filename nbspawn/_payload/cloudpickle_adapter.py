"""cloudpickle, as far as nbspawn changes it or uses names that it does not document (docs/private_names.md).

Each function imports it only when it is called: a kernel that has packed nothing yet does without.
"""

from __future__ import annotations

import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

Reducer = Callable[[Any], Any]
"""Gives what ``__reduce__`` gives, or NotImplemented to leave the object to its own ``__reduce__``."""


_FILENAME = 10
"""Its place among the arguments of types.CodeType, in all versions of Python."""


class Sink(Protocol):
    """Takes the stream, piece by piece."""

    def write(self, data: bytes, /) -> object: ...


def make_pickler(
    sink: Sink, keep_in_band: Callable[[pickle.PickleBuffer], bool], choose: Callable[[type], Reducer | None]
) -> Any:
    """A pickler that asks ``choose`` once for each type how its objects are reduced; of None, their own ``__reduce__``
    decides. ``keep_in_band`` is pickle's ``buffer_callback``."""
    return _pickler_class()(sink, keep_in_band, choose)


@functools.cache
def _pickler_class() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(
            self,
            sink: Sink,
            keep_in_band: Callable[[pickle.PickleBuffer], bool],
            choose: Callable[[type], Reducer | None],
        ) -> None:
            super().__init__(sink, protocol=5, buffer_callback=keep_in_band)
            self._choose = choose
            self._reducers: dict[type, Reducer | None] = {}

        def dump(self, obj: object) -> None:
            try:
                super().dump(obj)
            finally:
                self._reducers.clear()  # they may lead back to this pickler, whose memo has all that was pickled

        def reducer_override(self, obj: Any) -> Any:
            # Called for every object but the plainest: one look-up must do for types with nothing special about them.
            kind = type(obj)
            try:
                reducer = self._reducers[kind]
            except KeyError:
                reducer = self._reducers[kind] = self._choose(kind)
            return NotImplemented if reducer is None else reducer(obj)

        def reduce_by_default(self, obj: Any) -> Any:
            """Reduce as cloudpickle does: functions and classes by value where they cannot be imported."""
            return super().reducer_override(obj)

        def reduce_function(self, function: Any, by_value: bool) -> Any:
            """Reduce a function with the closure's cells as they are: functions that share one go on sharing it, where
            cloudpickle gives each a copy. ``by_value``: even if it could be imported."""
            if not by_value and (function.__closure__ is None or is_pickled_by_name(function)):
                return super().reducer_override(function)
            if function.__closure__ is None:
                return self._dynamic_function_reduce(function)
            make, (*args, _), (attributes, slots), *rest = self._dynamic_function_reduce(function)
            return make, (*args, function.__closure__), (attributes, {**slots, "__closure__": None}), *rest

        def replace_globals(self, namespace: dict[str, Any], stand_in: object) -> None:
            """Have functions whose globals are ``namespace`` refer to ``stand_in``, not to a copy of what they use."""
            self.globals_ref[id(namespace)] = stand_in

    return Pickler


def reduce_code(code: types.CodeType) -> Any:
    """Reduce with the name of the cell or file that it comes from, which cloudpickle 3.1.3 leaves out: tracebacks and
    breakpoints go by it."""
    import cloudpickle

    make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    # Not the string itself: who else refers to it would show in the stream, of which digests are made.
    return make, (*args[:_FILENAME], "".join(code.co_filename), *args[_FILENAME + 1 :])


def pickle_by_value(module: str) -> list[str]:
    """Have what is in this module travel by value, until ``pickle_by_name`` is given what this returns."""
    import cloudpickle

    if module in cloudpickle.list_registry_pickle_by_value():
        return []
    cloudpickle.register_pickle_by_value(sys.modules[module])
    return [module]


def pickle_by_name(modules: Iterable[str]) -> None:
    """What is in these modules is found by its name again."""
    import cloudpickle

    for module in modules:
        cloudpickle.unregister_pickle_by_value(sys.modules[module])


def has_reducer(kind: type) -> bool:
    """Is it registered how objects of this type are pickled?"""
    import cloudpickle

    return kind in cloudpickle.Pickler.dispatch_table


def is_pickled_by_name(cls: Any) -> bool:
    """Can another process import this class or function?"""
    from cloudpickle import cloudpickle

    return bool(cloudpickle._should_pickle_by_reference(cls))


def make_class_id(cls: type) -> str:
    """The id by which a process knows a class that was pickled by value; made if the class has none."""
    from cloudpickle import cloudpickle

    found: str = cloudpickle._get_or_create_tracker_id(cls)
    return found


def class_id(cls: type) -> str | None:
    """The id of a class as ``make_class_id`` gives it, or None if it has none."""
    from cloudpickle import cloudpickle

    found: str | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    return found


def set_class_id(cls: type, make: Callable[[], str]) -> None:
    """Give the class the id that ``make`` returns. Meanwhile it has an empty one, as part of what ``make`` pickles."""
    from cloudpickle import cloudpickle

    ids = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    ids[cls] = ""
    try:
        ids[cls] = make()
    except BaseException:
        del ids[cls]
        raise
    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[ids[cls]] = cls


def remember_class(cls: Any, wanted: str) -> Any:
    """Give the class this id, unless another class of this process has it: gives the one that has it."""
    from cloudpickle import cloudpickle

    return cloudpickle._lookup_class_or_track(wanted, cls)


def class_with_id(wanted: str) -> Any:
    """This process's class of that id, if it has one."""
    from cloudpickle import cloudpickle

    found: Any = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(wanted)
    return found


def classes_by_id() -> dict[str, type]:
    """All classes of this process that have an id."""
    from cloudpickle import cloudpickle

    return dict(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.items())
