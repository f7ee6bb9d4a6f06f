"""Variables that only annotations name, as in ``def join(self, other: "Node")``, or any below
``from __future__ import annotations``.

No code loads them. Who evaluates annotations (``typing.get_type_hints``, dataclasses, pydantic, parsers of arguments)
looks for them in the module, so they are sent along. Words in strings within an annotation, as in ``list["Node"]`` or
``Float[Tensor, "batch time"]``, may name anything: of these, only what may stand for a type.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbspawn._payload import mentioned

_WORD = re.compile(r"[^\W\d]\w*")
_MAKE_TYPES = ("NamedTuple", "TypedDict", "NewType", "TypeVar", "ForwardRef", "cast", "make_dataclass")
_TYPING = ("typing", "typing_extensions")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
ALIASES = (types.GenericAlias, typing.ForwardRef)
"""Types of objects that hold names as text: ``list["Node"]``."""


def in_source(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names in the annotations of a cell, and the words in their strings, and in those of similar expressions."""
    names: set[str] = set()
    words: set[str] = set()
    for node in ast.walk(tree):
        for annotation in _annotations(node):
            found, more = _in_expression(annotation)
            names, words = names | found, words | more
        for expression in _of_types(node):
            words |= _in_expression(expression)[1]
    return names, words


def _in_expression(expression: ast.AST) -> tuple[set[str], set[str]]:
    parts = list(ast.walk(expression))
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    words = {word for text in texts for word in _WORD.findall(text)}
    return {part.id for part in parts if isinstance(part, ast.Name)}, words


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None:
        yield node.annotation
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
        yield node.returns


def _of_types(node: ast.AST) -> Iterator[ast.expr]:
    """Where else a string may stand for a type."""
    if isinstance(node, ast.ClassDef):
        yield from node.bases
    elif isinstance(node, ast.Call) and _name(node.func) in _MAKE_TYPES:
        yield from (*node.args, *(keyword.value for keyword in node.keywords))
    elif isinstance(node, ast.Subscript):
        name = _name(node.value)
        if hasattr(typing, name) or isinstance(getattr(builtins, name, None), type):
            yield node.slice


def _name(called: ast.expr) -> str:
    return str(getattr(called, "id", getattr(called, "attr", "")))


def in_object(obj: Any) -> tuple[set[str], set[str]]:
    """The names, and the words in strings, as ``in_source`` finds them: in a function's or a class's annotations that
    are strings, in a class's bases, or in an alias."""
    names: set[str] = set()
    words: set[str] = set()
    todo = [*_values(obj), *getattr(obj, "__orig_bases__", ())] if isinstance(obj, (type, *_FUNCTIONS)) else [obj]
    for value in todo:  # it grows: an alias's arguments
        text = value.__forward_arg__ if isinstance(value, typing.ForwardRef) else value
        if not isinstance(text, str):
            todo += typing.get_args(value)
            continue
        try:
            found, more = _in_expression(ast.parse(text, mode="eval"))
        except (SyntaxError, ValueError):
            found, more = set(), set(_WORD.findall(text))
        names, words = names | found, words | more
    return names, words


def _values(obj: Any) -> Iterable[Any]:
    """Python 3.14 evaluates them when they are asked for: what it finds no names for, nobody else does."""
    try:
        return list((vars(obj)["__annotations__"] if isinstance(obj, type) else obj.__annotations__).values())
    except Exception:
        return ()


def sent_along(words: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of these names that may stand for a type, or lead to one, or are small and plain."""
    return {word: namespace[word] for word in words if word in namespace and _may_be_type(namespace[word])}


def _may_be_type(value: Any) -> bool:
    kind = type(value)  # not its __class__, for which a proxy may connect to a server
    if issubclass(kind, types.ModuleType):
        return sys.modules.get(value.__name__) is value
    if issubclass(kind, (type, types.UnionType, *ALIASES, *_FUNCTIONS)) or kind.__module__ in _TYPING:
        return True
    return mentioned.is_cheap(value)
