"""Variables that only a string names, as in ``df.query("a > @limit")``, ``eval("lr * 2")``, ``globals()["lr"]``.

Whether a word in a string is a variable's name, nobody knows. So those that are small and plain are sent along.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_WORD = re.compile(r"[^\W\d]\w*")
_PLAIN = (bool, int, float, complex, type(None))
_MOST_TEXT, _MOST_ITEMS, _MOST_BYTES = 10_000, 100, 1_000_000


def in_source(tree: ast.AST) -> frozenset[str]:
    """The words in the strings of a cell."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(word for text in texts for word in _words(text))


def in_function(function: types.FunctionType) -> dict[str, Any]:
    """The globals of a function that only its strings name, if they are to be sent along."""
    words = {word for text in _texts(function.__code__) if text != function.__doc__ for word in _words(text)}
    return sent_along(words, function.__globals__)


def sent_along(words: set[str] | frozenset[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The small and plain ones of the variables that these words may name."""
    return {word: namespace[word] for word in words & namespace.keys() if is_cheap(namespace[word])}


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text[:_MOST_TEXT]) if not word.startswith("__")]


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)


def is_cheap(value: Any) -> bool:
    """Is it small and plain?"""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind in (str, bytes):
        return len(value) <= _MOST_TEXT
    if kind in (list, tuple, set, frozenset):
        return len(value) <= _MOST_ITEMS and all(type(item) in (*_PLAIN, str) for item in value)
    if kind is dict:
        return is_cheap(list(value)) and is_cheap(list(value.values()))
    with suppress(Exception):
        match kind.__module__.partition(".")[0], kind.__name__:
            case "numpy", "ndarray":
                return bool(value.nbytes <= _MOST_BYTES and not value.dtype.hasobject)
            case "torch", "Tensor":
                return bool(value.is_leaf and value.device.type == "cpu" and value.nbytes <= _MOST_BYTES)
            case "pandas", "Series" | "DataFrame":
                return bool(value.size * 8 <= _MOST_BYTES)
    return False
