"""A value as its parts: each tensor, number and string in it, with its path, as entries that ranks can compare.

What torch keeps in a class of its own is taken apart as a user knows it: a module into parameters and buffers, an
optimizer into ``.state`` and ``.param_groups``, anything else with a ``state_dict()`` into that. Nothing here asks
other ranks: of a sharded tensor it is this rank's part.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import math
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nbspawn._payload.diagnosis import one_line
from nbspawn._protocol.value_digests import Entry
from nbspawn._rank.compare import members
from nbspawn._rank.compare.digests import Contents, Numbers

MOST = 100_000
"""Entries of one value."""
_DEEPEST = 32
_TEXT = 80  # characters
_FLAT = "a flat shard of FSDP1, in each rank another"

Leaf = tuple[Entry, Numbers | Contents | None]


def leaves(value: Any) -> Iterator[Leaf]:
    """The entries of a value, what contains others before these, each with the data of which it tells."""
    return _Walk().parts("", value)


class _Walk:
    def __init__(self) -> None:
        self._above: list[int] = []  # ids of what contains the current value

    def parts(self, path: str, value: Any) -> Iterator[Leaf]:
        """The entries of a value at this path."""
        if id(value) in self._above:
            levels = len(self._above) - self._above.index(id(value))
            yield Entry(path, f"the {type(value).__name__} that it is in, {levels} above"), None
        elif len(self._above) >= _DEEPEST:
            yield _unreadable(path, f"nested more than {_DEEPEST} levels deep")
        else:
            self._above.append(id(value))
            try:
                yield from self._taken_apart(path, value)
            except Exception as error:  # of the user's classes; a tensor without memory, a type that torch cannot read
                yield _unreadable(path, one_line(error))
            finally:
                self._above.pop()

    def _taken_apart(self, path: str, value: Any) -> Iterator[Leaf]:
        numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            yield from self._tensor(path, value)
        elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            yield from self._array(path, value, numpy)
        elif isinstance(value, (type, types.ModuleType)):
            yield _named(path, kind, value)
        elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            yield from self._function(path, kind, value)
        elif (data := _scalar(value)) is not None:
            yield _leaf(path, kind, data, _short(value))
            if not isinstance(value, enum.Enum):
                yield from self._more(path, value)
        elif pandas is not None and isinstance(value, (pandas.Series, pandas.Index, pandas.DataFrame)):
            yield from self._table(path, value, pandas)
        elif isinstance(value, torch.Generator):
            yield from self._inside(path, f"Generator on {value.device.type}", [(".get_state()", value.get_state())])
        elif isinstance(value, torch.nn.Module):
            named = [*value.named_parameters(), *value.named_buffers(), *_extra_states(value)]
            yield from self._inside(path, kind, [(f".{name}", tensor) for name, tensor in named])
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._optimizer(path, value)
        elif isinstance(value, Mapping):
            keys = list(value)
            items = [(f"[{members.named_by(key, number)}]", value[key]) for number, key in enumerate(keys)]
            others = [(f".keys()[{number}]", key) for number, key in enumerate(keys) if not members.is_plain(key)]
            yield from self._inside(path, kind, [*items, *others, *members.attributes(value)])
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [(f".{name}", element) for name, element in zip(value._fields, value, strict=True)]
            yield from self._inside(path, kind, [*items, *members.attributes(value)])
        elif isinstance(value, (list, tuple, collections.deque)):
            items = [(f"[{number}]", element) for number, element in enumerate(value)]
            if isinstance(value, collections.deque):
                kind += f" of at most {value.maxlen}" if value.maxlen is not None else ""
            yield from self._inside(path, kind, [*items, *members.attributes(value)])
        elif isinstance(value, (set, frozenset)):
            together = b"".join(sorted(self._digest(element) for element in value))
            shown = (
                "{" + ", ".join(sorted(map(_short, value))) + "}" if len(value) < _TEXT else f"{len(value)} elements"
            )
            yield _leaf(path, kind, Contents(together), _cut(shown))
            yield from self._more(path, value)
        elif callable(getattr(type(value), "state_dict", None)):
            yield from self._inside(path, kind, [(".state_dict()", value.state_dict())])
        else:
            yield from self._object(path, kind, value)

    def _function(self, path: str, kind: str, function: Any) -> Iterator[Leaf]:
        """A digest of a function by its name; of one that is not to be found under that also by its code, and what it
        brings along. Not by the globals that it uses."""
        yield _named(path, kind, function)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            yield from self.parts(f"{path}.__self__", owner)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or members.is_importable(function):
            return
        yield _leaf(f"{path}.__code__", "code", Contents(self._digest(members.contents_of(function.__code__))))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        items = [(f"__closure__[{name!r}]", cell.cell_contents) for name, cell in cells if members.is_bound(cell)]
        items += [(name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__", "__dict__")]
        for name, brought in items:
            if name.startswith("__closure__") or brought:
                yield from self.parts(f"{path}.{name}", brought)

    def _object(self, path: str, kind: str, value: Any) -> Iterator[Leaf]:
        """A digest of an object by what it would be made of again:
        https://docs.python.org/3/library/pickle.html#object.__reduce__"""
        if members.has_no_other_state(type(value)):
            yield from self._inside(path, kind, members.attributes(value))
            return
        reducer = copyreg.dispatch_table.get(type(value))
        made: Any = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        if isinstance(made, str):
            yield _leaf(path, kind, Contents(made.encode()), _cut(made))
            # A function of the notebook under lru_cache: by what it wraps, too.
            if hasattr(value, "__qualname__") and not members.is_importable(value):
                yield from self._more(path, value)
            return
        function, arguments, state, elements, pairs = (*made, None, None, None)[:5]
        if state is None and elements is None and pairs is None and all(_scalar(one) is not None for one in arguments):
            yield _leaf(path, kind, Contents(self._digest((_qualified(function), arguments))), _short(value))
            return
        items = [(f".__reduce__()[1][{number}]", argument) for number, argument in enumerate(arguments)]
        items = [(".__reduce__()[0]", function), *items, (".__reduce__()[2]", state)]
        items += [(f"[{number}]", element) for number, element in enumerate(elements or ())]
        items += [(f"[{members.named_by(key, number)}]", element) for number, (key, element) in enumerate(pairs or ())]
        yield from self._inside(path, kind, items)

    def _more(self, path: str, value: Any) -> Iterator[Leaf]:
        """What else a subclass of a builtin type has."""
        for name, attribute in members.attributes(value):
            yield from self.parts(path + name, attribute)

    def _inside(self, path: str, kind: str, items: Iterable[tuple[str, Any]]) -> Iterator[Leaf]:
        yield Entry(path, kind, leaf=False), None
        for name, element in members.numbered(items):
            yield from self.parts(path + name, element)

    def _digest(self, value: Any) -> bytes:
        """A digest of a value as a whole, for what has no order."""
        found = [entry for entry, _ in self.parts("", value)]
        if why := next((entry.skipped for entry in found if entry.skipped), ""):
            raise TypeError(why)
        each = (f"{entry.path}\0{entry.kind}\0".encode() + entry.digests for entry in found)
        return Contents(b"\0".join(each)).digests()[0]

    # ------------------------------------------------------------ of torch

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> Iterator[Leaf]:
        yield Entry(path, type(optimizer).__name__, leaf=False), None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        flat = {number for number, parameter in enumerate(parameters) if _is_flat(parameter)}
        for number in flat:
            yield Entry(f"{path}.state[{number}]", "state", skipped=_FLAT), None
        saved = optimizer.state_dict()
        for number, (key, state) in enumerate(saved.pop("state").items()):
            if key not in flat:
                yield from self.parts(f"{path}.state[{members.named_by(key, number)}]", state)
        saved["param_groups"] = optimizer.param_groups  # a state dict has the parameters' numbers only
        for name, element in saved.items():
            yield from self.parts(f"{path}.{name}", element)

    def _tensor(self, path: str, tensor: torch.Tensor) -> Iterator[Leaf]:
        kind = _kind(tensor)
        if _is_dtensor(tensor):
            yield _sharded(path, kind, tensor)
        elif _is_flat(tensor):
            yield Entry(path, _dtype(tensor), skipped=_FLAT), None
        elif tensor.is_meta:
            yield Entry(path, kind, skipped="on the meta device, without contents"), None
        elif hasattr(tensor, "trigger_wait"):  # a functional collective's, which has not been waited for
            yield from self._tensor(path, tensor.trigger_wait())
        elif names := _inner(tensor):
            items = [(f".{name}", getattr(tensor, name)) for name in names]
            yield from self._inside(path, f"{type(tensor).__name__} of {_dtype(tensor)}", items)
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            yield from self._inside(path, kind, [(f".{name}()", part) for name, part in _of_layout(tensor)])
        else:
            with torch._C.DisableTorchFunctionSubclass():
                yield _leaf(path, kind, Numbers(tensor.as_subclass(torch.Tensor)), _value(tensor))

    # ------------------------------------------------------------ of numpy and pandas

    def _array(self, path: str, value: Any, numpy: Any) -> Iterator[Leaf]:
        if isinstance(value, numpy.ma.MaskedArray):
            mask = numpy.ma.getmaskarray(value)
            named = [(".mask", mask), (".filled(0)", numpy.ma.filled(value, numpy.zeros((), value.dtype)[()]))]
            yield from self._inside(path, f"masked {value.dtype}", named)
            return
        array, text = numpy.asarray(value), _short(value.item()) if value.size == 1 else ""
        kind = f"{array.dtype}[{', '.join(map(str, array.shape))}] array" if array.ndim else str(array.dtype)
        if array.dtype.names:
            fields = [(f"[{name!r}]", array[name].copy()) for name in array.dtype.names]  # torch takes no such strides
            yield from self._inside(path, kind, fields)
        elif array.dtype.kind in "biufc":
            usable = numpy.asarray(array, array.dtype.newbyteorder("="), order="C")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
                numbers = Numbers(torch.from_numpy(usable))
            yield _leaf(path, kind, numbers, text)
        elif array.dtype.kind in "OT":  # strings of any length are not in the array itself
            yield from self._inside(path, kind, [(".tolist()", array.tolist())])
        else:
            yield _leaf(path, kind, Contents(array.tobytes()), text)
        if type(value).__module__.partition(".")[0] != "numpy":
            yield from self._more(path, value)

    def _table(self, path: str, table: Any, pandas: Any) -> Iterator[Leaf]:
        labels = {}
        if isinstance(table, pandas.DataFrame):
            yield Entry(path, f"DataFrame[{len(table)}, {len(table.columns)}]", leaf=False), None
            columns = [(f"[{members.named_by(name, n)}]", table.iloc[:, n]) for n, name in enumerate(table.columns)]
            labels[".columns"] = table.columns
        elif isinstance(table, pandas.MultiIndex):
            yield Entry(path, f"MultiIndex[{len(table)}]", leaf=False), None
            columns = [(f".get_level_values({n})", table.get_level_values(n)) for n in range(table.nlevels)]
            labels[".names"] = list(table.names)
        else:
            columns = [("", table)]
            labels[".name"] = table.name
        for name, column in members.numbered(columns):
            yield from self._column(path + name, column, pandas)
        if not isinstance(table, pandas.Index):
            labels |= {".index": table.index, ".attrs": table.attrs or None}
        for name, label in labels.items():
            if label is not None:
                yield from self.parts(path + name, label)

    def _column(self, path: str, column: Any, pandas: Any) -> Iterator[Leaf]:
        """A digest of a column without its index: by a hash of each row, which of objects other than strings is only of
        their text."""
        kind = f"{type(column).__name__} {column.dtype}[{len(column)}]"
        if column.dtype == object and pandas.api.types.infer_dtype(column, skipna=False) != "string":
            yield from self._inside(path, kind, [(".tolist()", column.tolist())])
            return
        hashed = pandas.util.hash_pandas_object(column, index=False)
        yield _leaf(path, kind, Contents(hashed.to_numpy()))
        if isinstance(column.dtype, pandas.CategoricalDtype):
            yield from self.parts(f"{path}.dtype.categories", column.dtype.categories)
            yield from self.parts(f"{path}.dtype.ordered", column.dtype.ordered)


