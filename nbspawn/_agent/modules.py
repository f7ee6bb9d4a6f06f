"""The user's own modules on this node: where they are the kernel's, from there; else from what the kernel has sent."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress

from nbspawn._engine.kernel.directories import OwnedDirectory
from nbspawn._protocol.agents import Folder


class Modules:
    """The folders that ranks have in ``sys.path``. The first is the kernel's current directory."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._sent: OwnedDirectory | None = None
        self._made = 0
        self.sent_from: dict[str, str] = {}
        """By the folder that was sent, the kernel's."""
        self._packages: dict[str, str] = {}
        """Folders with packages that the host does not have, by what they are for."""

    def use(self, folders: Sequence[Folder]) -> list[bool]:
        """Have these in ``sys.path``, and work in the first. Returns which have to be sent: those that are not here, or
        with other files. Raises OSError."""
        sys.path[:] = [path for path in sys.path if path not in self._paths]
        self._paths.clear()
        own = [next(filter(_is_open, map(os.path.expanduser, folder.places)), "") for folder in folders]
        wanted = [self._is_wanted(path, folder) for path, folder in zip(own, folders, strict=True)]
        for path, folder, is_wanted in zip(own, folders, wanted, strict=True):
            self._paths.append(self._new_folder() if is_wanted else path)
            if is_wanted and folder.places:
                self.sent_from[self._paths[-1]] = folder.places[0]
            if is_wanted and folder.without:
                self._packages[folder.without] = self._paths[-1]
                # The importer has a path of its own.
                os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], self._paths[-1]])
        sys.path[1:1] = filter(None, self._paths)
        os.chdir(own[0] or self._paths[0])
        return wanted

    def _is_wanted(self, path: str, folder: Folder) -> bool:
        if folder.without:
            return folder.without not in self._packages and importlib.util.find_spec(folder.without) is None
        return not (path and _has(path, folder))

    def _new_folder(self) -> str:
        if self._sent is None:
            self._sent = OwnedDirectory("modules")
        self._made += 1
        path = self._sent.path / str(self._made)
        path.mkdir()
        return os.fspath(path)

    def write(self, files: Mapping[int, Mapping[str, bytes | None]]) -> None:
        """Write these files' texts, compressed (None: remove the file), by the number of the folder and their paths in
        it. Raises OSError."""
        for number, texts in files.items():
            for name, text in texts.items():
                path = os.path.join(self._paths[number], name)
                if text is None:
                    with suppress(FileNotFoundError):
                        os.unlink(path)
                    continue
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(zlib.decompress(text))

    def remove(self) -> None:
        """Remove what was sent."""
        if self._sent is not None:
            self._sent.remove()


def _is_open(path: str) -> bool:
    """Is this a directory that may be used? At that path, another user may have one."""
    return os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK)


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
