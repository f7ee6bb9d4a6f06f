"""Does something right after a module has been imported: now if it has been, else whenever that comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action``, without arguments, as soon as the module ``name`` is there. Costs nothing until then."""
    if name in sys.modules:
        action()
        return
    _waiting.setdefault(name, []).append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Leaves finding to the others, and has the loader that they choose tell when it has run the module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(name, path, target) if finder is not self else None
            if found is not None:
                if found.loader is not None:
                    _tell(found.loader, name)
                return found
        return None


def _tell(loader: Loader, name: str) -> None:
    # On the loader itself: a loader of another class would be missed by inspect and importlib.resources.
    run: Any = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        vars(loader).pop("exec_module", None)
        for action in _waiting.pop(name, ()):
            action()

    loader.exec_module = exec_module  # type: ignore[method-assign]
