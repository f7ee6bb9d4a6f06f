"""What hosts with nothing but Python and torch are sent: nbspawn, and the packages that it needs there."""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Collection
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from nbspawn._version import __version__

_WITH = ("nbspawn", "cloudpickle", "threadpoolctl")
"""Always sent, also since another cloudpickle could not read the kernel's pickles."""
_SENT = (".py", ".js", ".css", ".html", ".json", ".typed")
_NOWHERE = frozenset({"tests", ".."})
_NOT = frozenset({"jedi", "parso", "psutil"})
"""For completion, which ranks do not have, and for the processes of ``%%script``; one is large, one compiled."""


@functools.cache
def code() -> bytes:
    """nbspawn, as the relay unpacks it."""
    texts = {"nbspawn-0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: nbspawn\nVersion: {__version__}\n"}
    for name in _WITH:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        module = Path(spec.origin)
        is_folder = spec.submodule_search_locations is not None
        root = module.parents[1] if is_folder else module.parent
        for file in sorted(module.parent.rglob("*")) if is_folder else [module]:
            if file.suffix in _SENT and file.is_file():
                texts[file.relative_to(root).as_posix()] = file.read_text(encoding="utf-8")
    return zlib.compress(json.dumps(texts).encode())


def shell() -> dict[str, bytes]:
    """The texts of IPython and of what it needs, by their paths."""
    return {
        str(file): Path(str(file.locate())).read_bytes()
        for distribution in with_required("ipython", _NOT)
        for file in distribution.files or ()
        if (file.suffix in _SENT or file.name == "METADATA") and not _NOWHERE.intersection(file.parts)
    }


def with_required(name: str, but: Collection[str] = ()) -> list[metadata.Distribution]:
    """This distribution and those that it requires, as far as they are installed; without those in ``but``."""
    found: dict[str, metadata.Distribution] = {}
    names = [name]
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found or name in but:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # it is for another system
            continue
        required = (line for line in found[name].requires or () if "extra ==" not in line)
        names += [match[0] for line in required if (match := re.match(r"[\w.-]+", line))]
    return list(found.values())
