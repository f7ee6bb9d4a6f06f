"""What the fork server should import, and its report about that.

The kernel writes a ``Plan`` to a file in its private directory and passes the path in the environment; the server
writes a ``Report`` to a second file. Both are JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

PATH = "NBSPAWN_PLAN"


@dataclass(frozen=True)
class Plan:
    """``modules`` are imported in this order, each if a trial shows that it is safe; those in ``trusted`` without one.
    No more are imported once the server's resident memory is above ``memory`` bytes. ``environment`` is that of the
    ranks, as far as it is known. ``shell``: create IPython's shell, too."""

    modules: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    memory: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    shell: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass
class Report:
    """``modules`` are all installed modules that were imported, with their dependencies; ``imported`` are those that
    the plan names. ``refused`` maps others to the reason, ``skipped`` are those for which memory did not suffice.
    ``memory`` is the server's resident bytes. ``read`` maps the environment variables that were read meanwhile to their
    values before and after (None: not set)."""

    modules: frozenset[str] = frozenset()
    imported: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    memory: int = 0
    read: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Report:
        """In the kernel: read the report, and remove both files. Raises OSError if there is no report."""
        answer = answer_to(path)
        found = json.loads(answer.read_text())
        for file in (path, answer):
            file.unlink()
        return cls(**{**found, "modules": frozenset(found["modules"])})


def answer_to(path: Path) -> Path:
    return path.with_suffix(".report")
