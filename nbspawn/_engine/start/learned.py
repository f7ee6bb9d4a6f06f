"""Which modules ranks will need: what they have imported so far, saved for the next kernel of this environment.

They are saved in a small JSON file for each environment, in the user's cache directory. It contains names of modules,
and nothing in it is ever executed: the importer ignores names that are not those of installed packages, and imports
only modules that were tried in this environment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbspawn._protocol.preload import ImportReport

# Imported by torch's DistributedDataParallel, fully_shard, optimizers, DTensor, pipelines and checkpoints at their
# first use: 2.5 s in each rank, most of it for torch._dynamo, which alone serves most cells.
TRAINING = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
)

# A process with their threads or their runtime is not safe to fork, which a trial of the import need not show.
_NEVER = ("jax", "jaxlib", "tensorflow", "torch_tpu", "ray", "pyspark", "dask", "distributed")

_LONGEST = 1 << 20  # bytes: a larger file is ignored
_MOST = 10_000  # modules
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


_STAGE = 1.0  # seconds that the imports of a stage take at least, if there are so many; and where nobody knows


class Learned:
    """``modules`` are those that ranks or the notebook have imported, ``tried`` those that are safe to preload, each
    with the seconds that it took, ``refused`` maps others to the reason why they are not. ``uses`` counts the kernels
    whose ranks needed a package."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.tried: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.uses: dict[str, int] = {}
        self._doubted: set[str] = set()
        self._used: set[str] = set()
        self._loaded = False
        self._saved: dict[str, Any] = {}

    def learn(self, modules: Iterable[str]) -> None:
        """Add modules that a rank or the notebook has imported."""
        for name in modules:
            if _package(name) in _NEVER:
                self.refused[_package(name)] = "its threads do not survive a fork"
            elif len(self.modules) < _MOST:
                self.modules.setdefault(name)

    def use(self, modules: Iterable[str]) -> None:
        """Ranks of this kernel will import these."""
        for package in set(map(_package, modules)) - self._used:
            self._used.add(package)
            self.uses[package] = self.uses.get(package, 0) + 1

    def note(self, report: ImportReport) -> None:
        """Add what the importer has found out."""
        self.tried.update(report.imported)
        self._doubted.difference_update(report.imported)
        self.refused.update(report.refused)

    def doubt(self, stage: Iterable[str]) -> None:
        """The importer has ended, or hung, while it imported these: next time they are tried."""
        self.load()
        for name in stage:
            self._doubted.add(name)
            self.tried.pop(name, None)
            self.modules.setdefault(name)

    def load(self) -> None:
        """Add what earlier kernels saved. A file that is damaged, or owned by another user, is ignored."""
        if self._loaded:
            return
        self._loaded = True
        file = path()
        found = _read(file) if file is not None else {}
        if found.get("environment") == environment():
            self.tried = {**_named(found, "modules", float), **self.tried}
            self.refused = {**_named(found, "refused", str), **self.refused}
            for package, count in _named(found, "uses", int).items():
                self.uses[package] = self.uses.get(package, 0) + min(count, _LONGEST)

    def save(self) -> None:
        """Save for the next kernel; does nothing if the disk is full or the directory not writable."""
        self.load()
        packages = set(map(_package, self.tried))
        known = {
            "environment": environment(),
            "modules": dict(list(self.tried.items())[:_MOST]),
            "refused": dict(self.refused),
            "uses": {package: count for package, count in self.uses.items() if package in packages},
        }
        target = path()
        if target is None or known == self._saved:
            return
        self._saved = known
        with suppress(OSError):
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, made = tempfile.mkstemp(dir=target.parent, prefix=target.name)
            try:
                with open(fd, "w") as file:
                    json.dump(known, file, indent=1)
                os.replace(made, target)
            except OSError:
                os.unlink(made)

    @property
    def trusted(self) -> tuple[str, ...]:
        """The modules that need no trial."""
        return tuple(name for name in (*TRAINING, *self.tried) if name not in self._doubted)

    def stages(self, done: Collection[str]) -> list[tuple[str, ...]]:
        """The modules to preload, without those that are ``done``: torch's own, then whole packages, those first of
        which most use is expected in a second of importing. What is still to be tried comes last."""
        wanted = [name for name in {**self.tried, **self.modules} if name not in self.refused and name not in done]
        packages: dict[str, list[str]] = {}
        for name in wanted:
            if name in self.tried and name not in TRAINING:
                packages.setdefault(_package(name), []).append(name)
        missing = [name for name in TRAINING if name not in self.refused and name not in done]
        stages = [
            [name for name in missing if name == TRAINING[0]],
            [name for name in missing if name != TRAINING[0]],
            [],
        ]
        for package in sorted(packages, key=lambda one: -self.uses.get(one, 0) / self.estimate(packages[one])):
            if stages[-1] and self.estimate(stages[-1]) >= _STAGE:
                stages.append([])
            stages[-1] += packages[package]
        stages.append([name for name in wanted if name not in self.tried and name not in TRAINING])
        return [tuple(stage) for stage in stages if stage]

    def estimate(self, stage: Iterable[str]) -> float:
        """The seconds that it takes to import these modules."""
        return sum(self.tried.get(name, 0.0) for name in stage) or _STAGE


def is_for(stage: Iterable[str], modules: Collection[str]) -> bool:
    """Does it bring what those who import these ``modules`` need? Of another package than torch, that is all of it."""
    packages = set(map(_package, modules)) - {"torch"}
    return any(name in modules or _package(name) in packages for name in stage)


def _package(name: str) -> str:
    return name.partition(".")[0]


def path() -> Path | None:
    """The file for this environment; None where the user has no home."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not caches:
        caches = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
        if caches.startswith("~"):  # no HOME, and a user whom the system does not know (docker run --user 1234)
            return None
    named = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    return Path(caches) / "nbspawn" / f"imports-{named}.json"


def environment() -> str:
    """A hash of this interpreter and its packages with their versions: if it differs, modules may have changed."""
    return _environment(changed_at())


@functools.lru_cache(maxsize=1)
def _environment(changed: tuple[int, ...]) -> str:
    packages = sorted(name for place in _places() for name in os.listdir(place) if name.endswith(("-info", ".egg")))
    text = "\n".join([sys.version, sys.prefix, *packages])
    return hashlib.sha256(text.encode()).hexdigest()


def changed_at() -> tuple[int, ...]:
    """When packages were last installed or removed: modification times of their directories, in nanoseconds."""
    return tuple(os.stat(place).st_mtime_ns for place in _places())


def _places() -> list[str]:
    return sorted(filter(os.path.isdir, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


def _read(file: Path) -> dict[str, Any]:
    """The contents of a regular file that this user owns and no other can write; {} for anything else."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    with open(fd, "rb") as opened:
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not ours or status.st_size > _LONGEST:
            return {}
        try:
            found = json.loads(opened.read(_LONGEST))
        except (OSError, ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def _named(found: dict[str, Any], key: str, kind: type) -> dict[str, Any]:
    """The entries of a mapping that have a name, and a value of this kind."""
    entries = found.get(key)
    entries = list(entries.items())[:_MOST] if isinstance(entries, dict) else []
    return {name: value for name, value in entries if isinstance(value, kind) and _NAME.fullmatch(name)}
