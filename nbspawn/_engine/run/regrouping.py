"""Has kept ranks make anew what they share, after a command in which they may have made different calls."""

from __future__ import annotations

import os

from nbspawn._engine.kernel import descriptors
from nbspawn._protocol import shared_memory
from nbspawn._protocol.messages import Regroup


class Regrouping:
    """Has the ranks of one run make their process groups again. ``grouped``: have they one of ``--backend``, too?"""

    def __init__(self, grouped: bool) -> None:
        self.grouped = grouped
        self._count = 0
        self._store = -1

    def next(self) -> Regroup:
        """The command for all ranks. Raises OSError if there is no place for the store at which they meet."""
        self._count += 1
        if self.grouped and self._store < 0:
            self._store = descriptors.close_after_fork(shared_memory.anonymous_file())
        return Regroup(self._count, self.grouped, f"/proc/{os.getpid()}/fd/{self._store}" if self.grouped else "")

    def close(self) -> None:
        """Give the store back."""
        if self._store >= 0:
            descriptors.close(self._store)
            self._store = -1
