"""Plain data in place of objects: what a process sends to another one that must not run its code.

A message is taken apart into None, booleans, numbers, text, bytes, tuples and dicts, and made again at the other end,
by the annotations of its class alone: what arrives has exactly the types that are declared there, or is refused. There
is no table of names to keep: a class can arrive where an annotation of the expected message mentions it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import io
import operator
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

Buffer = bytes | bytearray | memoryview


class NotPlainError(TypeError):
    """A value is not of the declared type, and cannot be made so."""


class Shape(NamedTuple):
    """How values of one declared type are taken apart and made again. Both raise NotPlainError."""

    apart: Callable[[Any], Any]
    made: Callable[[Any], Any]


def apart(declared: Any, value: object) -> Any:
    """Take a value of a ``declared`` type apart. Numbers and text of other classes, such as NumPy's, become plain ones;
    raises NotPlainError for anything else that is not as declared."""
    try:
        return shape(declared).apart(value)
    except NotPlainError:
        raise
    except Exception as error:  # of an attribute or a method of the object that was found in place of a plain one
        raise NotPlainError(f"{type(error).__name__}: {error}") from error


def loaded(declared: Any, data: Buffer, buffers: Iterable[Any] = ()) -> Any:
    """Make the value again whose parts were pickled as ``data``. Raises NotPlainError, whatever is in there."""
    try:
        return shape(declared).made(_Parts(data, buffers).load())
    except NotPlainError:
        raise
    except Exception as error:  # bytes that no pickler has written can raise anything
        raise NotPlainError(f"{type(error).__name__}: {error}") from error


def copy(declared: Any, value: object) -> Any:
    """The value itself, made of plain data. Raises NotPlainError."""
    return shape(declared).made(apart(declared, value))


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise NotPlainError(f"it has pickle's operation {chr(code)!r}")


class _Parts(pickle._Unpickler):
    """Unpickles plain data. Python's own unpickler takes no more memory than the bytes that are there; that in C what
    they say that they need, such as 64 GB for ten bytes: https://github.com/python/cpython/issues/115952."""

    _PLAIN = (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"),
    )
    _CODES = [ord(getattr(pickle, name)) for name in _PLAIN]
    dispatch = _Operations(zip(_CODES, map(pickle._Unpickler.dispatch.__getitem__, _CODES), strict=True))

    def __init__(self, data: Buffer, buffers: Iterable[Any]) -> None:
        whole = io.BytesIO(data)
        super().__init__(whole, buffers=buffers)
        self.read = whole.read

    def load(self) -> Any:
        """Load the value, in two thirds of the time of Python's own loop: what is in memory need not be read in
        frames."""
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        try:
            while True:
                self.dispatch[self.read(1)[0]](self)
        except pickle._Stop as end:  # type: ignore[attr-defined]
            return end.value

    def load_frame(self) -> None:
        self.read(8)  # its size

    dispatch[ord(pickle.FRAME)] = load_frame

    def load_bytearray8(self) -> None:  # Python's, too, makes the array before it reads
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    dispatch[ord(pickle.BYTEARRAY8)] = load_bytearray8


_OFTEN_THE_SAME: set[type] = set()
_REMEMBERED = 1000  # values of such a type


def often_the_same(*kinds: type) -> None:
    """Declare classes whose values are hashable and often repeated within a message: pickle then sends each once, and
    it is made once."""
    _OFTEN_THE_SAME.update(kinds)


def _refuse(value: object, expected: str) -> Any:
    raise NotPlainError(f"{expected} is expected, not {type(value).__name__}")


def _scalar(kind: type, convert: Callable[[Any], Any]) -> Shape:
    def apart(value: Any) -> Any:
        return value if type(value) is kind else convert(value)

    def made(value: Any) -> Any:
        return value if type(value) is kind else _refuse(value, kind.__name__)

    return Shape(apart, made)


def _truth(value: Any) -> bool:
    return bool(value) if type(value).__name__ in ("bool", "bool_") else _refuse(value, "bool")  # NumPy's


def _whole(value: Any) -> int:
    return operator.index(value) + 0  # of a subclass


def _real(value: Any) -> float:
    return _refuse(value, "float") if isinstance(value, (str, bytes)) else float(value)


def _text(value: Any) -> str:
    """Text that can be written as UTF-8, as it is for a front end: a lone surrogate becomes its escape sequence."""
    plain = str.__str__(value)  # of a subclass
    return plain if plain.isascii() else plain.encode("utf-8", "backslashreplace").decode("utf-8")


