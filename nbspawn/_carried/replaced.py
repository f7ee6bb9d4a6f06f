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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from nbspawn._payload import originals
from nbspawn._process.after_import import after_import

_MAY_SET = re.compile(r"\.\s*\w+[^=\n]*=[^=]|\bsetattr\s*\(")
_NEVER = ("sys", "IPython", "ipykernel", "nbspawn")
"""Modules whose attributes are each process's own."""
_SETTINGS = re.compile(r"torch\.backends\..*:(benchmark|deterministic|allow_tf32|fp32_precision)")
"""_carried/settings.py sets these."""
_WITH_PYTHON = ("time", "capture")
"""Cell magics whose cell is code of the notebook."""
_NOTHING = object()

_set_by_cells: dict[str, None] = {}
_unloadable: set[str] = set()
_cells_read = 0


def note() -> None:
    """In the kernel, after each cell: remember what it has set, while its names say what they said there."""
    global _cells_read
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return
    cells = shell.history_manager.input_hist_parsed
    if len(cells) < _cells_read:  # %reset
        _cells_read = 0
    for text in cells[_cells_read:]:
        if _MAY_SET.search(text):
            keys = {_key(chain, shell.user_ns) for chain in set_by(text, shell.transform_cell)} - {""}
            _set_by_cells.update(dict.fromkeys(keys))
            _unloadable.difference_update(keys)
    _cells_read = len(cells)
    originals.replaced.update(_set_by_cells)


def read() -> dict[str, Any]:
    """In the kernel: the attributes' names and their values now, but for those that are the library's own again."""
    note()
    values = {}
    for key in _set_by_cells.keys() - _unloadable:
        module, _, name = key.partition(":")
        path, _, attribute = name.rpartition(".")
        with suppress(AttributeError, KeyError):  # it has been deleted
            holder = originals.attribute(module, path) if path else sys.modules[module]
            value = vars(holder)[attribute] if path else getattr(holder, attribute)
            if not originals.is_its_own(key, value):
                values[key] = value
    return values


def give_up(name: str) -> bool:
    """In the kernel: send this attribute no more, until it is set again, because ranks cannot load it. False for other
    names."""
    found = name in _set_by_cells
    if found:
        _unloadable.add(name)
    return found


def set_by(text: str, transform: Callable[[str], str]) -> Iterator[tuple[str, ...]]:
    """The attributes that a cell's statements set, outside of functions: ('np', 'ndarray', 'f'). ``transform`` turns
    IPython's syntax into Python."""
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
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "run_cell_magic":
            match node.args:
                case [ast.Constant(value=str(magic)), _, ast.Constant(value=str(body))] if magic in _WITH_PYTHON:
                    yield from set_by(transform(body), transform)


def _chain(holder: ast.expr, name: str) -> Iterator[tuple[str, ...]]:
    names = [name]
    while isinstance(holder, ast.Attribute):
        names.append(holder.attr)
        holder = holder.value
    if isinstance(holder, ast.Name):
        yield (holder.id, *reversed(names))


def _key(chain: tuple[str, ...], namespace: dict[str, Any]) -> str:
    """'numpy:ndarray.f'; '' for what is no attribute of a module, or of a class that is found in one."""
    holder = namespace.get(chain[0])
    for name in chain[1:-1]:
        if not isinstance(holder, (ModuleType, type)):
            return ""
        holder = inspect.getattr_static(holder, name, None)
    if isinstance(holder, ModuleType):
        key = f"{holder.__name__}:{chain[-1]}"
    elif isinstance(holder, type) and holder.__module__ != "__main__":
        key = f"{holder.__module__}:{holder.__qualname__}.{chain[-1]}"
    else:
        return ""
    with suppress(AttributeError, KeyError):
        module, _, name = key.partition(":")
        path = name.rpartition(".")[0]
        found = originals.attribute(module, path) if path else sys.modules[module]
        if found is holder and not f"{module}.".startswith(tuple(f"{one}." for one in _NEVER)):
            return "" if _SETTINGS.fullmatch(key) else key
    return ""


def put(sent: dict[str, Any]) -> None:
    """In the rank: take them out of what was ``sent``, and set them when their modules have been imported."""
    for name in [name for name in sent if ":" in name]:
        module = name.partition(":")[0]
        originals.replaced.add(name)
        after_import(module, partial(_set, module, name.partition(":")[2], sent.pop(name)))


def _set(module: str, name: str, value: Any) -> None:
    originals.keep(module, name)
    path, _, attribute = name.rpartition(".")
    setattr(originals.attribute(module, path) if path else sys.modules[module], attribute, value)


def left_out(names: frozenset[str], elsewhere: bool = False) -> tuple[str, ...]:
    """A sentence on those that could not be sent, or not be loaded; ``elsewhere``: to other machines."""
    found = ", ".join(sorted(name.replace(":", ".") for name in names | _unloadable if ":" in name))
    remedy = "set it in the cell" if elsewhere else "set it in the cell, or use -m fork"
    return (f"{found} cannot be sent as the notebook has set it, and is the library's own in ranks: {remedy}.",) * bool(
        found
    )
