"""Says where a tensor is: the way to it from a variable, or what holds it if no variable leads to it.

As in _process/tensors.py, nothing here runs code of the user's classes.
"""

from __future__ import annotations

import gc
import re
import sys
import types
from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Any

from nbspawn._process.tensors import attributes, type_text
from nbspawn._protocol.frames import PACKAGE
from nbspawn._rank.program import exiting

_ELEMENTS = 100_000  # of one container, among which an object is searched for
_KEY = 40  # characters
_STEPS = 8  # from a tensor back to what holds it
_SCANNED = 500_000  # objects of the process: a step scans all, and meanwhile nothing else runs

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# model.layers.0.weight, for model._modules['layers']._modules['0']._parameters['weight']
_OF_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def way(place: tuple[object, ...]) -> str:
    """'.layers.0.weight', of the objects from a variable's value to a tensor; '' for the value itself."""
    steps = [_step(*three) for three in zip((None, *place), place, place[1:], strict=False)]
    return _OF_MODULE.sub(r".\1", "".join(steps))


def container(place: tuple[object, ...]) -> str:
    """'a list', if the tensor is directly in one."""
    return _container(type(place[-2])) if len(place) > 1 else ""


def holder(thing: object) -> str:
    """What holds an object: 'a list in class Cache', 'a dict in mylib.cache', 'a local variable of train()'. '' if the
    process has too many objects."""
    exiting.unfreeze()  # otherwise what a rank has inherited is not seen
    if len(gc.get_objects()) > _SCANNED:
        return ""
    modules = {id(attributes(module)): name for name, module in list(sys.modules.items())}
    within = ""
    known = {id(thing)}
    for _ in range(_STEPS):
        holders = _holders(thing, known)
        in_module = next((one for one in holders if id(one) in modules), None)
        if in_module is not None:
            return f"{within}{modules[id(in_module)]}.{_key(in_module, thing)}"
        if name := next(filter(None, map(_name, holders)), ""):
            return within + name
        if not holders:
            # The garbage collector does not see these.
            return f"{within}a function that runs, or native code"
        thing = holders[0]
        del holders  # it holds the thing, too
        known.add(id(thing))
        if not within and (kind := _container(type(thing))) and _owner(thing) is None:
            within = f"{kind} in "
    return within.removesuffix(" in ")


def _holders(thing: object, known: Collection[int]) -> list[object]:
    return [one for one in gc.get_referrers(thing) if id(one) not in known and not _is_own(one)]


def _step(before: object, above: Any, thing: object) -> str:
    """The step from an object to one that it leads to; ``before`` has led to the first."""
    cls = type(above)
    if issubclass(cls, dict):
        key = _key(above, thing)
        if issubclass(type(before), type) or attributes(before) is above:
            return f".{key}"
        return f"[{key!r}]" if type(key) in (str, int) and len(str(key)) <= _KEY else "[…]"
    for kind in (list, tuple):
        if issubclass(cls, kind):
            elements = enumerate(list(islice(kind.__iter__(above), _ELEMENTS)))
            return next((f"[{index}]" for index, element in elements if element is thing), "[…]")
    own = attributes(above)
    if type(own) is not dict or own is thing:  # a class has a proxy of its dict, which comes next
        return ""
    key = _key(own, thing)
    return "" if key is None else f".{key}"


def _key(above: Any, thing: object) -> Any:
    items = list(islice(dict.items(above), _ELEMENTS))  # at once: another thread may change it
    return next((key for key, value in items if value is thing), None)


def _owner(thing: object) -> object:
    """The object or class whose attributes a dict has; None if it is a dict of its own."""
    holders = gc.get_referrers(thing)
    return next((one for one in holders if issubclass(type(one), type) or attributes(one) is thing), None)


def _name(thing: Any) -> str:
    """The name of what a user knows by one; '' for containers, and for what lies between these and objects."""
    cls = type(thing)
    if issubclass(cls, type):
        return f"class {type_text(thing, '__name__')}"
    if cls is types.FunctionType:
        return f"function {thing.__name__}()"
    if cls is types.FrameType:
        return f"a local variable of {thing.f_code.co_name}()"
    if cls in _GENERATORS:
        return f"generator {thing.__name__}()"
    if cls is types.CellType or _container(cls):
        return ""
    return f"an object of class {type_text(cls, '__name__')}"


def _container(cls: type) -> str:
    return next((f"a {kind.__name__}" for kind in _CONTAINERS if issubclass(cls, kind)), "")


def _is_own(thing: Any) -> bool:
    """Is it a frame of nbspawn's? Only Python 3.10 tells those that run."""
    return type(thing) is types.FrameType and str.startswith(thing.f_code.co_filename, PACKAGE)
