"""The notebook's settings that travel with each run (_rank/settings.py reads and sets them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Handler:
    """One that writes to 'stdout' or 'stderr'. ``packed`` is what it is but for its stream and its lock, in pickled
    form; where that cannot travel, a plain StreamHandler of this ``level`` and ``format`` takes its place."""

    stream: str
    level: int
    format: tuple[str, str | None]
    packed: bytes = b""


@dataclass(frozen=True)
class Logger:
    """One that was configured."""

    name: str
    level: int
    propagate: bool
    disabled: bool
    handlers: tuple[Handler, ...]


@dataclass(frozen=True)
class Logging:
    """``disabled`` is the level up to which all is off; ``captures`` whether warnings are logged."""

    loggers: tuple[Logger, ...] = ()
    disabled: int = 0
    captures: bool = False


Filter = tuple[str, str, str, str, int]
"""Action, the message's pattern, the category as 'module:name', the module's pattern, line: as in ``warnings``."""


@dataclass(frozen=True)
class Settings:
    """What was set in the kernel. Of libraries that it has not imported, nothing."""

    torch: dict[str, Any] = field(default_factory=dict)
    numpy: dict[str, Any] = field(default_factory=dict)
    pandas: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[Filter, ...] = ()
    logging: Logging = field(default_factory=Logging)
