"""Magics that the notebook has beside IPython's own: found in a cell's text, sent with it, and put into a rank's shell.

They travel with the cell's variables, under the names that users write: ``%lmagic``, ``%%cmagic``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CALLED = re.compile(r"""run_(?:line|cell)_magic\(\s*['"]([^'"]+)""")
_MENTIONED = re.compile(r"%([^\W\d][\w.]*)")  # in the cell of a cell magic, or in a string, where it is no call
_UNKNOWN = re.compile(r"UsageError: (?:Line magic function|Cell magic) `%+([\w.]+)` not found")
_SIGNS = {"line": "%", "cell": "%%"}
_EVERY_RANKS = ("IPython", "ipykernel", "nbspawn")
"""Packages whose magics a rank's shell has, or no rank can serve."""


def used(shell: Any, source: str, transformed: str) -> tuple[dict[str, Any], set[str]]:
    """The notebook's magics that a cell calls, or may call; and the names of those that it may do without, which are
    extensions' or only perhaps called."""
    called = set(_CALLED.findall(transformed))
    found = _used(shell, called | set(_MENTIONED.findall(source)))
    sure = {name for name in found if name.lstrip("%") in called and _home(found[name]) == "__main__"}
    return found, found.keys() - sure


def _used(shell: Any, names: set[str]) -> dict[str, Any]:
    magics: dict[str, Any] = {}
    while names:
        name = names.pop()
        for kind, sign in _SIGNS.items():
            magic = shell.magics_manager.magics[kind].get(name)
            if magic is None:
                continue
            another_name = type(magic).__name__ == "MagicAlias"  # IPython's class: %alias_magic
            if another_name:
                names.update({magic.magic_name} - {shown.lstrip("%") for shown in (*magics, name)})
            if another_name or _home(magic).partition(".")[0] not in _EVERY_RANKS:
                magics[sign + name] = magic
    return magics


def put(shell: Any, magics: Mapping[str, Any]) -> None:
    """In the rank: add these magics to the shell's."""
    for name, magic in magics.items():
        kind = "cell" if name.startswith("%%") else "line"
        shell.magics_manager.magics[kind][name.lstrip("%")] = magic


def advice(shell: Any, error: str) -> list[str]:
    """In the kernel: what to do about a rank's error, if it is that there is no such magic and the kernel has one."""
    unknown = _UNKNOWN.search(error)
    tables = shell.magics_manager.magics.values()
    magic = next((table[unknown[1]] for table in tables if unknown[1] in table), None) if unknown else None
    if unknown is None or magic is None:
        return []
    home = _home(magic)
    if home == "__main__":
        return [
            f"%{unknown[1]} exists in the notebook, but was not sent, because the cell's own code does not call it: "
            "call it there, or use -m fork."
        ]
    extensions = [name for name in shell.extension_manager.loaded if name.split(".")[0] == home.split(".")[0]]
    if extensions:
        return [f"%{unknown[1]} is a magic of an extension: add `%load_ext {extensions[0]}` to the cell."]
    return [f"%{unknown[1]} is a magic of {home.split('.')[0]} for the notebook itself: ranks do not have it."]


def _home(magic: Any) -> str:
    """The module that it was defined in."""
    return str(getattr(magic, "__self__", magic).__module__)
