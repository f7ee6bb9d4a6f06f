"""The user's own modules, for hosts that do not have this machine's files: which there are, and what has changed."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nbspawn._engine.cluster import sent_packages
from nbspawn._protocol.agents import Folder
from nbspawn._protocol.edits import Version

MOST_FILES, MOST_BYTES = 2_000, 16_000_000
"""Of all folders together."""
_MOST_ENTRIES = 20_000
"""Of all kinds, in one folder and below: to look at so many takes 0.1 s before each command."""
_NOT = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist"})
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
"""What a folder with an environment's packages has."""

Texts = dict[str, bytes | None]
"""Of files by their paths in a folder, compressed; None for one that is to be removed."""


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

    def changed(self) -> dict[int, Texts] | None:
        """The files that have changed since then, by the number of the folder; None if there are other folders."""
        now, before = self._look(), self.versions
        if list(now) != list(before):
            return None
        found: dict[int, Texts] = {}
        for number, (folder, files) in enumerate(before.items()):
            texts: Texts = dict.fromkeys(files.keys() - now[folder].keys())
            for path, version in now[folder].items():
                if files.get(path) != version:
                    texts[path] = _compressed(folder / path)
            if texts:
                found[number] = texts
        self.versions = now
        return found

    def contents(self, number: int) -> Texts:
        """The texts of all files of a folder."""
        if number == len(self.versions):
            return {path: zlib.compress(text) for path, text in sent_packages.shell().items()}
        folder, files = list(self.versions.items())[number]
        return {path: _compressed(folder / path) for path in files}

    def is_wanted(self, number: int) -> bool:
        """Does any node want this folder?"""
        return any(wants[number] for wants in self.wanted.values())

    def has_of_its_own(self, node: int, files: Mapping[int, Texts]) -> str:
        """The path of one of these files that the node has itself; '' if it has none."""
        wanted = self.wanted[node]
        return next((path for number, texts in files.items() if not wanted[number] for path in texts), "")

    def _look(self) -> dict[Path, dict[str, Version]]:
        """What there is; of a folder that has too much only what this process has imported."""
        found: dict[Path, dict[str, Version]] = {}
        count = size = 0
        for folder in _folders():
            files: dict[str, Version] = {}
            more = 0
            for path, version in _files(folder):
                files[path], more = version, more + version[1]
                if not path or count + len(files) > MOST_FILES or size + more > MOST_BYTES:
                    files = _imported(folder)
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
    """Those to look in."""
    paths = [os.getcwd(), *(os.path.abspath(path) for path in sys.path if path and not _installed(path))]
    return [Path(path) for path in dict.fromkeys(paths) if os.path.isdir(path)]


_PREFIXES = frozenset({sys.prefix, sys.base_prefix, sys.exec_prefix})


def _installed(path: str) -> bool:
    return not _NOT.isdisjoint(Path(path).parts) or any(Path(path).is_relative_to(prefix) for prefix in _PREFIXES)


def _imported(folder: Path) -> dict[str, Version]:
    files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    found = {}
    for file in files:
        if file.suffix == ".py" and file.is_relative_to(folder) and not _installed(os.fspath(file)):
            with suppress(OSError):  # it was deleted
                status = file.stat()
                found[file.relative_to(folder).as_posix()] = status.st_mtime, status.st_size
    return found


def _files(folder: Path) -> Iterator[tuple[str, Version]]:
    """The paths, and versions; '' if there is too much to look at."""
    seen = set()  # a link may lead upwards
    count = 0
    below = [""]
    while below:
        inside = below.pop()
        try:
            entries = list(os.scandir(folder / inside))
        except OSError:
            continue
        real = os.path.realpath(folder / inside)
        if real in seen or (inside and real in _PREFIXES) or any(entry.name in _ENVIRONMENTS for entry in entries):
            continue
        seen.add(real)
        count += len(entries)
        if count > _MOST_ENTRIES:
            yield "", (0.0, 0)
            return
        for entry in entries:
            path = f"{inside}/{entry.name}".lstrip("/")
            with suppress(OSError):
                if entry.name.endswith(".py") and entry.is_file() and os.access(entry, os.R_OK):
                    yield path, (entry.stat().st_mtime, entry.stat().st_size)
                elif entry.name not in _NOT and not entry.name.startswith(".") and entry.is_dir():
                    below.append(path)


def _compressed(path: Path) -> bytes | None:
    text = _read(path)
    return None if text is None else zlib.compress(text)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # it was deleted
        return None


def _digest(path: Path) -> bytes:
    return hashlib.sha256(_read(path) or b"").digest()
