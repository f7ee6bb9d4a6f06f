"""Holds the garbage collector back where many objects are made at once, none of them garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile it does not run. It would look through all new objects again and again, and, because they are many,
    through all others too: with torch imported that is a tenth of a second each time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
