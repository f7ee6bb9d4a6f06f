"""Source files of the user's that are edited while ranks live: their versions, and which modules follow them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

Version = tuple[float, int]
"""When the file was changed, and its bytes. Two of them are equal or not; which is later is never asked: file systems
and hosts have clocks of their own."""


class Reload(NamedTuple):
    """Which of the user's modules to load again before the command: those whose files are not of the rank's versions
    but of these ``versions``: the modules of these ``names`` ``alone``, or all but them."""

    names: frozenset[str] = frozenset()
    alone: bool = False
    versions: Mapping[str, Version] = {}

    def applies_to(self, module: str) -> bool:
        """Is the module of that name one of them?"""
        return (module in self.names) is self.alone


def versions(paths: Iterable[str]) -> dict[str, Version]:
    """The versions that the files have now. One that is not there (its editor may be about to rename a new one) has
    none."""
    found = {}
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            found[path] = (status.st_mtime, status.st_size)
    return found
