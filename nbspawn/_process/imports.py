"""What this process has imported: installed modules, which the fork server should preload for the next ranks, and the
user's own, which may be edited."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator

from nbspawn._protocol.edits import Version, versions
from nbspawn._protocol.frames import PACKAGE

_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES.add(PACKAGE)
_LIBRARY = re.compile(f"<|(?:{'|'.join(map(re.escape, _LIBRARIES))})/|.*/(?:site|dist)-packages/")


@functools.cache
def _places() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})


def installed(modules: Iterable[str]) -> list[str]:
    """The modules among these, which have been imported, that are in site-packages, in the given order.

    Editable installs are elsewhere and are left out, as all other code that the user may be editing: a fork server
    would keep the old code. The standard library is left out, too: it is imported by the modules that need it.
    """
    found = []
    for name in modules:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if isinstance(spec, importlib.machinery.ModuleSpec) and (spec.origin or "").startswith(_places()):
            found.append(name)
    return found


def is_library(file: str) -> bool:
    """Is the file installed, or no file at all ('<string>')? A cell of IPython 7 counts as a file."""
    return not file.startswith("<ipython-input") and _LIBRARY.match(file) is not None


def is_own(path: str) -> bool:
    """Is it a source file of the user's?"""
    return path.endswith(".py") and not is_library(path)


def is_installed(package: str) -> bool:
    """Is this package, imported or not, in site-packages?"""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a name with odd characters
        return False
    return spec is not None and (spec.origin or "").startswith(_places())


def source_modules() -> Iterator[tuple[types.ModuleType, str]]:
    """The modules of this process that can be loaded again, and their files."""
    for name, module in list(sys.modules.items()):
        # Not isinstance and getattr, by which a lazy module would begin its import.
        attributes = vars(module) if issubclass(type(module), types.ModuleType) else {}
        path, spec = attributes.get("__file__"), attributes.get("__spec__")
        if name != "__main__" and isinstance(path, str) and hasattr(getattr(spec, "loader", None), "source_to_code"):
            yield module, path


def own_files() -> dict[str, Version]:
    """The files of the user's that this process has imported, as they are now."""
    return versions(path for _, path in source_modules() if is_own(path))


class NewImports:
    """The modules that were imported since the last call of ``take``.

    ``sys.modules`` is in the order of the imports, and this module is moved to its end as a marker. An iteration over
    all of it would write each name's reference count, and so copy a megabyte of the fork server's memory into the rank
    (5 ms).
    """

    def __init__(self) -> None:
        sys.modules[__name__] = sys.modules.pop(__name__)

    def take(self) -> tuple[str, ...]:
        """The installed ones of these modules, in the order in which their imports began."""
        while True:
            try:
                fresh = list(itertools.takewhile(lambda name: name != __name__, reversed(sys.modules)))
                break
            except RuntimeError:  # another thread has imported something meanwhile
                pass
        sys.modules[__name__] = sys.modules.pop(__name__)
        return tuple(installed(reversed(fresh)))


class Preloaded:
    """The ``modules`` that the importer has imported in addition to torch, by its ``sys.path``."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        self._modules = frozenset(modules)
        self._packages = {name.partition(".")[0] for name in self._modules}
        self._path = tuple(sys.path)

    def forget_shadowed(self) -> None:
        """In a rank: remove those from ``sys.modules`` that the rank would import from elsewhere.

        A user's own ``datasets.py`` in the notebook's folder has precedence over an installed package of that name, as
        for a script. The importer, which does not have that folder on its path, has imported the package.
        """
        before = itertools.takewhile(lambda folder: f"{os.path.abspath(folder)}{os.sep}" not in _places(), sys.path)
        folders = [folder for folder in before if folder not in self._path] if self._modules else []
        shadowed = {
            name for folder in folders for name in _found_in(folder, self._packages) if not _lies_in(name, folder)
        }
        for name in self._modules if shadowed else ():
            if name.partition(".")[0] in shadowed:
                sys.modules.pop(name, None)


def _found_in(folder: str, names: set[str]) -> set[str]:
    try:
        with os.scandir(folder or ".") as entries:
            found = {entry.name.partition(".")[0]: entry for entry in entries if entry.name.partition(".")[0] in names}
    except OSError:  # not a folder: for example the standard library's zip file
        return set()
    ends = tuple(importlib.machinery.all_suffixes())
    return {
        name
        for name, entry in found.items()
        if entry.name.endswith(ends) or os.path.isfile(os.path.join(entry.path, "__init__.py"))
    }


def _lies_in(name: str, folder: str) -> bool:
    origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""
    return os.path.realpath(origin).startswith(os.path.realpath(folder) + os.sep)
