"""The user's own modules on this node: where they are the kernel's, from there; else from what the kernel has sent."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Mapping, Sequence

from nbspawn._engine.kernel.directories import OwnedDirectory
from nbspawn._protocol.agents import Folder


class Modules:
    """The folders that ranks have in ``sys.path``. The first is the kernel's current directory."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._sent: OwnedDirectory | None = None

    def use(self, folders: Sequence[Folder]) -> list[bool]:
        """Have these in ``sys.path``, and work in the first. Returns which have to be sent: those that are not here, or
        with other files."""
        self._remove_paths()
        own = [next(filter(os.path.isdir, map(os.path.expanduser, folder.places)), "") for folder in folders]
        wanted = [_is_wanted(path, folder) for path, folder in zip(own, folders, strict=True)]
        if any(wanted) and self._sent is None:
            self._sent = OwnedDirectory("modules")
        for number, (path, is_wanted) in enumerate(zip(own, wanted, strict=True)):
            self._paths.append(self._folder(number) if is_wanted else path)
            if is_wanted and folders[number].without:  # the importer's path is not this process's
                os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], self._paths[-1]])
        sys.path[1:1] = filter(None, self._paths)
        os.chdir(own[0] or self._paths[0])
        return wanted

    def _folder(self, number: int) -> str:
        assert self._sent is not None
        path = self._sent.path / str(number)
        path.mkdir(exist_ok=True)
        return os.fspath(path)

    def write(self, files: Mapping[int, Mapping[str, bytes]]) -> bool:
        """Write these files' texts, compressed, by the number of the folder and their paths in it."""
        for number, texts in files.items():
            for name, text in texts.items():
                path = os.path.join(self._paths[number], name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(zlib.decompress(text))
        return True

    def remove(self) -> None:
        """Remove what was sent."""
        self._remove_paths()
        if self._sent is not None:
            self._sent.remove()

    def _remove_paths(self) -> None:
        sys.path[:] = [path for path in sys.path if path not in self._paths]
        self._paths.clear()


def _is_wanted(path: str, folder: Folder) -> bool:
    return importlib.util.find_spec(folder.without) is None if folder.without else not (path and _has(path, folder))


def _has(path: str, folder: Folder) -> bool:
    """Has this directory the folder's files?"""
    for name, digest in folder.digests.items():
        try:
            with open(os.path.join(path, name), "rb") as file:
                if hashlib.sha256(file.read()).digest() != digest:
                    return False
        except OSError:
            return False
    return True
