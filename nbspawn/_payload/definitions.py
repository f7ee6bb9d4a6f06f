"""What plain pickle writes as a name of ``__main__`` although it is neither a class nor a function: how it travels.

``functools.lru_cache`` makes such objects, and so do ``typing.NewType`` and type variables, of which cloudpickle knows
``TypeVar`` alone: the kernel finds the name, and no rank does. These travel by their parts, with an id as classes have.
An object whose own ``__reduce__`` says under which name it is to be found, because there is only one of it, is looked
for there, and made of its attributes where it is not.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from nbspawn._payload import cloudpickle_adapter, importable, originals


def is_definition(kind: type) -> bool:
    """Are objects of this type defined under a name, as classes are?"""
    return kind in _PARTS


def has_importable_name(obj: Any) -> bool:
    """Does another process find this definition in a module?"""
    module, name = getattr(obj, "__module__", ""), getattr(obj, "__qualname__", getattr(obj, "__name__", ""))
    try:
        found = module != "__main__" and operator.attrgetter(name)(sys.modules[module]) is obj
    except (KeyError, AttributeError):
        return False
    return found and importable.is_importable(module) and not originals.is_wrapper(obj)


def parts(obj: Any) -> Any:
    """How a definition is pickled."""
    make, args, state = _PARTS[type(obj)](obj)
    return _make, (make, args, cloudpickle_adapter.make_class_id(obj)), state, None, None, _set_attributes


def _make(make: Callable[..., Any], args: tuple[Any, ...], tracker: str) -> Any:
    found = cloudpickle_adapter.class_with_id(tracker)
    return cloudpickle_adapter.remember_class(make(*args), tracker) if found is None else found


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(obj, name, value)


# ---------------------------------------------------------------- each kind


def _of_cached(cached: Any) -> Any:
    state = {name: value for name, value in vars(cached).items() if name != "cache_parameters"}
    return _cached, (cached.__wrapped__, cached.cache_parameters()), state


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _of_new_type(new_type: Any) -> Any:
    name = {"__module__": new_type.__module__, "__qualname__": new_type.__qualname__}
    return typing.NewType, (new_type.__name__, new_type.__supertype__), name


def _of_variable(variable: Any) -> Any:
    options = {
        name: getattr(variable, f"__{name}__")
        for name in ("bound", "covariant", "contravariant", "infer_variance")
        if hasattr(variable, f"__{name}__")
    }
    if getattr(variable, "has_default", bool)():
        options["default"] = variable.__default__
    args = type(variable), variable.__name__, getattr(variable, "__constraints__", ()), options
    return _variable, args, {"__module__": variable.__module__}


def _variable(kind: Any, name: str, constraints: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kind(name, *constraints, **options)


_PARTS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(len)): _of_cached,
    typing.NewType: _of_new_type,
    **{
        getattr(typing, name): _of_variable
        for name in ("TypeVar", "ParamSpec", "TypeVarTuple")
        if hasattr(typing, name)
    },
}


# ---------------------------------------------------------------- one of a kind

_MARKS = {type(dataclasses.MISSING): "MISSING", type(dataclasses.KW_ONLY): "KW_ONLY"}


def is_mark(kind: type) -> bool:
    """Is the only object of this type one that dataclasses compare with?"""
    return kind in _MARKS


def reduce_mark(mark: object) -> Any:
    """Reduce a mark to its name; by itself it would be another object."""
    return getattr, (dataclasses, _MARKS[type(mark)])


def may_be_one_of_a_kind(kind: type) -> bool:
    """May ``__reduce__`` of such an object give a name? Of C code's types, none gives one of the notebook's."""
    if issubclass(kind, enum.Enum):
        return False
    return any(isinstance(getattr(kind, name), types.FunctionType) for name in ("__reduce__", "__reduce_ex__"))


def reduce_one_of_a_kind(obj: Any, returning: bool) -> Any:
    """What its ``__reduce__`` gives, unless that is a name in ``__main__``. ``returning``: on the way to the kernel."""
    reduced = obj.__reduce_ex__(5)
    if isinstance(reduced, str) and obj.__module__ == "__main__":
        return _one_of_a_kind, (reduced, type(obj), _attributes(obj), not returning)
    return reduced


def _attributes(obj: Any) -> dict[str, Any]:
    slots = [vars(kind).get("__slots__", ()) for kind in type(obj).__mro__]
    names = {name for some in slots for name in ((some,) if isinstance(some, str) else some)}
    return {name: getattr(obj, name) for name in {*names, *getattr(obj, "__dict__", ())} if hasattr(obj, name)}


def _one_of_a_kind(name: str, kind: Any, attributes: dict[str, Any], bind: bool) -> Any:
    main = sys.modules["__main__"]
    found = main.__dict__.get(name)
    if type(found) is kind:
        return found
    made = kind.__new__(kind)
    for attribute, value in attributes.items():
        object.__setattr__(made, attribute, value)
    if bind:
        main.__dict__.setdefault(name, made)
    return made
