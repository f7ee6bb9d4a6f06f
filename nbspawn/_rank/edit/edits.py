"""The user's modules in a rank: which version of its file each was loaded from, and how it follows an edit.

Which edits are taken is the engine's decision (_engine/run/edits.py). A module that cannot be loaded again is tried
again before each command until an edit repairs it: its rank would otherwise run cells with other code than its peers.
"""

from __future__ import annotations

import linecache
import sys
import types
from importlib.machinery import SourceFileLoader
from typing import Any

from nbspawn._process.imports import is_own, source_modules
from nbspawn._protocol.edits import Reload, Version, versions

NOT_RUN = "The rank ran nothing: an edited module could not be loaded again. The next cell tries it once more."


class OwnModules:
    """Records what is imported from files of the user's, from ``watch`` on."""

    def __init__(self) -> None:
        self._loaded: dict[str, Version] = {}
        self._fresh: dict[str, Version] = {}

    def watch(self) -> None:
        """Begin. Python asks ``path_stats`` for a file's version just before it reads it."""
        ask = SourceFileLoader.path_stats

        def path_stats(loader: SourceFileLoader, path: str) -> Any:
            stats = ask(loader, path)
            if is_own(path):
                self._loaded[path] = self._fresh[path] = (stats["mtime"], stats["size"])
            return stats

        SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign, assignment]

    def take(self) -> dict[str, Version]:
        """What has been loaded since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def follow(self, reload: Reload) -> Exception | None:
        """Load the edited modules again. Returns what the first that cannot be has raised."""
        edited = {path: version for path, version in reload.versions.items() if self._loaded.get(path) != version}
        if not edited:
            return None
        found = [(module, path) for module, path in source_modules() if path in edited]
        imported = {path for _, path in found}
        self._loaded.update({path: version for path, version in edited.items() if path not in imported})
        left = [(module, path) for module, path in found if reload.applies_to(module.__name__)]
        while left:
            failed: list[tuple[types.ModuleType, str]] = []
            first: Exception | None = None
            for module, path in left:
                try:
                    _load_again(module, path, edited[path])
                    self._loaded[path] = edited[path]
                except Exception as error:
                    first = first or error.with_traceback(_below(path, error.__traceback__))
                    failed.append((module, path))
            if len(failed) == len(left):
                return first
            left = failed  # one may need a new name of another that has been loaded by now
        return None


_MADE_BY_IMPORT = ("__file__", "__cached__", "__package__", "__path__", "__spec__")


def _load_again(module: types.ModuleType, path: str, version: Version) -> None:
    from nbspawn._rank.edit import autoreload

    with open(path, "rb") as file:
        source = file.read()
    if versions([path]) != {path: version}:
        raise RuntimeError(
            f"{path} was written once more while the command was on its way: ranks may have read different text of it"
        )
    # Not by importlib.reload: it takes a compiled file for current if that is of a source of this second and this size.
    code = module.__spec__.loader.source_to_code(source, path)  # type: ignore[union-attr]
    linecache.checkcache(path)
    before = dict(vars(module))
    stays = {name for name in before if name in _MADE_BY_IMPORT or _is_part(name, module)}

    def execute(emptied: types.ModuleType) -> types.ModuleType:
        namespace = vars(emptied)
        namespace.update({name: before[name] for name in stays})
        try:
            exec(code, namespace)
        except BaseException:  # the user's Stop, too
            namespace.update(before)
            raise
        return emptied

    autoreload.load_again(module, execute)


def _is_part(name: str, package: types.ModuleType) -> bool:
    """Is it a submodule, which only the import of that has put there?"""
    return sys.modules.get(f"{package.__name__}.{name}") is vars(package)[name]


def _below(path: str, frames: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that begins in this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    return frames
