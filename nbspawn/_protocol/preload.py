"""What the fork server is to import, and what it tells of that.

The kernel writes a ``Plan`` to a file in its private directory and gives the path in the environment; the server
answers in a second file (``Report``). Both are JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

PATH = "NBSPAWN_PLAN"


@dataclass(frozen=True)
class Plan:
    """``modules`` are imported in this order, each if a trial finds nothing against it; those in ``trusted`` need none.
    No more are imported once the server's resident memory is above ``memory`` bytes. ``environment`` is that
    of the ranks, as far as it is known. ``shell`` makes IPython's, too."""

    modules: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    memory: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    shell: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass
class Report:
    """``modules`` are all that have been imported for the plan, ``imported`` those of the plan that began it;
    ``refused`` says why others were not, ``skipped`` which there was no memory for. ``memory`` is the server's resident
    bytes. ``read`` are the environment variables that were looked at meanwhile: their values before and after (None:
    not set)."""

    modules: frozenset[str] = frozenset()
    imported: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    memory: int = 0
    read: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Report:
        """In the kernel, which then removes both files. Raises OSError where there is none."""
        answer = answer_to(path)
        found = json.loads(answer.read_text())
        for file in (path, answer):
            file.unlink()
        return cls(**{**found, "modules": frozenset(found["modules"])})


def answer_to(path: Path) -> Path:
    return path.with_suffix(".report")
