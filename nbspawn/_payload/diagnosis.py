"""Which part of a variable cannot travel to another process, and what the user can do about it.

Only ever run after pickling has failed: it pickles part after part, into nowhere, until no part alone is at fault.
"""

from __future__ import annotations

import dis
import os
import re
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from nbspawn._payload.pickler import Pickler

MAX_DEPTH, MAX_TRIALS = 12, 500  # how deep to look, and how many parts to try

_INSIDE = "Create it inside the cell"
RETURN_ANOTHER = "Return something that can be sent: a list of its items, numbers, text."
RETURN_MODULE = "Return what it wraps (`model.module`), or its state_dict()."
OR_FORK = ", or run with -m fork"
"""What helps on one machine only."""
SEND_MODULES = (
    "Install it on all nodes. Modules of your own are sent over SSH if they are below the current directory, and under "
    "Ray by ray.init(runtime_env={'working_dir': '.'}) before the first run."
)
_REMEDIES = {  # by type, module or package of the type or of a base of it; the most specific first
    "_io": "Open it inside the cell, so that each rank has a file of its own.",
    "_thread": f"{_INSIDE}: locks belong to one process.",
    "threading": f"{_INSIDE}: threads and what they wait for belong to one process.",
    "queue": f"{_INSIDE}, or use a queue of torch.multiprocessing.get_context('spawn').",
    "_queue": f"{_INSIDE}, or use a queue of torch.multiprocessing.get_context('spawn').",
    "concurrent": f"{_INSIDE}: executors belong to one process.",
    "builtins.generator": "Make a list of it, or create it inside the cell.",
    "builtins.async_generator": f"{_INSIDE}.",
    "builtins.coroutine": "Await it first, or inside the cell.",
    "asyncio": f"{_INSIDE}: tasks belong to one event loop.",
    "sqlite3": "Connect inside the cell.",
    "multiprocessing.pool": f"{_INSIDE}: pools belong to one process.",
    "multiprocessing": f"Create it with torch.multiprocessing.get_context('spawn'){OR_FORK}.",
    "numpy.memmap": f"The file that it maps has gone. {_INSIDE}{OR_FORK}.",
    "torch.Tensor": "Call detach() on it.",
    "torch.utils.data.dataloader": "Send the DataLoader, and call iter() on it inside the cell.",
    "torch._C._distributed_c10d": "Let each rank make its own, after init_process_group().",
    "torch.distributed": "Let each rank make its own, after init_process_group().",
}
_DEFAULT_REMEDY = f"{_INSIDE}{OR_FORK}."


class UnpicklableError(Exception):
    """``variable`` cannot travel. ``path`` leads to the part of it that cannot ("train -> lock"), ``reason`` is what
    that is, ``remedy`` what to do; ``others`` are further variables that cannot."""

    def __init__(
        self, variable: str, path: str, reason: str, remedy: str = "", others: Sequence[UnpicklableError] = ()
    ) -> None:
        super().__init__(variable, path, reason, remedy, others)
        self.variable = variable
        self.path = path
        self.reason = reason
        self.remedy = remedy
        self.others = tuple(others)

    def __str__(self) -> str:
        text = f"{self.variable} cannot travel to another process: {self.reason}. {self.remedy}".rstrip()
        if self.others:
            text += f" Neither can {', '.join(other.path for other in self.others)}."
        return text


class UnloadableError(Exception):
    """``variable`` has travelled, and cannot be loaded here, in a rank, because of ``error``."""

    def __init__(self, variable: str, error: Exception) -> None:
        super().__init__(variable, error)
        self.variable = variable
        self.error = error

    def __str__(self) -> str:
        return f"{self.variable.replace(':', '.')} cannot be loaded in a rank: {one_line(self.error)}"


def remedy_of_loading(error: str, elsewhere: bool) -> str:
    """In the kernel: what to do where a rank says this. ``elsewhere``: it is on another machine."""
    missing = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", error)
    if missing is not None:
        if elsewhere:
            return SEND_MODULES
        if file := getattr(sys.modules.get(missing[1].partition(".")[0]), "__file__", None):
            folder = os.path.dirname(os.path.dirname(file) if os.path.basename(file) == "__init__.py" else file)
            if folder not in sys.path:
                return f"The notebook has it from {folder!r}, which is not in sys.path: add it{OR_FORK}."
        return f"The notebook has it from no file that a rank could find. Import it inside the cell{OR_FORK}."
    return _DEFAULT_REMEDY.replace(OR_FORK, "") if elsewhere else _DEFAULT_REMEDY


