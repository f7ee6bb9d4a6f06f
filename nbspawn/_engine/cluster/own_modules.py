"""The user's own modules, for hosts that do not have this machine's files: which there are, and what has changed."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nbspawn._engine.cluster import sent_packages
from nbspawn._protocol.agents import Folder
from nbspawn._protocol.edits import Version

MOST_FILES, MOST_BYTES = 2_000, 16_000_000
"""Of all folders together."""
_NOT = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist"})
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
"""What a folder with an environment's packages has."""


@dataclass
class OwnModules:
    """The ``.py`` files below the current directory and the other folders in ``sys.path`` that hold no installed
    packages."""

    versions: dict[Path, dict[str, Version]] = field(default_factory=dict)
    """Of the files that were read last, by their folders and their paths below those."""
    wanted: dict[int, list[bool]] = field(default_factory=dict)
    """Which of the folders each node lacks, or has with other files."""

    def folders(self) -> list[Folder]:
        """All of them, as they are now; the last one is IPython's."""
        self.versions = self._look()
        own = [
            Folder(_both(os.fspath(folder)), {path: _digest(folder / path) for path in files})
            for folder, files in self.versions.items()
        ]
        return [*own, Folder((), {}, "IPython")]

    def changed(self) -> dict[int, dict[str, bytes]] | None:
        """The files that have changed since then, by the number of the folder; None if there are other folders."""
        now, before = self._look(), self.versions
        if list(now) != list(before):
            return None
        found = {}
        for number, (folder, files) in enumerate(before.items()):
            other = [path for path, version in now[folder].items() if files.get(path) != version]
            if other:
                found[number] = self.contents(number, other)
                files.update({path: now[folder][path] for path in other})
        return found

    def contents(self, number: int, paths: list[str] | None = None) -> dict[str, bytes]:
        """The texts, compressed, of these files of a folder, or of all."""
        if number == len(self.versions):
            return {path: zlib.compress(text) for path, text in sent_packages.shell().items()}
        folder, files = list(self.versions.items())[number]
        return {path: zlib.compress(_read(folder / path)) for path in (files if paths is None else paths)}

    def _look(self) -> dict[Path, dict[str, Version]]:
        """What there is; of a folder that has too much only what this process has imported."""
        imported = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
        found: dict[Path, dict[str, Version]] = {}
        count = size = 0
        for folder in _folders():
            files: dict[str, Version] = {}
            more = 0
            for path, version in _files(folder, ""):
                files[path], more = version, more + version[1]
                if count + len(files) > MOST_FILES or size + more > MOST_BYTES:
                    inside = [path for path in imported if path.suffix == ".py" and path.is_relative_to(folder)]
                    files = {path.relative_to(folder).as_posix(): _version(path) for path in inside}
                    break
            count += len(files)
            size += sum(size for _, size in files.values())
            found[folder] = files
        return found


def _both(path: str) -> tuple[str, ...]:
    """Where a path of this machine may be on another one: there, or at the same place below the home directory."""
    home = os.path.expanduser("~")
    return (path, "~" + path[len(home) :]) if path.startswith(home + "/") else (path,)


def _folders() -> list[Path]:
    """Those to look in; one that is inside another one is not looked in twice."""
    paths = [os.getcwd(), *(os.path.abspath(path) for path in sys.path if path and not _installed(path))]
    return [Path(path) for path in dict.fromkeys(paths) if os.path.isdir(path)]


def _installed(path: str) -> bool:
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return not _NOT.isdisjoint(Path(path).parts) or any(Path(path).is_relative_to(prefix) for prefix in prefixes)


def _files(folder: Path, below: str) -> Iterator[tuple[str, Version]]:
    try:
        entries = list(os.scandir(folder / below))
    except OSError:
        return
    if any(entry.name in _ENVIRONMENTS for entry in entries):
        return
    for entry in entries:
        path = f"{below}/{entry.name}".lstrip("/")
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _NOT and not entry.name.startswith("."):
                yield from _files(folder, path)
        elif entry.name.endswith(".py") and entry.is_file():
            status = entry.stat()
            yield path, (status.st_mtime, status.st_size)


def _version(path: Path) -> Version:
    status = path.stat()
    return status.st_mtime, status.st_size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it was deleted
        return b""


def _digest(path: Path) -> bytes:
    return hashlib.sha256(_read(path)).digest()