def _buffer(value: Any) -> Buffer:
    if isinstance(value, pickle.PickleBuffer):  # of copy()
        return value.raw()
    return value if isinstance(value, Buffer) else _refuse(value, "bytes")


_SCALARS = {
    bool: _scalar(bool, _truth),
    int: _scalar(int, _whole),
    float: Shape(_real, lambda value: float(value) if type(value) in (float, int) else _refuse(value, "float")),
    str: Shape(_text, lambda value: _text(value) if type(value) is str else _refuse(value, "str")),
    bytes: _scalar(bytes, lambda value: bytes(memoryview(value))),
    NoneType: _scalar(NoneType, lambda value: _refuse(value, "None")),
}


@functools.cache
def shape(declared: Any) -> Shape:
    """The shape of a declared type: a scalar, Buffer, Any (what json has, and bytes), a tuple, a list, a mapping with
    the types of its parts, a NamedTuple or a dataclass, or a union of these."""
    if declared is Any:
        return Shape(_anything, _anything)
    if declared == Buffer:
        return Shape(pickle.PickleBuffer, _buffer)
    if (found := _SCALARS.get(NoneType if declared is None else declared)) is not None:
        return found
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is tuple and arguments[-1] is not ...:
        return _row(tuple, arguments)
    if origin in (tuple, list):
        return _sequence(origin, arguments[0])
    if origin in (dict, Mapping, collections.abc.Mapping):
        return _mapping(*arguments)
    return _record(declared)


def _sequence(kind: type, declared: Any) -> Shape:
    item = shape(declared)

    def apart(value: Any) -> Any:
        return tuple([item.apart(one) for one in value])

    def made(value: Any) -> Any:
        return kind([item.made(one) for one in value]) if type(value) is tuple else _refuse(value, "tuple")

    return Shape(apart, made)


def _mapping(key: Any, item: Any) -> Shape:
    keys, items = shape(key), shape(item)

    def apart(value: Any) -> Any:
        return {keys.apart(name): items.apart(one) for name, one in value.items()}

    def made(value: Any) -> Any:
        if type(value) is not dict:
            return _refuse(value, "dict")
        return {keys.made(name): items.made(one) for name, one in value.items()}

    return Shape(apart, made)


def _union(alternatives: Iterable[Any]) -> Shape:
    """A pair: the name of the alternative, and a value of it."""
    shapes = {get_origin(one) or one: shape(one) for one in alternatives}
    by_name = {kind.__name__: shape for kind, shape in shapes.items()}
    assert len(by_name) == len(shapes), by_name

    def apart(value: Any) -> Any:
        if (found := shapes.get(type(value))) is not None:
            return type(value).__name__, found.apart(value)
        for kind, one in shapes.items():  # NumPy's number, or another library's text
            with suppress(Exception):
                return kind.__name__, one.apart(value)
        return _refuse(value, " or ".join(by_name))

    def made(value: Any) -> Any:
        name, part = value
        return by_name[name].made(part)

    return Shape(apart, made)


def _row(kind: type, declared: Iterable[Any], parts: Callable[[Any], Iterable[Any]] = tuple) -> Shape:
    """The shape of so many values, each of a type of its own; ``parts`` of a value are these."""
    shapes = [shape(one) for one in declared]

    def apart(value: Any) -> Any:
        return tuple([one.apart(part) for one, part in zip(shapes, parts(value), strict=True)])

    def made(value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(shapes):
            return _refuse(value, kind.__name__)
        found = [one.made(part) for one, part in zip(shapes, value, strict=True)]
        return tuple(found) if kind is tuple else kind(*found)

    return Shape(apart, made)


def _record(kind: Any) -> Shape:
    hints = get_type_hints(kind)
    if issubclass(kind, tuple):
        names = kind._fields
    else:
        names = [field.name for field in dataclasses.fields(kind)]

    def parts(value: Any) -> Iterable[Any]:
        return (getattr(value, name) for name in names) if type(value) is kind else _refuse(value, kind.__name__)

    row = _row(kind, [hints[name] for name in names], parts)
    return row if kind not in _OFTEN_THE_SAME else Shape(*map(functools.lru_cache(_REMEMBERED), row))


def _anything(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    if type(value) is str:
        return _text(value)
    if type(value) in (tuple, list):
        return [_anything(one) for one in value]
    if type(value) is dict:
        return {_text(name): _anything(one) for name, one in value.items()}
    return _refuse(value, "plain data")