def diagnose(
    name: str, obj: object, error: Exception, namespace: dict[str, Any] | None, returning: bool = False
) -> UnpicklableError:
    """Follow what cannot travel, part by part, down to where no part alone is at fault."""
    steps: list[str] = []
    seen = {id(obj)}
    trials = MAX_TRIALS
    while len(steps) < MAX_DEPTH:
        for step, part in islice(parts(obj), trials):
            trials -= 1
            if id(part) not in seen and (found := trial(part, namespace, returning)):
                obj, error = part, found
                seen.add(id(part))
                steps.append(step)
                break
        else:
            break
    used = "".join(steps).removeprefix(" -> ")
    what = _kind(obj)
    remedy = _remedy(type(obj))
    reason = f"it uses {used}, {what}" if steps and steps[0].startswith(" ") else f"{name}{used} is {what}"
    if remedy is None:
        reason += f" ({one_line(error)})"
    return UnpicklableError(name, name + "".join(steps), reason, remedy or _DEFAULT_REMEDY)


def trial(obj: object, namespace: dict[str, Any] | None, returning: bool = False) -> Exception | None:
    """The error of pickling ``obj``, thrown away while it is made: large buffers are not even read."""
    try:
        Pickler(namespace, returning).dump(obj, _Nowhere())
    except Exception as error:
        return error
    return None


class _Nowhere:
    def write(self, data: bytes, /) -> int:
        return len(data)


def parts(obj: Any) -> Iterator[tuple[str, object]]:
    """What ``obj`` takes along when it is pickled, each with the step that leads to it, as far as it can be looked at.

    Its class alone says what it is: a proxy that is asked (``isinstance`` asks for ``__class__``) may raise anything,
    or connect to a server first.
    """
    with suppress(Exception):
        yield from _parts(obj)


def _parts(obj: Any) -> Iterator[tuple[str, object]]:
    kind = type(obj)
    if issubclass(kind, types.FunctionType):
        for name in sorted(_global_names(obj.__code__) & obj.__globals__.keys()):
            yield f" -> {name}", obj.__globals__[name]
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                yield f" -> {name}", cell.cell_contents
        positional = obj.__code__.co_varnames[: obj.__code__.co_argcount]
        for name, default in zip(reversed(positional), reversed(obj.__defaults__ or ()), strict=False):
            yield f" -> {name}", default
        yield from ((f" -> {name}", default) for name, default in (obj.__kwdefaults__ or {}).items())
    elif issubclass(kind, types.MethodType):
        yield f" -> {obj.__name__}", obj.__func__
        yield f" -> {type(obj.__self__).__name__}", obj.__self__
    elif issubclass(kind, partial):
        yield f" -> {getattr(obj.func, '__name__', 'func')}", obj.func
        yield from ((f" -> {_key(value)}", value) for value in obj.args)
        yield from ((f" -> {name}", value) for name, value in obj.keywords.items())
    elif issubclass(kind, Mapping):
        yield from ((f"[{_key(key)}]", value) for key, value in obj.items())
    elif issubclass(kind, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif issubclass(kind, (staticmethod, classmethod)):
        yield from _parts(obj.__func__)
    elif issubclass(kind, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items() if name not in ("__dict__", "__weakref__"))
    elif _remedy(kind) is None:  # an Event is called an Event, not something with a lock in it
        yield from ((f".{name}", value) for name, value in attributes(obj).items())
        if kind.__module__ == "__main__":
            yield f" -> {kind.__name__}", kind


def attributes(obj: Any) -> dict[str, Any]:
    """The instance's own, without a call into its class: a proxy's ``__dict__`` may be a property."""
    for base in _bases(type(obj)):
        if (found := vars(base).get("__dict__")) is not None:
            native = (types.GetSetDescriptorType, types.MemberDescriptorType)
            return found.__get__(obj) if type(found) in native else {}
    return {}


def _global_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _kind(obj: Any) -> str:
    torch = sys.modules.get("torch")
    with suppress(Exception):  # as in parts()
        if torch is not None and issubclass(type(obj), torch.Tensor) and not obj.is_leaf:
            return "a tensor that autograd computed"
    name = _name(type(obj)).removeprefix("builtins.").removeprefix("__main__.")
    return f"{'an' if name.lstrip('_').startswith(tuple('aeiou')) else 'a'} {name}"


# type's own: a metaclass may raise whatever it is asked.
_bases, _module, _qualname = (vars(type)[name].__get__ for name in ("__mro__", "__module__", "__qualname__"))


def _name(kind: type) -> str:
    return f"{_module(kind)}.{_qualname(kind)}"


def _remedy(kind: type) -> str | None:
    for base in _bases(kind):
        name = _name(base)
        while name:
            if name in _REMEDIES:
                return _REMEDIES[name]
            name = name.rpartition(".")[0]
    return None


def _key(key: object) -> str:
    return reprlib.repr(key)


def one_line(error: BaseException) -> str:
    """The error's type and text; a user's ``__str__`` may raise in its turn."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:
        text = f"<its __str__ raised {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}"[:300]
