"""What the importer should import, and its report about that.

The kernel sends a ``Plan``, the importer (_server/preload.py) an ``ImportReport``: each a line of JSON, on a socket
that the two share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plan:
    """A stage of imports: ``modules`` are imported in this order, each if a trial shows that it is safe; those in
    ``trusted`` without one. No more are imported once the process's resident memory is above ``memory`` bytes.
    ``shell``: create IPython's shell, too. ``settle``: tidy up, which takes a second and makes every fork faster.

    Then a fork server that has all of it listens at ``address``. ``environment`` is that of the ranks, as far as it is
    known: of the first plan; the later ones have none."""

    address: str
    modules: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    memory: int = 0
    environment: Mapping[str, str] | None = None
    shell: bool = False
    settle: bool = False

    def line(self) -> bytes:
        """The plan as a line for the importer."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Plan:
        """In the importer: the plan of a line."""
        return cls(**json.loads(line))


@dataclass
class ImportReport:
    """About all stages so far. ``modules`` are all installed modules that were imported, with their dependencies;
    ``imported`` are those that the plans name, with the seconds that each took. ``refused`` maps others to the reason,
    ``skipped`` are those for which memory did not suffice. ``memory`` is the process's resident bytes. ``read`` maps
    the environment variables that were read meanwhile to their values before and after (None: not set). ``pid`` is the
    new fork server's, ``key`` what a client proves to know (in hexadecimal digits; from Python 3.14 on). ``failed`` is
    why there is no such server, and the importer ends."""

    modules: frozenset[str] = frozenset()
    imported: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    memory: int = 0
    read: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    pid: int = 0
    key: str = ""
    failed: str = ""

    def line(self) -> bytes:
        """The report as a line for the kernel."""
        return json.dumps({**asdict(self), "modules": sorted(self.modules)}).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> ImportReport:
        """In the kernel: the report of a line."""
        found: dict[str, Any] = json.loads(line)
        return cls(**{**found, "modules": frozenset(found["modules"])})
