"""How a class of the notebook is made of its parts in another process, without running again what has made it.

cloudpickle calls the metaclass with an empty body, and sets the attributes afterwards. That runs the notebook's
metaclasses and its ``__init_subclass__`` on a class in which nothing is yet, and again whenever the class arrives: a
check fails, a registry gets classes that no object is of. Here the notebook's own code is not run: what it has done is
part of what travels. A library's ``__init_subclass__`` runs, as it would by an import, when the class is complete. The
members of an Enum get the attributes that its ``__new__`` and ``__init__`` have given them.
"""

from __future__ import annotations

import enum
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbspawn._payload import cloudpickle_adapter

_IN_BODY = ("__module__", "__orig_bases__", "__slots__")  # attributes that must be there when the class is made
_OF_ENUM = {"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"}  # of a member: what Enum itself sets
_MUTABLE = (list, dict, set, bytearray)
_NOT_SENT = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotate_func__"}
_HOOK = "__init_subclass__"

_lock = threading.RLock()
_incomplete: set[str] = set()  # ids
_complete_before: set[str] = set()
"""Ids of classes that this process had already made itself."""


def parts(cls: Any, by_default: Any) -> Any:
    """How ``cls`` is pickled, made of what cloudpickle gives for it."""
    _, _, (attributes, slots), _, _, set_attributes = by_default
    own = vars(cls)
    body = {name: own[name] for name in _IN_BODY if name in own} | {"__qualname__": cls.__qualname__}
    if isinstance(own.get("__dict__"), property):
        body["__dict__"] = own["__dict__"]
    is_enum = issubclass(cls, enum.Enum)
    members = list(cls.__members__.items()) if is_enum else []
    made = dict(members)
    attributes = {name: value for name, value in attributes.items() if name not in made and not _is_slot(cls, value)}
    if not is_enum:  # cloudpickle leaves out what a base has as well, which may change
        attributes |= {name: own[name] for name in own.keys() - _NOT_SENT if _has_too(cls.__bases__, name, own[name])}
    made_with = [(name, _arguments(cls, member), member._value_) for name, member in members]
    got = {name: {key: value for key, value in vars(member).items() if key not in _OF_ENUM} for name, member in members}
    tracker = cloudpickle_adapter.make_class_id(cls)
    first = {name: attributes.pop(name) for name in ("__hash__", "__eq__") if name in attributes}
    return (
        _make,
        (type(cls), cls.__name__, cls.__bases__, body, made_with, tracker, _generic(cls)),
        (_First(set_attributes, cls, first), attributes, slots, set_attributes, got, _around(cls), tracker),
        None,
        None,
        _complete,
    )


def _has_too(bases: Iterable[type], name: str, value: object) -> bool:
    return any(vars(base).get(name, _HOOK) is value for base in bases)


def _is_slot(cls: type, value: object) -> bool:
    """``__slots__`` makes it again."""
    return isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls


def _arguments(cls: Any, member: Any) -> tuple[Any, ...]:
    """The arguments with which the type that is mixed in, as in ``class Size(float, Enum)``, makes this member."""
    kind = cls._member_type_
    if kind in _MUTABLE:
        return (kind(member),)
    if hasattr(kind, "__getnewargs__"):
        return tuple(kind.__getnewargs__(member))
    return tuple(kind.__reduce__(member)[1]) if kind.__reduce__ is not object.__reduce__ else ()


def _generic(cls: type) -> tuple[Any, Any]:
    """What pydantic has made this class of, and with which arguments: in the rank, ``Page[int]`` has to be this
    class."""
    made = vars(cls).get("__pydantic_generic_metadata__") or {}
    return made.get("origin"), made.get("args")


class _First:
    """Attributes that the class has before others are loaded: these may be dicts of its objects."""

    def __init__(self, *how: Any) -> None:
        self._how = how

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _set_first, self._how


def _around(cls: type) -> Any:
    """The class that it is defined in. Plain pickle, which ``torch.save`` uses in the rank, looks for it there."""
    outer, *inner = cls.__qualname__.split(".")
    with suppress(AttributeError):
        if inner and cls.__module__ == "__main__":
            found = getattr(sys.modules["__main__"], outer)
            return found if operator.attrgetter(".".join(inner))(found) is cls else None
    return None


# ---------------------------------------------------------------- called by the stream, when it is loaded


