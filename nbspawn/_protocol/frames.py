"""Where a rank is: the frames of its main thread, and of its other threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Frame(NamedTuple):
    """A frame of a stack: the name of the file (IPython's, for a cell), the 1-based current line, and the
    function's name ('<module>' for a cell's own lines)."""

    file: str
    line: int
    name: str


class Position(NamedTuple):
    """Where a rank's main thread is: in these ``frames``, outermost first, and called from the last of them in the
    library function ``call`` ('' if there is none written in Python). ``collective``: does it wait for other ranks?
    ``device``: does it wait for its own device, where collectives are queued?"""

    frames: tuple[Frame, ...] = ()
    call: str = ""
    collective: bool = False
    device: bool = False


Threads = tuple[tuple[str, tuple[Frame, ...]], ...]
"""Other threads of a rank: their names and their stacks."""

ThreadsAt = tuple[int, Threads]
"""In a file of the rank's: these, when the file of its main thread's stacks had so many bytes."""


@dataclass(frozen=True)
class Stack:
    """The stack of one rank: ``frames`` of its main thread, outermost first, beginning with the user's code; empty if
    the rank did not answer. ``threads`` are its other threads that run Python, by name. A frame of native code has
    line 0, and its library as the file."""

    frames: tuple[Frame, ...] = ()
    threads: Threads = ()


_RUNNERS = (
    (os.path.join("nbspawn", "_rank", "main.py"), None),
    (os.path.join("IPython", "core", "interactiveshell.py"), "run_code"),
)


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""nbspawn's own folder."""
RANK_MAIN = os.path.join(PACKAGE, "_rank", "main.py")
"""All that happens in a rank happens below a function of this file."""

_OWN = os.path.join("nbspawn", "_rank", "")
_DEVICE = os.path.join("nbspawn", "_rank", "group", "device.py")
_DEBUGGER = os.path.join("nbspawn", "_rank", "debug", "attached.py"), os.path.join("_vendored", "pydevd", "")


def is_runner(frame: Frame) -> bool:
    """Is this the frame that runs the user's cell or function?"""
    return any(frame.file.endswith(file) and name in (None, frame.name) for file, name in _RUNNERS)


_WRITTEN = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_BEGIN = "(most recent call first):"


def written_frames(text: str) -> Iterator[Frame]:
    """The first stack in what faulthandler wrote, innermost frame first."""
    found = _WRITTEN.finditer("".join(text.split(_BEGIN, 2)[1:2]))
    return (Frame(match["file"], int(match["line"]), match["name"]) for match in found)


def described(frame: Frame) -> str:
    """'in sleep (test.py, line 3)'."""
    return f"in {frame.name} ({os.path.basename(frame.file)}, line {frame.line})"


def is_own(frame: Frame) -> bool:
    """Is this a frame of nbspawn's, between the user's code and what that has called, such as ``input``?"""
    return _OWN in frame.file


def is_after_the_last_line(frames: Iterable[Frame]) -> bool:
    """Is this the stack of a rank that has run the user's code, and waits for what its device has still to do?"""
    return any(frame.name == "settle" and frame.file.endswith(_DEVICE) for frame in frames)


def users_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """The part of a stack (innermost frame first) from the user's cell or function on, as far as where the front end's
    debugger has stopped it; returned outermost first."""
    found: list[Frame] = []
    for frame in frames:
        if is_runner(frame):
            break
        found.append(frame)
        if any(file in frame.file for file in _DEBUGGER):
            found.clear()
    return tuple(reversed(found))
