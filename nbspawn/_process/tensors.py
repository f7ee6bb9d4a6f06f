"""Finds the tensors and arrays of a process, and the variables that lead to them. Reads nothing but metadata.

Runs beside the user's code, in another thread. It goes where the garbage collector goes (``gc.get_referents``), which
runs no code of a class: no property, ``__getattr__``, ``__iter__``, ``__eq__`` or ``repr``. For the same reason it asks
types, and not objects (``isinstance`` looks at an object's ``__class__``), and compares types by ``id``.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

# Objects that are looked at, numbers and texts not counted: a million take a second.
_MOST = 500_000
_MOST_OF_VARIABLE = 200_000
_FIRST = 10_000  # of each variable, before others may use up the rest
_OF_TENSOR = 5  # a tensor counts as so many
_MOST_OF_CONTAINER = 100_000  # elements of one list, tuple or dict
_MOST_STEPS = 60  # from a variable to the tensor that describes it

Kind = Literal["tensor", "array", "small", "closed", "other"]

_SMALL = (str, int, float, complex, bytes, type(None), type(...), range, slice)
_CLOSED = (type, types.ModuleType, types.CodeType)  # lead everywhere, and are nobody's
_CLOSED_PACKAGES = ("IPython.", "traitlets.", "ipykernel.", "nbspawn.")
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_IDS_OF_SMALL = frozenset(map(id, _SMALL))


class Piece(NamedTuple):
    """A storage, by the tensor or array by which it was found: ``key`` is its device and address; ``own`` of its
    ``size`` bytes are that tensor's. ``shared``: with other processes. ``graph``: is it the result of an operation, of
    which autograd keeps the operands?"""

    key: tuple[str, int]
    size: int
    own: int
    dtype: str
    shape: tuple[int, ...]
    shared: bool
    graph: bool


@dataclass
class Holding:
    """What one variable leads to, and none before it; sizes in bytes. ``mapped`` is memory that the notebook has sent,
    ``graphs`` counts the results of operations, ``also`` are further variables that lead to some of it. ``alike``
    counts the tensors of each dtype and shape. ``place`` are the objects from the variable's value to the
    ``largest``."""

    name: str
    size: int = 0
    count: int = 0
    gradients: int = 0
    shared: int = 0
    graphs: int = 0
    arrays: int = 0
    mapped: int = 0
    devices: dict[str, int] = field(default_factory=dict)
    also: dict[str, None] = field(default_factory=dict)
    alike: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    largest: Piece | None = None
    place: tuple[object, ...] = ()

    def add(self, piece: Piece, kind: Kind, gradient: bool, mapped: bool) -> bool:
        """Add a storage. Is it the largest so far?"""
        device, like = piece.key[0], (piece.dtype, piece.shape)
        self.size += piece.size
        self.count += 1
        self.gradients += piece.size * gradient
        self.shared += piece.size * piece.shared
        self.graphs += piece.graph
        self.arrays += kind == "array"
        self.mapped += piece.size * mapped
        self.devices[device] = self.devices.get(device, 0) + piece.size
        self.alike[like] = self.alike.get(like, 0) + 1
        if self.largest is not None and piece.size <= self.largest.size:
            return False
        self.largest = piece
        return True


_Ways = deque[tuple[object, int, bool]]
"""Objects to look at, each with the id of the one that leads to it (0: none), and whether it is a gradient."""


class Walk:
    """Through variables, one after another: what one has led to is not counted for the next. ``passed_by`` are not gone
    into: the variables' own dict. ``mapped`` are addresses of memory that the notebook has sent.

    Every object is held until the walk is over, or its id might become another one's.
    """

    def __init__(self, passed_by: Iterable[object] = (), mapped: Sequence[tuple[int, int]] = ()) -> None:
        self.holdings: dict[str, Holding] = {}
        self.partial = False
        """Were there more objects than are looked at?"""
        self._mapped = mapped
        self._left = _MOST
        self._owners: dict[tuple[str, int], str] = {}
        """The variable that each storage is counted for."""
        self._seen: dict[int, tuple[object, int]] = {id(thing): (thing, 0) for thing in passed_by}
        """By id: the object, and the id of the one that has led to it (0: none)."""
        self._leads: dict[int, str] = {}
        """The ids of objects that lead to storages, and the variable that these are counted for."""
        self._kinds: dict[int, tuple[type, Kind]] = {}

    def follow(self, variables: Iterable[tuple[str, object]]) -> None:
        """Go through these variables."""
        every = []
        for name, value in variables:
            every.append((name, deque([(value, 0, False)])))
            self._go(*every[-1], _FIRST)
        for name, ways in every:
            self._go(name, ways, _MOST_OF_VARIABLE)
            self.partial |= bool(ways)

    def _go(self, name: str, ways: _Ways, most: int) -> None:
        """The shortest ways first: they name the tensors."""
        holding = self.holdings.setdefault(name, Holding(name))  # a function that calls itself has its variables twice
        left = most = min(most, self._left)
        largest = 0
        while ways and left > 0:
            thing, parent, gradient = ways.popleft()
            number = id(thing)
            if number in self._seen:
                if number in self._leads:
                    self._lead(parent, self._leads[number], name)
                continue
            kind = self._kind(type(thing))
            if kind == "closed" and parent:
                continue
            self._seen[number] = thing, parent
            left -= 1 if kind == "other" else _OF_TENSOR
            if (piece := _piece(thing, kind)) is not None:
                if piece.key not in self._owners and holding.add(piece, kind, gradient, self._is_mapped(piece)):
                    largest = number
                self._lead(number, self._owners.setdefault(piece.key, name), name)
            inside, whole = _inside(thing)
            large = [(one, number, False) for one in inside if id(type(one)) not in _IDS_OF_SMALL]
            ways.extend(large)
            self.partial |= bool(large) and not whole  # what follows after as many numbers is numbers, too
            if kind == "tensor" and (found := _gradient(thing)) is not None:
                ways.append((found, number, True))
        self._left -= most - left
        if largest:
            holding.place = self._place(largest)

    def unreached(self) -> tuple[Holding, object]:
        """What no variable has led to, and the largest tensor of it; nothing if not all objects were looked at. (The
        garbage collector does not know numpy's arrays.)"""
        holding, largest = Holding(""), None
        objects = [] if self.partial else gc.get_objects()
        classes = {id(cls): cls for cls in map(type, objects)}
        of_tensors = {number for number, cls in classes.items() if self._kind(cls) == "tensor"}
        for thing in objects:
            if id(type(thing)) not in of_tensors or id(thing) in self._seen:
                continue
            piece = _piece(thing, "tensor")
            if piece is not None and piece.key not in self._owners:
                self._owners[piece.key] = ""
                if holding.add(piece, "tensor", False, self._is_mapped(piece)):
                    largest = thing
        return holding, largest

    def _is_mapped(self, piece: Piece) -> bool:
        device, address = piece.key
        return device == "cpu" and any(start <= address < end for start, end in self._mapped)

    def _lead(self, number: int, owner: str, name: str) -> None:
        """Note that this object, which ``name`` has led to, leads to a storage that is counted for ``owner``."""
        if owner != name:
            self.holdings[owner].also[name] = None
        while number and number not in self._leads:
            self._leads[number] = owner
            number = self._seen[number][1]

    def _place(self, number: int) -> tuple[object, ...]:
        found: list[object] = []
        while number and len(found) < _MOST_STEPS:
            thing, number = self._seen[number]
            found.append(thing)
        return tuple(reversed(found))

    def _kind(self, cls: type) -> Kind:
        if (known := self._kinds.get(id(cls))) is None:
            known = self._kinds[id(cls)] = cls, _kind(cls)
        return known[1]


def _kind(cls: type) -> Kind:
    # Another thread may be importing these.
    if issubclass(cls, getattr(sys.modules.get("torch"), "Tensor", ())):
        return "tensor"
    if issubclass(cls, getattr(sys.modules.get("numpy"), "ndarray", ())):
        return "array"
    if issubclass(cls, _SMALL):
        return "small"
    if issubclass(cls, _CLOSED) or type_text(cls, "__module__").startswith(_CLOSED_PACKAGES):
        return "closed"
    return "other"


def type_text(cls: type, name: str) -> str:
    """``__name__`` or ``__module__`` of a class, whatever its metaclass says."""
    value = vars(type)[name].__get__(cls)
    return str.__str__(value) if issubclass(type(value), str) else ""


def attributes(thing: object) -> Any:
    """An object's attributes; None if it has no dict of them."""
    for cls in vars(type)["__mro__"].__get__(type(thing)):
        slot = vars(type)["__dict__"].__get__(cls).get("__dict__")
        if type(slot) in _SLOTS:  # and no property
            return slot.__get__(thing)
    return None


def _inside(thing: object) -> tuple[list[Any], bool]:
    """What an object leads to, and whether that is all."""
    cls = type(thing)
    for base, values in _CONTAINERS:
        if issubclass(cls, base) and base.__len__(thing) > _MOST_OF_CONTAINER:
            return list(islice(values(thing), _MOST_OF_CONTAINER)), False
    found = gc.get_referents(thing)
    if cls is types.FrameType:  # of a traceback; its callers are the shell's
        found = [one for one in found if type(one) is not types.FrameType]
    return found, True


_CONTAINERS: tuple[tuple[Any, Any], ...] = ((list, list.__iter__), (tuple, tuple.__iter__), (dict, dict.values))


def _piece(thing: Any, kind: Kind) -> Piece | None:
    if kind == "tensor":
        return _of_tensor(thing)
    return _of_array(thing) if kind == "array" else None


def _of_tensor(tensor: Any) -> Piece | None:
    """The storage of a tensor; None of one without memory of its own (on the device meta, a DTensor, which has a local
    one), or without a storage (a sparse one, which has two)."""
    import torch

    get = functools.partial(_get, torch.Tensor, tensor)
    with torch._C.DisableTorchFunction():
        try:
            storage = get("untyped_storage")()
            size = storage.nbytes()
            address = storage.data_ptr() if size and storage.device.type != "meta" else 0
        except RuntimeError:
            return None
        if not address:
            return None
        dtype, device = get("dtype"), get("device")
        own = get("numel")() * dtype.itemsize
        shared = device.type == "cpu" and storage.is_shared()
        graph = get("requires_grad") and not get("is_leaf")
        shape = tuple(get("shape"))
    return Piece((str(device), address), size, own, str(dtype).removeprefix("torch."), shape, shared, graph)


def _gradient(tensor: Any) -> object:
    import torch

    with torch._C.DisableTorchFunction():
        return _get(torch.Tensor, tensor, "grad") if _get(torch.Tensor, tensor, "is_leaf") else None


def _of_array(array: Any) -> Piece | None:
    """The memory of an array; None of a file that is mapped, which takes no memory, and of what has no elements."""
    import numpy

    get = functools.partial(_get, numpy.ndarray)
    base, owner = array, array
    while issubclass(type(base), numpy.ndarray):
        if issubclass(type(base), numpy.memmap):
            return None
        owner, base = base, get(base, "base")
    address, size = get(owner, "__array_interface__")["data"][0], get(owner, "nbytes")
    if not size:
        return None
    dtype, own, shape = str(get(array, "dtype")), get(array, "nbytes"), get(array, "shape")
    return Piece(("cpu", address), size, own, dtype, shape, False, False)


def _get(cls: type, thing: object, name: str) -> Any:
    """An attribute as this class has it, whatever a subclass makes of it."""
    return getattr(cls, name).__get__(thing)