def _make(
    metaclass: Any,
    name: str,
    bases: tuple[type, ...],
    body: dict[str, Any],
    members: list[tuple[str, tuple[Any, ...], Any]],
    tracker: str,
    generic: tuple[Any, Any],
) -> Any:
    """The class, without its attributes."""
    generics: Any = sys.modules.get("pydantic._internal._generics") if all(generic) else None
    with _lock:
        if (found := cloudpickle_adapter.class_with_id(tracker)) is not None:
            return found
        if generics and (found := generics.get_cached_generic_type_early(*generic)) is not None:
            _complete_before.add(tracker)
            return cloudpickle_adapter.remember_class(found, tracker)
        with _hooks_replaced(bases, _of_anybody, lambda owner: classmethod(_nothing)):
            made = _made(metaclass, name, bases, body, members)
        if generics:
            generics.set_cached_generic_type(generic[0], generic[1], made, *generic)
        _incomplete.add(tracker)
        return cloudpickle_adapter.remember_class(made, tracker)


def _made(metaclass: Any, name: str, bases: tuple[Any, ...], body: dict[str, Any], members: list[Any]) -> Any:
    librarys = next(kind for kind in metaclass.__mro__ if not _is_notebooks(kind) and kind.__name__ != "_TypedDictMeta")
    namespace = librarys.__prepare__(name, bases)
    namespace.update(body)
    if members:
        rest = iter(members)

        def make_member(cls: Any, *ignored: object) -> Any:
            _, arguments, value = next(rest)
            kind = cls._member_type_
            member = kind.__new__(cls, *arguments)
            if kind in _MUTABLE:
                kind.__init__(member, *arguments)
            member._value_ = value
            return member

        namespace["__new__"], namespace["__init__"] = make_member, _nothing
        for member, *_ in members:
            namespace[member] = 0
    made = librarys.__new__(metaclass, name, bases, namespace)
    librarys.__init__(made, name, bases, namespace)
    if made.__module__ != body["__module__"]:  # Enum may find its members to be unpicklable
        made.__module__ = body["__module__"]
    return made


def _set_first(set_attributes: Callable[..., object], cls: type, attributes: dict[str, Any]) -> dict[str, Any]:
    set_attributes(cls, (attributes, {}))
    return attributes


def _complete(cls: Any, state: Any) -> None:
    first, attributes, slots, set_attributes, members, _, tracker = state
    if tracker in _complete_before:
        return
    attributes = {**first, **attributes}
    with _lock:
        is_new = tracker in _incomplete
        _incomplete.discard(tracker)
        if is_new and members:
            for name in ("__init__", "__new_member__", "__reduce_ex__"):  # the first is ours, Enum sets the others
                if name in vars(cls) and name not in attributes:
                    delattr(cls, name)
        set_attributes(cls, (attributes, slots))
        for name, own in members.items():
            vars(cls.__members__[name]).update(own)
        if is_new and any(map(_of_library, _with_hook(cls.__bases__))):
            with _hooks_replaced(cls.__bases__, _is_notebooks, lambda owner: classmethod(_pass_on(owner))):
                super(cls, cls).__init_subclass__()
            set_attributes(cls, (attributes, slots))  # the notebook may have changed what the hook sets


def _is_notebooks(cls: type) -> bool:
    """Is it of the notebook? Then it travels by its parts, too."""
    return cloudpickle_adapter.class_id(cls) is not None


def _of_library(cls: type) -> bool:
    return not _is_notebooks(cls) and cls.__module__ not in sys.stdlib_module_names


def _of_anybody(cls: type) -> bool:
    return _is_notebooks(cls) or _of_library(cls)


def _with_hook(bases: Iterable[type]) -> list[type]:
    return list(dict.fromkeys(kind for base in bases for kind in base.__mro__ if _HOOK in vars(kind)))


@contextmanager
def _hooks_replaced(
    bases: Iterable[type], whose: Callable[[type], bool], replacement: Callable[[type], object]
) -> Iterator[None]:
    """``__init_subclass__`` is found by way of the bases, and called by ``type.__new__``: there is no other way to keep
    it from running."""
    before: list[tuple[type, object]] = []
    try:
        for kind in filter(whose, _with_hook(bases)):
            with suppress(TypeError):  # a type of C code
                hook = vars(kind)[_HOOK]
                type.__setattr__(kind, _HOOK, replacement(kind))
                before.append((kind, hook))
        yield
    finally:
        for kind, hook in before:
            type.__setattr__(kind, _HOOK, hook)


def _nothing(*ignored: object) -> None:
    pass


def _pass_on(owner: Any) -> Callable[[Any], None]:
    def pass_on(cls: type) -> None:
        super(owner, cls).__init_subclass__()

    return pass_on
