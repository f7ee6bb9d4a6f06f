"""Which modules ranks will need: what they have imported so far, remembered for the next kernel of this environment.

The memory is one small JSON file for each environment, in the user's cache directory. It holds names of modules, and
nothing in it is ever run: names that are not those of installed packages mean nothing to the fork server, and a module
that was tried in this environment is all that it can ask for.
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

# What DistributedDataParallel, fully_shard, optimizers, DTensor, pipelines and checkpoints of torch import when they
# are first used: 2.5 s in each rank, for torch._dynamo nearly all of it.
TRAINING = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
)

# A process with their threads or their runtime is no safe thing to fork; the import alone need not show it.
_NEVER = ("jax", "jaxlib", "tensorflow", "torch_tpu", "ray", "pyspark", "dask", "distributed")

_LONGEST = 1 << 20  # bytes of a file that is believed
_MOST = 10_000  # modules
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Learned:
    """``modules`` are those that ranks or the notebook have imported, ``tried`` those that are safe to preload,
    ``refused`` why others are not."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.tried: dict[str, None] = {}
        self.refused: dict[str, str] = {}
        self._recalled = False

    def learn(self, modules: Iterable[str]) -> None:
        """Of these a rank, or the notebook, has imported each."""
        for name in modules:
            if name.partition(".")[0] in _NEVER:
                self.refused[name.partition(".")[0]] = "what it runs in threads does not survive a fork"
            elif len(self.modules) < _MOST:
                self.modules.setdefault(name)

    def recall(self) -> None:
        """Have what earlier kernels learned, too. A file that is damaged, or not this user's own, is as none."""
        if self._recalled:
            return
        self._recalled = True
        found = _read(path())
        if found.get("environment") == environment():
            self.tried.update(dict.fromkeys(_names(found.get("modules"))))
            refused = found.get("refused")
            if isinstance(refused, dict):
                named = {name: why for name, why in refused.items() if _NAME.fullmatch(name) and isinstance(why, str)}
                self.refused.update(dict(list(named.items())[:_MOST]))

    def remember(self) -> None:
        """For the next kernel. Where there is no room or no right to write, it is not."""
        known = {"environment": environment(), "modules": list(self.tried)[:_MOST], "refused": self.refused}
        target = path()
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
        """All that is worth having, in the order of worth: memory may not suffice for all."""
        names = (*TRAINING, *self.modules, *self.tried)
        return tuple(name for name in dict.fromkeys(names) if name not in self.refused)


def path() -> Path:
    """Where it is remembered."""
    caches = Path.home() / "Library" / "Caches" if sys.platform == "darwin" else Path.home() / ".cache"
    named = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or caches) / "nbspawn" / f"imports-{named}.json"


def environment() -> str:
    """Names this interpreter and its packages with their versions: another text means that modules may have changed."""
    return _environment(changed_at())


@functools.lru_cache(maxsize=1)
def _environment(changed: tuple[int, ...]) -> str:
    packages = sorted(name for place in _places() for name in os.listdir(place) if name.endswith(("-info", ".egg")))
    told = "\n".join([sys.version, sys.prefix, *packages])
    return hashlib.sha256(told.encode()).hexdigest()


def changed_at() -> tuple[int, ...]:
    """When packages were last installed or removed: times of the folders that hold them, in nanoseconds."""
    return tuple(os.stat(place).st_mtime_ns for place in _places())


def _places() -> list[str]:
    return sorted(filter(os.path.isdir, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


def _read(file: Path) -> dict[str, Any]:
    """A regular file of this user's, into which nobody else may write; anything else is as an empty one."""
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
