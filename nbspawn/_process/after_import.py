"""Calls a function as soon as a module has been imported: at once if it has been already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action()`` as soon as the module ``name`` has been imported. Costs nothing until then."""
    if name in sys.modules:
        action()
        return
    _waiting.setdefault(name, []).append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Has the other finders find the module, and wraps the loader that they return."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(name, path, target) if finder is not self else None
            if found is not None:
                if found.loader is not None:
                    _run_actions_after(found.loader, name)
                return found
        return None


def _run_actions_after(loader: Loader, name: str) -> None:
    # Wraps the loader's own method: inspect and importlib.resources depend on the loader's class.
    run: Any = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        vars(loader).pop("exec_module", None)
        for action in _waiting.pop(name, ()):
            action()

    loader.exec_module = exec_module  # type: ignore[method-assign]
