"""Where a debugger of the kernel's front end waits for ranks: a unix socket in a private directory, while it is on."""

from __future__ import annotations

import atexit
import os

from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.directories import OwnedDirectory


class Door:
    """The socket's path. Ranks are told it when they start, whether or not a debugger is on: it may be, later."""

    def __init__(self) -> None:
        self._forget()
        descriptors.after_fork_in_child(self._forget)
        atexit.register(self.remove)

    def _forget(self) -> None:
        self.wanted = False
        """Is there a front end that has a debugger?"""
        self._directory: OwnedDirectory | None = None

    def path(self) -> str:
        """The socket's; '' where no front end has a debugger."""
        if not self.wanted:
            return ""
        if self._directory is None or not self._directory.exists():
            self._directory = OwnedDirectory("debugger")
        return os.fspath(self._directory.path / "ranks")

    def is_open(self) -> bool:
        """Is a debugger on?"""
        return self._directory is not None and (self._directory.path / "ranks").exists()

    def close(self) -> None:
        """It is off."""
        if self._directory is not None:
            (self._directory.path / "ranks").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory. There is no debugger any more."""
        self.wanted = False
        if self._directory is not None:
            self._directory.remove()
            self._directory = None


door = Door()
