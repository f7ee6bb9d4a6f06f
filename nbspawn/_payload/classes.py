"""Which class an object has after its travel: found under another name, the kernel's own, or one for all ranks.

cloudpickle writes a class by its name, or, if it is not to be found under that, as its parts with an id: who has a
class of that id takes that, and sets its attributes to those that came. That does not do for these kinds of classes:

- one of C code that gives itself a wrong name cannot be taken apart. A module may have it under another name.
- one that the kernel has would come back from a rank with the rank's copies of its methods. So its id alone comes back.
- one that each rank has made itself, of the same statement of a cell, has an id of its own in each rank, and in the
  kernel there would be as many. Its id is made from its content.

How a class is made of its parts is in _payload/making.py. Functions with a cache, type variables and the like have an
id as classes do (_payload/definitions.py).
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from nbspawn._payload import cloudpickle_adapter, definitions, importable, making

_kernels: set[str] = set()  # in a rank: cloudpickle's ids of the classes that the kernel has


def reduce(cls: type, by_default: Callable[[type], Any], digest: Callable[[object], str] | None) -> Any:
    """How this class is pickled. On the way back from a rank, ``digest`` distinguishes classes by what is pickled of
    them."""
    if cls.__module__ == "builtins" or cloudpickle_adapter.is_pickled_by_name(cls):
        return by_default(cls)
    if named := _other_name(cls):
        return _attribute, named
    return _of_kernel(cls, digest) or making.parts(cls, by_default(cls))


def reduce_definition(obj: Any, digest: Callable[[object], str] | None) -> Any:
    """How to pickle what _payload/definitions.py knows, as ``reduce`` does for classes."""
    if definitions.has_importable_name(obj):
        return NotImplemented
    return _of_kernel(obj, digest) or definitions.parts(obj)


def _of_kernel(obj: Any, digest: Callable[[object], str] | None) -> Any:
    if digest is None:
        return None
    if cloudpickle_adapter.class_id(obj) is None:
        # Of all that is pickled of it: the kernel sets the attributes of classes of one id to those that came last, so
        # classes with anything different must stay apart.
        cloudpickle_adapter.set_class_id(obj, lambda: digest(obj))
    tracker = cloudpickle_adapter.class_id(obj)
    name = f"the class {obj.__qualname__}" if isinstance(obj, type) else obj.__name__
    return (_kernels_own, (tracker, name)) if tracker in _kernels else None


def track_classes(namespace: Mapping[str, object]) -> None:
    """Before a fork: let instances of the notebook's classes come back from the ranks as instances of those classes."""
    value: Any
    seen: set[str] = set()
    found = list(namespace.values())
    for value in found:  # it grows: nested classes
        # Not isinstance, which asks a proxy for its class: it may connect to a server first.
        if issubclass(type(value), type) or definitions.is_definition(type(value)):
            with suppress(Exception):  # a metaclass may raise whatever it is asked
                if value.__module__ == "__main__" and (known := cloudpickle_adapter.make_class_id(value)) not in seen:
                    seen.add(known)
                    found += vars(value).values()
    _kernels.update(seen)


@contextmanager
def new_classes_are_the_kernels(namespace: dict[str, Any]) -> Iterator[None]:
    """In a rank: what the kernel sends is the kernel's; classes that a cell makes in the rank are not. A class that
    comes with an object of its own gets its name in ``namespace`` if that is free, or in its module: plain pickle,
    which torch.save and broadcast_object_list use, looks for it there."""
    before = set(cloudpickle_adapter.classes_by_id())
    try:
        yield
    finally:  # classes that came before it failed, or was stopped, come no more
        known = cloudpickle_adapter.classes_by_id()
        for tracker in set(known) - before:
            _kernels.add(tracker)
            module = known[tracker].__module__
            name = getattr(known[tracker], "__qualname__", known[tracker].__name__)
            if "." not in name and module == "__main__":
                namespace.setdefault(name, known[tracker])
            elif "." not in name and module not in sys.modules:
                importable.add(module, name, known[tracker])


def _kernels_own(tracker: str, name: str) -> Any:
    found = cloudpickle_adapter.class_with_id(tracker)
    if found is None:
        raise LookupError(f"the notebook has no longer {name} that the rank was sent")
    return found


def _other_name(cls: type) -> tuple[str, str] | None:
    """The module and the name under which a class of C code can be imported: torch's SDPBackend calls itself
    _SDPBackend. One with Python code in it can travel in its parts: a module may have got it while the kernel ran."""
    if cls.__module__ == "__main__" or any(isinstance(part, types.FunctionType) for part in vars(cls).values()):
        return None
    if not importable.is_importable(cls.__module__):
        return None
    for module in (sys.modules.get(cls.__module__), *list(sys.modules.values())):
        name = module.__name__ if isinstance(module, types.ModuleType) else ""
        if sys.modules.get(name) is module and not name.startswith("__"):
            for attribute, value in list(vars(module).items()):
                if value is cls:
                    return name, attribute
    return None


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
