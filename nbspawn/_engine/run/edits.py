"""Decides for all ranks of a machine which edits a command takes: in the one process that sends it to all of them.

Ranks tell which files of the user's they have loaded, and in which version. When a command is sent, the files are
looked at here, once, and the versions go along: each rank takes these and no others. Ranks that looked for themselves
would look at different moments, and a file that is saved meanwhile would be new in some of them.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Mapping
from dataclasses import replace

from nbspawn._protocol.edits import Version, versions
from nbspawn._protocol.messages import RunCell, RunFunction

_STILL = 0.02  # seconds: an editor that empties a file before it writes it has finished by then


class Edits:
    """``known`` are the files that ranks had loaded when they were started."""

    def __init__(self, known: Mapping[str, Version]) -> None:
        self._known = dict(known)
        self._edited: set[str] = set()
        """Those of which a rank may have another version. They stay here: others of the ranks run the next command."""

    def loaded(self, files: Mapping[str, Version]) -> None:
        """A rank has loaded these."""
        for path, version in files.items():
            if self._known.setdefault(path, version) != version:
                self._edited.add(path)

    def attach(self, commands: Mapping[int, RunCell | RunFunction]) -> Mapping[int, RunCell | RunFunction]:
        """The commands with the edits that each takes, if it takes any."""
        reload = next(iter(commands.values())).reload
        if reload is None or not (edited := self._look()):
            return commands
        taking = reload._replace(versions=edited)
        same = {id(command): replace(command, reload=taking) for command in commands.values()}
        return {rank: same[id(command)] for rank, command in commands.items()}

    def _look(self) -> dict[str, Version]:
        found = versions(self._known)
        changed = [version for path, version in found.items() if version != self._known[path]]
        if changed and time.time() - max(changed)[0] < _STILL:
            time.sleep(_STILL)
            found = versions(self._known)
        for path, version in found.items():
            if version != self._known[path]:
                self._edited.add(path)
                linecache.checkcache(path)  # views show lines of it
        self._known.update(found)
        return {path: self._known[path] for path in self._edited}
