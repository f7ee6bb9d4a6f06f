"""Runs what libraries of the user's own have for the end of a process: C's ``atexit``, destructors of C++.

A rank leaves without exit(3), since that of torch's libraries may hang or crash (exiting.py). So it does for the others
what the loader would do (DT_FINI_ARRAY: https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html#init_fini).
Installed libraries are left out: what these have to write, their Python code does. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator

_SECONDS = 3.0
_NEEDED, _STRINGS, _FINI, _NAME, _FINI_ARRAY, _FINI_ARRAY_SIZE = 1, 5, 13, 14, 26, 28
_SYSTEMS = ("/lib", "/usr/", "/opt/", sys.prefix + os.sep, sys.base_prefix + os.sep, sysconfig.get_path("stdlib"))

_inherited = 0


class _Library(ctypes.Structure):
    """<link.h>'s ``struct link_map``; a handle of dlopen is the address of one."""


_Library._fields_ = [
    ("base", ctypes.c_size_t),
    ("path", ctypes.c_char_p),
    ("dynamic", ctypes.c_void_p),
    ("next", ctypes.POINTER(_Library)),
]


class _Entry(ctypes.Structure):
    """<link.h>'s ``ElfW(Dyn)``."""

    _fields_ = (("tag", ctypes.c_ssize_t), ("value", ctypes.c_size_t))


def begin() -> None:
    """Note the libraries that are loaded now. They are of the process that this one was copied from: what they have to
    do is its own."""
    global _inherited
    _inherited = sum(1 for _ in _loaded())


def run(code: int) -> None:
    """Run what the libraries that this process has loaded have for its end. If that takes too long, the process
    ends."""
    own = [one for one in list(_loaded())[_inherited:] if _is_own(one)]
    if own:
        in_time = threading.Timer(_SECONDS, os._exit, [code])
        in_time.daemon = True
        in_time.start()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * _SECONDS)  # if one keeps Python's lock, no thread can end it
        for one in _in_order(own):
            for function in _functions(one):
                ctypes.CFUNCTYPE(None)(function)()
        signal.setitimer(signal.ITIMER_REAL, 0)
        in_time.cancel()


def _in_order(libraries: list[_Library]) -> list[_Library]:
    """The last loaded first, but each before those that it needs."""
    names = {one.base: _texts(one, _NAME) or [os.path.basename(one.path)] for one in libraries}
    needed = {one.base: _texts(one, _NEEDED) for one in libraries}
    rest, ordered = libraries[::-1], []
    while rest:
        awaited = {name for one in rest for name in needed[one.base]}
        free = [one for one in rest if not awaited.intersection(names[one.base])]
        ordered.append(free[0] if free else rest[0])
        rest.remove(ordered[-1])
    return ordered


def _loaded() -> Iterator[_Library]:
    """The libraries that are loaded, in the order in which they were."""
    if sys.platform == "linux":
        found = ctypes.cast(ctypes.CDLL(None)._handle, ctypes.POINTER(_Library))
        while found:
            yield found.contents
            found = found.contents.next


def _is_own(library: _Library) -> bool:
    path = os.path.realpath(os.fsdecode(library.path or b""))
    return os.path.isfile(path) and not path.startswith(_SYSTEMS)


def _functions(library: _Library) -> list[int]:
    """Their addresses, in the order in which exit(3) calls them."""
    found = dict(_entries(library))
    size = found.get(_FINI_ARRAY_SIZE, 0) // ctypes.sizeof(ctypes.c_size_t)
    array = (ctypes.c_size_t * size).from_address(library.base + found[_FINI_ARRAY]) if size else ()
    last = [library.base + found[_FINI]] if _FINI in found else []
    return [*reversed(list(array)), *last]


def _texts(library: _Library, tag: int) -> list[bytes]:
    """Entries of this kind are offsets of texts."""
    entries = list(_entries(library))
    strings = dict(entries)[_STRINGS]
    strings += library.base if strings < library.base else 0  # the loader has made an address of it, or has not
    return [ctypes.string_at(strings + value) for one, value in entries if one == tag]


def _entries(library: _Library) -> Iterator[tuple[int, int]]:
    entry, index = ctypes.cast(library.dynamic, ctypes.POINTER(_Entry)), 0
    while entry[index].tag:
        yield entry[index].tag, entry[index].value
        index += 1
