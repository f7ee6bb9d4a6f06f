"""The notebook's settings that travel with each run (_carried/settings.py reads and sets them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Packed = bytes
"""One object as _carried/by_value.py pickles it: of a class of the notebook's, or a function. Empty where it
cannot be pickled, or there is nothing."""


@dataclass(frozen=True)
class Handler:
    """A logging handler that writes to the notebook: to the ``stream`` 'stdout' or 'stderr', or, of a class of the
    notebook's own, by what that does (''). ``packed`` is what it is but for its stream and its lock; where that cannot
    travel, a plain StreamHandler of this ``level`` and ``format`` takes the place of one that has a stream."""

    stream: str
    level: int
    format: tuple[str, str | None]
    packed: Packed = b""


@dataclass(frozen=True)
class Logger:
    """A logger that was configured. ``filters`` are a list of its own."""

    name: str
    level: int
    propagate: bool
    disabled: bool
    handlers: tuple[Handler, ...]
    filters: Packed = b""


@dataclass(frozen=True)
class Logging:
    """``disabled`` is the level up to which all is off; ``captures`` whether warnings are logged; ``level_names`` are
    those that ``logging.addLevelName`` was given."""

    loggers: tuple[Logger, ...] = ()
    disabled: int = 0
    captures: bool = False
    level_names: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Filter:
    """A filter of ``warnings``. The category is named 'module:name', and ``packed`` where the notebook has defined
    it."""

    action: str
    message: str
    category: str
    module: str
    line: int
    packed: Packed = b""


@dataclass(frozen=True)
class Settings:
    """What was set in the kernel. Of libraries that it has not imported, nothing. ``figures`` are traits of IPython's
    InlineBackend."""

    torch: dict[str, Any] = field(default_factory=dict)
    numpy: dict[str, Packed] = field(default_factory=dict)
    numpy_errors: dict[str, str] = field(default_factory=dict)
    pandas: dict[str, Packed] = field(default_factory=dict)
    matplotlib: dict[str, Packed] = field(default_factory=dict)
    figures: dict[str, Packed] = field(default_factory=dict)
    recursion_limit: int = 0
    warnings: tuple[Filter, ...] = ()
    logging: Logging = field(default_factory=Logging)


class ProcessState(NamedTuple):
    """``limits`` are the soft and the hard one of each resource; ``umask`` and ``nice`` None where it is not known,
    ``processors`` empty."""

    limits: dict[str, tuple[int, int]]
    umask: int | None
    nice: int | None
    processors: tuple[int, ...]
