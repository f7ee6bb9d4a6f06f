"""Files that this process has open, and may have more to write to."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

FILE: type = io.IOBase.__base__ or object
"""What every file inherits from. io's own class of this name is an abstract one, of which it takes long to ask."""


def named_in(namespace: Mapping[str, object]) -> list[Any]:
    """The open files that a namespace has variables for. Under fork the kernel writes its own out first, and a rank
    that writes to one of them has but its own text in it then."""
    found = []
    for value in list(namespace.values()):
        with suppress(Exception):  # a proxy may raise whatever it is asked
            if issubclass(type(value), FILE) and is_unwritten(value):
                found.append(value)
    return found


def is_unwritten(one: Any) -> bool:
    if not issubclass(type(one), FILE):
        return True
    with suppress(Exception):  # a closed or detached one
        return not one.closed and one.writable()
    return False
