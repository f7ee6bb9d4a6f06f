"""What the notebook has put in place of a library's own (_carried/replaced.py), and what was there before.

``original = np.mean; np.mean = lambda x: original(x) + 1``: by its name pickle would refuse the original, or find the
replacement, which would call itself. And a replacement made with ``functools.wraps`` has the name of the original.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from contextlib import suppress
from typing import Any

replaced: set[str] = set()
"""What was set, here or in the kernel: 'numpy:mean'."""
_kept: dict[str, Any] = {}
"""By such a name: what was there before, as far as it is known."""


def reduce(obj: Any) -> Any:
    """How an original is pickled; NotImplemented for anything else."""
    if not (key := _name_of_original(obj)):
        return NotImplemented
    _kept[key] = obj
    return _original, tuple(key.split(":"))


def is_wrapper(function: Any) -> bool:
    """Has it only taken the name of what was replaced?"""
    return f"{function.__module__}:{function.__qualname__}" in replaced and not _is_of_its_module(function)


def is_its_own(key: str, value: Any) -> bool:
    """Is it what the module has under this name by itself?"""
    with suppress(Exception):
        return f"{value.__module__}:{value.__qualname__}" == key and not is_wrapper(value)
    return False


def _name_of_original(obj: Any) -> str:
    with suppress(Exception):  # an object may refuse to be asked
        module, name = obj.__module__, getattr(obj, "__qualname__", None) or obj.__name__
        key = f"{module}:{name}"
        if key in replaced and attribute(module, name) is not obj and _is_of_its_module(obj):
            return key
    return ""


def _is_of_its_module(obj: Any) -> bool:
    """Is it of the module that it names? A wrapper has another's name."""
    if isinstance(obj, types.FunctionType):
        return obj.__globals__ is vars(sys.modules[obj.__module__])
    return not isinstance(obj, type(functools.lru_cache(len)))


def keep(module: str, name: str) -> None:
    """In a rank: keep an attribute before it is replaced."""
    with suppress(AttributeError, KeyError):
        _kept.setdefault(f"{module}:{name}", attribute(module, name))


def attribute(module: str, name: str) -> Any:
    """An attribute of an imported module; ``name`` may lead through classes. Raises AttributeError or KeyError."""
    return operator.attrgetter(name)(sys.modules[module])


def _original(module: str, name: str) -> Any:
    __import__(module)
    key = f"{module}:{name}"
    if key not in replaced:
        return attribute(module, name)
    if key not in _kept:  # in the kernel, and in a rank that was forked from it: a variable still has it
        for value in list(vars(sys.modules["__main__"]).values()):
            if _name_of_original(value) == key:
                return value
        raise AttributeError(f"what {module}.{name} was before the notebook replaced it is not known here")
    return _kept[key]
