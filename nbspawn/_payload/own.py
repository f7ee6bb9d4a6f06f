"""Objects of the kernel that a rank has of its own: its shell, its streams, builtins, the workers of its loaders.

They refer to what belongs to one process. In the stream there is a name, or what is left of them without that.
"""

from __future__ import annotations

import builtins
import functools
import io
import sys
import types
import weakref
from typing import Any

from nbspawn._payload.cloudpickle_adapter import Reducer


def reducer(kind: type, returning: bool) -> Reducer | None:
    """How objects of this type are reduced, if they are such. ``returning`` is the way from a rank to the kernel."""
    if kind is types.MethodType:
        return _method
    if issubclass(kind, io.TextIOBase):
        return _text_stream
    if returning:
        return None
    return next(
        (_BY_BASE[name] for base in kind.__mro__ if (name := (base.__module__, base.__name__)) in _BY_BASE), None
    )


def _method(method: types.MethodType) -> Any:
    """A function with `!command` in it uses the notebook's get_ipython, a method of a shell."""
    if getattr(method, "__name__", "") == "get_ipython" and hasattr(method.__self__, "user_ns"):
        return _get_ipython, ()
    return (_builtin, ("input",)) if method == builtins.input else NotImplemented


def _get_ipython() -> Any:
    ipython = sys.modules.get("IPython")  # a rank that runs a plain function does not load it
    return ipython.get_ipython if ipython is not None else type(None)


def builtin(function: types.FunctionType) -> Any:
    """How a function is reduced that tools have put beside Python's own. A namespace that ``exec`` has filled holds all
    builtins, those that a debugger has brought, and a kernel's ``input``, among them."""
    known = function.__module__ != "__main__" and vars(builtins).get(function.__name__) is function
    return (_builtin, (function.__name__,)) if known else NotImplemented


def _builtin(name: str) -> Any:
    return getattr(builtins, name, None)


def _shell(shell: Any) -> Any:
    return _own_shell, ()


def _own_shell() -> Any:
    return _get_ipython()()


def _text_stream(stream: io.TextIOBase) -> Any:
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name):
            return _own_stream, (name,)
    if isinstance(stream, io.TextIOWrapper):
        raise TypeError("an open file belongs to one process")
    return NotImplemented


def _own_stream(name: str) -> Any:
    return getattr(sys, name)


def _loader(loader: Any) -> Any:
    """Reduce a DataLoader. With ``persistent_workers`` it keeps its workers, and starts others where it has none."""
    if getattr(loader, "_iterator", None) is None:
        return NotImplemented
    make, args, state, *rest = loader.__reduce_ex__(5)
    return make, args, {**state, "_iterator": None}, *rest


def _scheduler(scheduler: Any) -> Any:
    """A new scheduler wraps its optimizer's ``step``, to warn where that is called too late, and an optimizer is
    pickled without: torch would warn that it "has been overridden"."""
    optimizer = getattr(scheduler, "optimizer", None)
    if hasattr(scheduler, "__setstate__") or not hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        return NotImplemented
    make, args, state, *rest = scheduler.__reduce_ex__(5)
    called = getattr(optimizer, "_opt_called", False)
    return make, args, (state, called), *(rest or (None, None)), _hold_optimizer


def _hold_optimizer(scheduler: Any, state: tuple[dict[str, Any], bool]) -> None:
    attributes, called = state
    vars(scheduler).update(attributes)
    optimizer = scheduler.optimizer
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    held = weakref.ref(optimizer)

    @functools.wraps(optimizer.step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer: Any = held()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step, optimizer._opt_called = counted, called


_BY_BASE: dict[tuple[str, str], Reducer] = {
    ("IPython.core.interactiveshell", "InteractiveShell"): _shell,
    ("torch.utils.data.dataloader", "DataLoader"): _loader,
    ("torch.optim.lr_scheduler", "LRScheduler"): _scheduler,
}
"""By the module and the name of the class, or of a base."""
