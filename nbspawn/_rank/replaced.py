"""Attributes of modules and of their classes that the notebook has set: found in the kernel, set in ranks.

``torch.load = partial(torch.load, ...)``, ``config.lr = 0.1``, ``pd.DataFrame.head_and_tail = f``: a rank imports the
module anew. They are found in the text of the notebook's cells, since an object does not tell who has set its
attributes, and travel with what ranks begin with, under names like 'numpy:ndarray.f'.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

from nbspawn._payload import originals
from nbspawn._rank.after_import import after_import

_MAY_SET = re.compile(r"\.\s*\w+[^=\n]*=[^=]|\bsetattr\s*\(")
_NEVER = ("sys", "os", "torch.backends", "IPython", "ipykernel", "nbspawn")
"""Modules whose attributes are each process's own, or settings (_rank/settings.py)."""
_NOTHING = object()

_chains: dict[tuple[str, ...], None] = {}
"""What cells have set, as they write it."""
_cells_read = 0


def read() -> dict[str, Any]:
    """Their names and values now."""
    global _cells_read
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return {}
    cells = shell.history_manager.input_hist_parsed
    if len(cells) < _cells_read:  # %reset
        _cells_read = 0
    for text in cells[_cells_read:]:
        if _MAY_SET.search(text):
            _chains.update(dict.fromkeys(set_by(text)))
    _cells_read = len(cells)
    found = (_found(chain, shell.user_ns) for chain in _chains)
    values = dict(one for one in found if one is not None)
    originals.replaced.update(values)
    return values


def set_by(text: str) -> Iterator[tuple[str, ...]]:
    """The attributes that a cell's statements set, outside of functions: ('np', 'ndarray', 'f')."""
    try:
        todo: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError):
        return
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _chain(node.value, node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            match node.args:
                case [holder, ast.Constant(value=str(name)), _]:
                    yield from _chain(holder, name)


def _chain(holder: ast.expr, name: str) -> Iterator[tuple[str, ...]]:
    names = [name]
    while isinstance(holder, ast.Attribute):
        names.append(holder.attr)
        holder = holder.value
    if isinstance(holder, ast.Name):
        yield (holder.id, *reversed(names))


def _found(chain: tuple[str, ...], namespace: dict[str, Any]) -> tuple[str, Any] | None:
    holder = namespace.get(chain[0])
    for name in chain[1:-1]:
        if not isinstance(holder, (ModuleType, type)):
            return None
        holder = inspect.getattr_static(holder, name, None)
    if isinstance(holder, ModuleType):
        module, path = holder.__name__, ""
    elif isinstance(holder, type):
        module, path = holder.__module__, holder.__qualname__
    else:
        return None
    if module == "__main__" or any(f"{module}.".startswith(f"{one}.") for one in _NEVER):
        return None
    try:
        if path and originals.attribute(module, path) is not holder:
            return None
    except (AttributeError, KeyError):  # of a function
        return None
    value = vars(holder).get(chain[-1], _NOTHING)
    return None if value is _NOTHING else (f"{module}:{path}{'.' * bool(path)}{chain[-1]}", value)


def put(sent: dict[str, Any]) -> None:
    """In the rank: take them out of what was ``sent``, and set them when their modules have been imported."""
    for name in [name for name in sent if ":" in name]:
        module = name.partition(":")[0]
        after_import(module, partial(_set, module, name.partition(":")[2], sent.pop(name)))


def _set(module: str, name: str, value: Any) -> None:
    originals.keep(module, name)
    path, _, attribute = name.rpartition(".")
    setattr(originals.attribute(module, path) if path else sys.modules[module], attribute, value)


def left_out(names: frozenset[str], elsewhere: bool = False) -> tuple[str, ...]:
    """A sentence about those that could not be sent; ``elsewhere``: to other machines."""
    found = ", ".join(sorted(name.replace(":", ".") for name in names if ":" in name))
    remedy = "set it in the cell" if elsewhere else "set it in the cell, or use -m fork"
    return (f"{found} cannot be sent as the notebook has set it, and is the library's own in ranks: {remedy}.",) * bool(
        found
    )
