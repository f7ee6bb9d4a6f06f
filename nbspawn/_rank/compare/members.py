"""What an object is made of, by the names that a user writes behind it: keys, attributes, a function's code."""

from __future__ import annotations

import collections
import copyreg
import enum
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of a class that is written in Python


def named_by(key: Any, number: int) -> str:
    """A key of a dict; of one without a plain repr, its number."""
    if isinstance(key, enum.Enum):
        return f"{type(key).__name__}.{member(key)}"
    return repr(key) if is_plain(key) else f"<{type(key).__name__} {number}>"


def member(value: enum.Enum) -> object:
    """The name of a member; of flags that have none together, their number."""
    return value.value if value.name is None else value.name


def numbered(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The items, each under a name of its own: keys may be written alike (two NaN), and so may columns."""
    seen: dict[str, int] = {}
    for name, value in items:
        seen[name] = seen.get(name, 0) + 1
        yield (f"{name} ({seen[name]})" if seen[name] > 1 else name), value


def is_plain(key: Any) -> bool:
    """Does a key's text say all of it?"""
    plain = (str, int, float, bool, bytes, type(None), enum.Enum)
    return isinstance(key, plain) or (isinstance(key, tuple) and all(isinstance(part, plain) for part in key))


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes, those too that are under their names among its items: in another rank they may not be."""
    named = dict(getattr(value, "__dict__", {}))
    named |= {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    if type(value) is collections.OrderedDict:
        named.pop("_metadata", None)  # of a state dict: the versions of its modules' classes
    if isinstance(value, collections.defaultdict):
        named["default_factory"] = value.default_factory
    for name, attribute in named.items():
        yield f".{name}", attribute


def _slots(kind: type) -> list[str]:
    """The names of a class's attributes that are not in the ``__dict__``."""
    return [
        name
        for base in kind.__mro__
        for name, attribute in vars(base).items()
        if isinstance(attribute, types.MemberDescriptorType) and base.__flags__ & _HEAP_TYPE
    ]


def has_no_other_state(kind: type) -> bool:
    """Is an object's state in its attributes? A class that is written in C (functools.partial) says by its own
    ``__reduce__`` what else it has."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")  # the last is object's from Python 3.11 on
    own = all(getattr(kind, name, None) is getattr(object, name, None) for name in names)
    return own and kind not in copyreg.dispatch_table and (kind.__dictoffset__ != 0 or bool(_slots(kind)))


def contents_of(code: types.CodeType) -> tuple[Any, ...]:
    """What a function does, in whichever file and line."""
    constants = [contents_of(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
    signature = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    caught = getattr(code, "co_exceptiontable", b"")  # from Python 3.11 on
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants, signature, caught


def is_importable(function: types.FunctionType) -> bool:
    """Is it to be found under its name, in a module that every rank has?"""
    module = sys.modules.get(function.__module__)
    return function.__module__ != "__main__" and getattr(module, function.__qualname__, None) is function


def is_bound(cell: types.CellType) -> bool:
    """Has the variable of this closure a value?"""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
