"""Does a new process find a module by its name? Not one that was loaded from its file, as pytest's
``--import-mode=importlib`` does, nor one whose directory is no longer in ``sys.path``. What comes by value from such a
module is in a module of that name here, if nobody finds another."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import sysconfig
from contextlib import suppress
from types import ModuleType
from typing import Any

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_importable(name: str) -> bool:
    """True as well for what has no source file, and for what there is no module of that name: others know better."""
    file = own_file(name)
    if not file:
        return True
    with suppress(OSError):  # a working directory that has been deleted
        return _is_found(name, file, tuple(sys.path), os.getcwd())
    return True


def own_file(name: str) -> str:
    """The source file of an imported module that is not installed, but the user's own; '' of any other."""
    file = getattr(sys.modules.get(name), "__file__", None)
    own = isinstance(file, str) and file.endswith(".py") and os.path.isabs(file) and not file.startswith(_LIBRARIES)
    return file if own else ""  # type: ignore[return-value]


@functools.lru_cache(1000)
def _is_found(name: str, file: str, *where: object) -> bool:
    spec = _spec(name)
    if spec is None or spec.origin is None:  # None: a directory of that name
        return False
    with suppress(OSError):
        return not os.path.exists(spec.origin) or os.path.samefile(spec.origin, file)
    return False


def _spec(name: str) -> Any:
    """What would be imported; ``importlib.util.find_spec`` says what has been."""
    package = name.rpartition(".")[0]
    path: Any = list(map(os.path.abspath, sys.path))  # of a relative entry, here is remembered what it once was
    if package:
        if not is_importable(package) or (found := _spec(package)) is None:
            return None
        loaded: Any = sys.modules.get(package)  # a package may change its path; pytest makes some without a file
        path = loaded.__path__ if getattr(loaded, "__file__", None) else found.submodule_search_locations
    for finder in sys.meta_path:
        if hasattr(finder, "find_spec") and (spec := finder.find_spec(name, path)) is not None:
            return spec
    return None


def add(module: str, name: str, value: object) -> None:
    """Note that something has come from this module."""
    if _came not in sys.meta_path:
        sys.meta_path.append(_came)
    _came.modules.setdefault(module, {})[name] = value
    if getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None) is _came:
        setattr(sys.modules[module], name, value)


class _Came(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of which something has come, after all others."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, object]] = {}

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Packages that it is in, too."""
        if any(f"{module}.".startswith(f"{fullname}.") for module in self.modules):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put into it what has come."""
        vars(module).update(self.modules.get(module.__name__, {}))


_came = _Came()
