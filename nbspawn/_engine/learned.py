"""Which modules ranks will need: what they have imported so far, saved for the next kernel of this environment.

They are saved in a small JSON file for each environment, in the user's cache directory. It contains names of modules,
and nothing in it is ever executed: the fork server ignores names that are not those of installed packages, and imports
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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Imported by torch's DistributedDataParallel, fully_shard, optimizers, DTensor, pipelines and checkpoints at their
# first use: 2.5 s in each rank, nearly all of it for torch._dynamo.
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


class Learned:
    """``modules`` are those that ranks or the notebook have imported, ``tried`` those that are safe to preload,
    ``refused`` maps others to the reason why they are not."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.tried: dict[str, None] = {}
        self.refused: dict[str, str] = {}
        self._loaded = False

    def learn(self, modules: Iterable[str]) -> None:
        """Add modules that a rank or the notebook has imported."""
        for name in modules:
            if name.partition(".")[0] in _NEVER:
                self.refused[name.partition(".")[0]] = "its threads do not survive a fork"
            elif len(self.modules) < _MOST:
                self.modules.setdefault(name)

    def load(self) -> None:
        """Add what earlier kernels saved. A file that is damaged, or owned by another user, is ignored."""
        if self._loaded:
            return
        self._loaded = True
        file = path()
        found = _read(file) if file is not None else {}
        if found.get("environment") == environment():
            self.tried.update(dict.fromkeys(_names(found.get("modules"))))
            refused = found.get("refused")
            if isinstance(refused, dict):
                named = {name: why for name, why in refused.items() if _NAME.fullmatch(name) and isinstance(why, str)}
                self.refused.update(dict(list(named.items())[:_MOST]))

    def save(self) -> None:
        """Save for the next kernel; does nothing if the disk is full or the directory not writable."""
        known = {"environment": environment(), "modules": list(self.tried)[:_MOST], "refused": self.refused}
        target = path()
        if target is None:
            return
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
    def wanted(self) -> tuple[str, ...]:
        """The modules to preload, most useful first: memory may not suffice for all."""
        names = (*TRAINING, *self.modules, *self.tried)
        return tuple(name for name in dict.fromkeys(names) if name not in self.refused)


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


def _names(found: object) -> list[str]:
    names = found if isinstance(found, list) else []
    return [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)][:_MOST]
