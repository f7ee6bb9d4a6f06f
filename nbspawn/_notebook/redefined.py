"""The newest definition of a function: a notebook's cell that defines it may be edited and run again."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


class Redefined:
    """``fn`` is followed by its name in its module, if it is what that name means now."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.current = fn
        self._followed = self._find() is fn

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.current, "__name__", "the function")

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters."""
        return list(inspect.signature(self.current).parameters)

    def update(self) -> None:
        """Take the newest definition."""
        found = self._find()
        if self._followed and callable(found):
            self.current = found

    def _find(self) -> Any:
        module = sys.modules.get(getattr(self.current, "__module__", None) or "")
        try:
            return functools.reduce(getattr, self.current.__qualname__.split("."), module)
        except AttributeError:
            return None
