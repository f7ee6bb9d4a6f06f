"""IPython's autoreload in a rank: what exists of a function, a class or a module follows its new definition.

The rules are IPython's: the old function gets the new one's code, the old class the new one's methods, and instances
become the new class's. Where one of them fails, the rest still holds: a function cannot take code that uses another
number of variables from around it (``super()`` is one), nor an object another layout.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbspawn._rank.program import exiting, process


def _imported() -> Any:
    """IPython 7 takes ``reload`` from ``imp``, which Python 3.12 has no longer."""
    imp = sys.modules.setdefault("imp", importlib)
    try:
        from IPython.extensions import autoreload
    finally:
        if imp is importlib:
            del sys.modules["imp"]
    return autoreload


autoreload = _imported()

_before: dict[tuple[str, str], list[Any]] = {}
"""autoreload's memory of what modules have defined: weak references."""


def load_again(module: types.ModuleType, execute: Callable[[types.ModuleType], types.ModuleType]) -> None:
    """``execute`` the module's new code in its emptied namespace, and have what exists of the old follow."""
    autoreload.superreload(module, execute, _before)


def follow(old: Any, new: Any) -> None:
    """Have what exists of ``old`` follow if ``new`` is another definition of the same function or class of a cell."""
    if old is new or not (_is_definition(old) and _is_definition(new)):
        return
    if (type(old), old.__qualname__) == (type(new), new.__qualname__):
        autoreload.update_generic(old, new)


def _is_definition(value: Any) -> bool:
    """Is it one of a cell's? A library's own function, bound to a name of the user's, must not be changed."""
    kind = type(value)  # not isinstance, which asks a proxy for its class
    return issubclass(kind, (types.FunctionType, type)) and value.__module__ == "__main__"


def _update_class(old: type, new: type) -> None:
    """IPython's rule makes instances the new class's. So must be what is derived from the old one, and what has
    imported it by name: ``isinstance`` would not hold."""
    if process.forked_from_notebook:
        exiting.unfreeze()  # get_referrers, by which instances are found, passes over what is frozen
    try:
        autoreload.update_class(old, new)
        derived: type
        for derived in type.__subclasses__(old):
            derived.__bases__ = tuple(new if base is old else base for base in derived.__bases__)
    except Exception as error:
        _tell(f"Objects of the old {old.__qualname__} stay as they are: {error}")
        return
    for holder in gc.get_referrers(old):
        if type(holder) is dict and _is_of_module(holder):
            holder.update({name: new for name, value in holder.items() if value is old})


@functools.cache
def _tell(text: str) -> None:
    """Once: autoreload remembers what it meets twice."""
    print(text, file=sys.stderr)


def _is_of_module(namespace: dict[Any, Any]) -> bool:
    module = sys.modules.get(str(namespace.get("__name__")))
    return module is not None and getattr(module, "__dict__", None) is namespace


def _update_where_possible(update: Callable[[Any, Any], object], old: Any, new: Any) -> None:
    with suppress(ValueError):
        update(old, new)


autoreload.UPDATE_RULES[:] = [
    (applies, _update_class if update is autoreload.update_class else functools.partial(_update_where_possible, update))
    for applies, update in autoreload.UPDATE_RULES
]
