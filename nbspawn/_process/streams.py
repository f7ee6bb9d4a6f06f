"""The standard streams of this process, and those that they have replaced: a rank's own stand for the kernel's."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

_replaced: dict[str, Any] = {}
"""By their names in ``sys``: of the kernel, or of the fork server."""


def replace(name: str, stream: Any) -> None:
    """Make this ``sys.stdout``, ``stderr`` or ``stdin``. Whoever holds the one that was there (a logging handler, a
    console) writes to it, too: through the kernel's, nothing would be seen, or the rank would hang."""
    for one in (name, f"__{name}__"):
        _replaced[one] = getattr(sys, one)
        setattr(sys, one, stream)
    for method in ("write", "flush"):
        with suppress(AttributeError):  # none, or an object without attributes of its own
            setattr(_replaced[name], method, getattr(stream, method))


def is_replaced(stream: Any) -> bool:
    """Was it one of this process's, and is no more?"""
    return any(stream is one for one in _replaced.values())


def name_of(stream: Any) -> str:
    """'stdout' or 'stderr' if it is that, or was; else ''."""
    for name in ("stdout", "stderr"):
        for one in (name, f"__{name}__"):
            if stream is not None and (stream is getattr(sys, one) or stream is _replaced.get(one)):
                return name
    return ""
