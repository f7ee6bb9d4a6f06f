"""What modules had before the notebook set their attributes (_rank/replaced.py): it travels by the name that it had.

``original = np.mean; np.mean = lambda x: original(x) + 1``: under the name there is something else now, and pickle
refuses, or, in the rank, would find the replacement, which would call itself.
"""

from __future__ import annotations

import operator
import sys
from contextlib import suppress
from typing import Any

from nbspawn._payload.cloudpickle_adapter import Reducer

replaced: set[str] = set()
"""In the kernel, what was set: 'numpy:mean'."""
_kept: dict[str, Any] = {}
"""In a rank, by such a name: what was there before."""


def or_else(reducer: Reducer | None) -> Reducer:
    """As this one, but for what was replaced."""

    def reduce(obj: Any) -> Any:
        with suppress(Exception):
            module, name = obj.__module__, getattr(obj, "__qualname__", None) or obj.__name__
            if f"{module}:{name}" in replaced and attribute(module, name) is not obj:
                return _original, (module, name)
        return NotImplemented if reducer is None else reducer(obj)

    return reduce


def keep(module: str, name: str) -> None:
    """In a rank, before it is replaced."""
    with suppress(AttributeError, KeyError):
        _kept.setdefault(f"{module}:{name}", attribute(module, name))


def attribute(module: str, name: str) -> Any:
    """Of an imported module; ``name`` may lead through classes. Raises AttributeError or KeyError."""
    return operator.attrgetter(name)(sys.modules[module])


def _original(module: str, name: str) -> Any:
    __import__(module)
    key = f"{module}:{name}"
    found = _kept[key] if key in _kept else attribute(module, name)
    if getattr(found, "__module__", "") == "__main__":  # a forked rank has inherited the replacement
        raise AttributeError(f"what {module}.{name} was before the notebook replaced it is not known here")
    return found
