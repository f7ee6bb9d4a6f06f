"""Variables as lines of bounded length: of the frame that raised, what a user would print first; and of a rank."""

from __future__ import annotations

import inspect
import math
import reprlib
import sys
import time
import types
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._process.imports import is_library
from nbspawn._protocol.questions import Variables
from nbspawn._rank.notebook import namespace

_MOST = 30  # variables
_WIDTH = 160  # characters of one value
_BUSY = 1.0  # seconds: a device that is still busy then may wait for a rank that has ended

_MOST_OF_RANK = 200  # variables
_GIVEN = {"In", "Out", "exit", "quit", "open", "get_ipython", "rank", "local_rank", "world_size"}
"""Names that IPython and nbspawn have given to every rank."""
_BORING = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def of_error(error: BaseException, cells: Iterable[str]) -> list[str]:
    """A heading and the variables of the innermost frame of the user's own code: of the notebook's ``cells`` and of
    modules that are not installed. For a cell's own line, the variables that it names. [] if the error has no such
    frame."""
    frame = _innermost(error.__traceback__, frozenset(cells))
    if frame is None:
        return []
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED:
        where, found = f"{code.co_name}()", dict(frame.f_locals)
    else:
        names = [name for name in dict.fromkeys(code.co_names) if name in frame.f_globals]
        where, found = "the failing line", {name: frame.f_globals[name] for name in names}
    found = {
        name: value for name, value in found.items() if not isinstance(value, _BORING) and not name.startswith("__")
    }
    if not found:
        return []
    width = max(map(len, found))
    lines = [f"{name.ljust(width)} = {summary(value)}" for name, value in list(found.items())[:_MOST]]
    if len(found) > _MOST:
        lines.append(f"and {len(found) - _MOST} more")
    return [f"Variables of {where}:", *(f"    {line}" for line in lines)]


def report() -> Variables:
    """The variables of this rank. May run beside the user's code, in another thread: so no code of the user's is
    called."""
    found = [
        (str.__str__(name), value)
        for name, value in list(namespace.of_rank().items())
        if not name.startswith("_") and name not in _GIVEN and not isinstance(value, _BORING)
    ]
    shown = tuple((name, summary(value, _TYPES)) for name, value in found[:_MOST_OF_RANK])
    return Variables(shown, len(found) - len(shown))


def summary(value: Any, others: reprlib.Repr | None = None) -> str:
    """One line: shape, type and statistics of a tensor or an array, or a short repr."""
    try:
        text = _tensor(value) or _array(value) or _module(value) or (others or _REPR).repr(value)
    except Exception as broken:  # a user's __repr__, a device that has failed: the error itself must still be reported
        text = f"<{type(value).__name__}: its repr raised {type(broken).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _innermost(frames: TracebackType | None, cells: frozenset[str]) -> FrameType | None:
    found = None
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file in cells or not is_library(file):
            found = frames.tb_frame
        frames = frames.tb_next
    return found


class _Repr(reprlib.Repr):
    """Summarises the elements of a list or a dict in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 100

    def repr1(self, x: Any, level: int) -> str:
        return _tensor(x) or _array(x) or super().repr1(x, level)


_REPR = _Repr()


class _Types(_Repr):
    """The type only of what is neither Python's own nor torch's: its ``__repr__`` may wait for other ranks."""

    def repr_instance(self, x: Any, level: int) -> str:
        if type(x).__module__ in ("builtins", "torch"):
            return super().repr_instance(x, level)
        return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("__main__.")


_TYPES = _Types()


def _tensor(value: Any) -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return ""
    kind = "Parameter" if isinstance(value, torch.nn.Parameter) else type(value).__name__
    shape = "×".join(map(str, value.shape)) or "scalar"
    text = f"{kind} {shape} {str(value.dtype).removeprefix('torch.')} {value.device}"
    # A subclass (DTensor) may request its values from other ranks, which do not respond any more.
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta or value.layout != torch.strided:
        return text
    if not value.numel():
        return f"{text}, empty"
    values = value.detach()
    accelerator = kinds.in_use()
    if accelerator and values.device.type == accelerator.type:
        if not _idle(accelerator.module.current_stream(values.device)):
            return f"{text}, its values not known: the device is busy"
    if values.dtype == torch.bool:
        return f"{text}: {int(values.sum())} of {values.numel()} True"
    if values.dtype.is_complex or values.is_quantized:
        return text
    try:
        low, high = (part.item() for part in values.aminmax())
        mean = values.mean(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32).item()
        return text + _statistics(values.numel(), low, high, mean, lambda: int(values.isnan().sum()))
    except Exception:  # a type without these operations (float8), a device on which an assertion has failed
        return text


def _idle(stream: Any) -> bool:
    end = time.monotonic() + _BUSY
    while not stream.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _array(value: Any) -> str:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        pandas: Any = sys.modules.get("pandas")
        if pandas is not None and isinstance(value, pandas.DataFrame):
            return f"DataFrame {value.shape[0]}×{value.shape[1]}: {', '.join(map(str, value.columns[:10]))}"
        return ""
    shape = "×".join(map(str, value.shape)) or "scalar"
    text = f"{type(value).__name__} {shape} {value.dtype}"
    if not value.size or value.dtype.kind not in "iuf":
        return text
    low, high, mean = (part.item() for part in (value.min(), value.max(), value.mean()))
    return text + _statistics(value.size, low, high, mean, lambda: int(numpy.isnan(value).sum()))


def _statistics(count: int, low: float, high: float, mean: float, nans: Callable[[], int]) -> str:
    if count == 1:
        return f": {low:.6g}"
    if math.isnan(low) or math.isnan(high):
        return f": has NaN ({nans()} of {count})"
    infinite = ", has inf" if math.isinf(low) or math.isinf(high) else ""
    return f": min {low:.4g}, mean {mean:.4g}, max {high:.4g}{infinite}"


def _module(value: Any) -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return ""
    mode = "training" if value.training else "evaluating"
    return f"{type(value).__name__}, {sum(p.numel() for p in value.parameters()):,} parameters, {mode}"