def _leaf(path: str, kind: str, data: Numbers | Contents, text: str = "") -> Leaf:
    digests, statistics = data.digests()
    return Entry(path, kind, digests, text, data.nbytes, data.dtype, data.shape, statistics), data


def _unreadable(path: str, why: str) -> Leaf:
    return Entry(path, "", skipped=_cut(why)), None


def _named(path: str, kind: str, value: Any) -> Leaf:
    text = _qualified(value)
    return _leaf(path, kind, Contents(text.encode()), _cut(text))


def _qualified(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".lstrip(".")


def _scalar(value: Any) -> Numbers | Contents | None:
    """The data of a plain value; None for any other."""
    if isinstance(value, enum.Enum):
        return Contents(f"{type(value).__qualname__}.{members.member(value)}".encode())
    if isinstance(value, (bool, type(None))):
        return Contents(str(value).encode())
    if isinstance(value, int):
        small = -(2**63) <= value < 2**63
        return Numbers(torch.tensor(value, dtype=torch.int64, device="cpu")) if small else Contents(hex(value).encode())
    if isinstance(value, float):
        return Numbers(torch.tensor(value, dtype=torch.float64, device="cpu"))
    if isinstance(value, complex):
        return Numbers(torch.tensor(value, dtype=torch.complex128, device="cpu"))
    if isinstance(value, str):
        return Contents(value.encode(errors="surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Contents(bytes(value))
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return Contents(str(value).encode())
    return None


def _extra_states(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{name}.get_extra_state()".lstrip("."), part.get_extra_state()


def _kind(tensor: Any) -> str:
    shape = ", ".join(map(str, tensor.shape))
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    layout = "" if tensor.layout is torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{_dtype(tensor)}[{shape}]{layout}{device}"


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _value(tensor: torch.Tensor) -> str:
    return _short(tensor.item()) if tensor.numel() == 1 else ""


def _inner(tensor: Any) -> list[str]:
    """The names of the tensors that a subclass consists of, as torch.compile takes it apart (torchao's, nested)."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return []
    names: list[str] = tensor.__tensor_flatten__()[0]
    return names


def _of_layout(tensor: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a tensor that is not one block of memory, each by the name of the method that gives it."""
    if tensor.is_quantized:
        yield "int_repr", tensor.int_repr()
        channels = tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        names = ["q_per_channel_scales", "q_per_channel_zero_points"] if channels else ["q_scale", "q_zero_point"]
    elif tensor.layout is torch.sparse_coo:
        tensor, names = tensor.coalesce(), ["indices", "values"]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ["crow_indices", "col_indices", "values"]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ["ccol_indices", "row_indices", "values"]
    else:
        names = ["to_dense"]
    for name in names:
        yield name, getattr(tensor, name)()


def _is_flat(tensor: Any) -> bool:
    """Is it a parameter that FSDP1 has put into a flat one, or that?"""
    return getattr(tensor, "_fsdp_flattened", False) or type(tensor).__name__ == "FlatParameter"


def _is_dtensor(tensor: Any) -> bool:
    modules = (
        sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "_tensor")
    )  # the latter in torch 2.4
    return any(isinstance(tensor, getattr(module, "DTensor", ())) for module in modules)


def _sharded(path: str, kind: str, tensor: Any) -> Leaf:
    """A DTensor: by this rank's part of it, which other ranks may have, too."""
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes = "×".join(str(mesh.size(dimension)) for dimension in range(mesh.ndim))
    kind = f"{kind} {', '.join(map(repr, placements))} over a mesh of {sizes}"
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Entry(path, kind, skipped="this rank is not in its mesh"), None
    if any(placement.is_partial() for placement in placements):
        return Entry(path, kind, skipped="its placement is Partial: each rank has another summand"), None
    sharded = [dimension for dimension, placement in enumerate(placements) if not placement.is_replicate()]
    local = Numbers(tensor.to_local())
    entry, _ = _leaf(path, kind, local, "")
    part = ", ".join(str(coordinate[dimension]) for dimension in sharded)
    return entry._replace(part=part, parts=math.prod(mesh.size(dimension) for dimension in sharded)), local


def _short(value: Any) -> str:
    if isinstance(value, (str, bytes)):
        return _cut(repr(value[: 2 * _TEXT]))
    return _cut(hex(value) if isinstance(value, int) and abs(value) >= 2**63 else repr(value))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"
