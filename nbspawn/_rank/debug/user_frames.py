"""Which frames of the rank are the user's: those that the cell, or the function that ranks run, has called."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import FrameType

from nbspawn._process.imports import is_library
from nbspawn._protocol.frames import PACKAGE, RANK_MAIN
from nbspawn._protocol.messages import RunCell
from nbspawn._rank.program.info import RankInfo

_RANK = os.path.join(PACKAGE, "_rank", "")
_PACKAGE = os.path.join(PACKAGE, "")
_RUNS_CELLS = tuple(
    os.path.join(*path)
    for path in (
        ("IPython", "core", "interactiveshell.py"),
        ("IPython", "core", "async_helpers.py"),
        ("ipykernel", "zmqshell.py"),
    )
)


class UserFrames:
    """Tells the user's frames from others; ``info`` knows the notebook's cells."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info

    @property
    def cell(self) -> str | None:
        """The running cell's file name, if a cell runs."""
        command = self._info.command
        return command.filename if isinstance(command, RunCell) else None

    @property
    def names(self) -> Mapping[str, str]:
        """What IPython calls the notebook's cells, by file name."""
        return self._info.names

    def has(self, frame: FrameType) -> bool:
        """Is it the cell's code, or the function's that ranks run, or has that called it?"""
        calls = list(_calls(frame))
        if self.cell is not None:
            return any(called.f_code.co_filename in self.names for called in calls)
        caller = calls[-1].f_back if calls else None
        if caller is None or (caller.f_code.co_filename, caller.f_code.co_name) != (RANK_MAIN, "_run"):
            return False
        return not calls[-1].f_code.co_filename.startswith(_PACKAGE)

    def called(self, frame: FrameType) -> bool:
        """Has one of the user's frames led to this one?"""
        caller: FrameType | None = frame
        while caller is not None and not self.has(caller):
            caller = caller.f_back
        return caller is not None

    def innermost(self, frame: FrameType) -> FrameType:
        """The innermost frame that is not a library's, of those that led to this one; else this one."""
        for called in _calls(frame):
            if called.f_code.co_filename in self.names or not is_library(called.f_code.co_filename):
                return called
        return frame


def is_rank_code(frame: FrameType) -> bool:
    """Is it a function of nbspawn's in the rank?"""
    return frame.f_code.co_filename.startswith(_RANK)


def runs_user_code(frame: FrameType) -> bool:
    """Is it one of those, or of IPython's, that stand above the user's outermost frame?"""
    return is_rank_code(frame) or frame.f_code.co_filename.endswith(_RUNS_CELLS)


def _calls(frame: FrameType) -> Iterator[FrameType]:
    """The frame, and those that called it, up to the user's outermost."""
    called: FrameType | None = frame
    while called is not None and not runs_user_code(called):
        yield called
        called = called.f_back
