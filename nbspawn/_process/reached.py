"""What the variables of this process lead to: those of a namespace, and of functions that run."""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from nbspawn._process.imports import is_library
from nbspawn._process.tensors import Walk, attributes

_SENT = re.compile(r"^(\w+)-(\w+) .*/memfd:nbspawn", re.MULTILINE)  # _protocol/shared_memory.py


def by(variables: dict[str, Any]) -> Walk:
    """What these variables of this process lead to, and those of functions that run."""
    walk = Walk([variables, *map(attributes, list(sys.modules.values()))], _sent())
    walk.follow(_roots(variables))
    return walk


def _roots(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables in the order in which they were bound; IPython's (_, Out) last, because they only repeat others."""
    found = [(str.__str__(name), value) for name, value in list(dict.items(variables))]
    yield from ((name, value) for name, value in found if not name.startswith("_") and name != "Out")
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that refers to itself would keep alive all that is found
    for frame in frames.values():
        yield from _local_variables(frame)
    yield from ((name, value) for name, value in found if name.startswith("_") or name == "Out")


@functools.cache
def _value_of() -> Callable[[FrameType, str], Any] | None:
    """Reads a variable of a function that runs. None before Python 3.12: there is only ``f_locals``, which would keep
    all of them alive until the function returns."""
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)
    try:
        return kind(("PyFrame_GetVar", ctypes.pythonapi))  # https://docs.python.org/3/c-api/frame.html
    except AttributeError:
        return None


def _local_variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the user's functions that run, the outermost first; where they cannot be read, what they lead to
    counts as reached by no variable."""
    value_of = _value_of()
    if value_of is None:
        return
    calls: list[FrameType] = []
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not is_library(frame.f_code.co_filename):
            calls.append(frame)
        frame = frame.f_back
    for call in reversed(calls):
        code = call.f_code
        for name in (*code.co_varnames, *code.co_cellvars):
            with suppress(NameError):  # not bound, at this moment
                yield f"{name} in {code.co_name}()", value_of(call, name)


def _sent() -> list[tuple[int, int]]:
    """The addresses where memory of the notebook is mapped, copy-on-write."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return [(int(start, 16), int(end, 16)) for start, end in _SENT.findall(maps)]
