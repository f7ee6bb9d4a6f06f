"""The notebook's settings that every rank begins with: read in the kernel, set in the rank.

A rank is a new process, and all that is not named here is its own. The README lists what is (a test compares).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from nbspawn._protocol.settings import Filter, Settings
from nbspawn._rank import loggers
from nbspawn._rank.after_import import after_import


def read() -> Settings:
    """Those of this process and, for what torch keeps for each thread, of this thread. About half a millisecond."""
    return Settings(
        {name: get() for name, (get, _) in _torch().items()},
        _numpy() if "numpy" in sys.modules else {},
        _pandas() if "pandas" in sys.modules else {},
        tuple(_described(one) for one in warnings.filters),
        loggers.read(),
    )


def put(settings: Settings) -> None:
    """Set them in this process; those of a library that is not imported yet, when it is."""
    for name, (get, put_one) in _torch().items():
        if name in settings.torch and settings.torch[name] != get():
            put_one(settings.torch[name])
    if settings.numpy:
        after_import("numpy", lambda: sys.modules["numpy"].set_printoptions(**settings.numpy))
    if settings.pandas:
        after_import("pandas", lambda: _put_pandas(settings.pandas))
    _put_warnings(settings.warnings)
    loggers.put(settings.logging)


# ---------------------------------------------------------------- torch


def _torch() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How each is read and set."""
    torch: Any = sys.modules["torch"]
    form = torch._tensor_str.PRINT_OPTS
    return {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (_default_device, torch.set_default_device),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "deterministic algorithms": (
            torch.get_deterministic_debug_mode,  # 0, 1 (warn only) or 2
            torch.set_deterministic_debug_mode,
        ),
        "cuDNN benchmark": (
            lambda: torch.backends.cudnn.benchmark,
            lambda flag: setattr(torch.backends.cudnn, "benchmark", flag),
        ),
        "cuDNN deterministic": (
            lambda: torch.backends.cudnn.deterministic,
            lambda flag: setattr(torch.backends.cudnn, "deterministic", flag),
        ),
        "matmul precision": (_matmul_precision, torch.set_float32_matmul_precision),
        "print options": (lambda: dict(vars(form)), lambda options: vars(form).update(options)),
    }


def _default_device() -> str | None:
    """Not by torch.get_default_device(), which makes a tensor on it: that would initialise CUDA in the kernel. A GPU
    is each rank's own, as a tensor's is."""
    torch: Any = sys.modules["torch"]
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if context is None:
        return None
    return "cuda" if context.device.type == "cuda" else str(context.device)


def _matmul_precision() -> str | None:
    torch: Any = sys.modules["torch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of the function, whoever reads
        try:
            return str(torch.get_float32_matmul_precision())
        except RuntimeError:  # the notebook has set it by torch.backends' newer fp32_precision
            return None


# ---------------------------------------------------------------- numpy, pandas


def _numpy() -> dict[str, Any]:
    numpy: Any = sys.modules["numpy"]
    if not hasattr(numpy, "get_printoptions"):  # its import has failed, or has not ended
        return {}
    options: dict[str, Any] = numpy.get_printoptions()
    return {name: value for name, value in options.items() if name not in ("formatter", "override_repr")}


def _pandas() -> dict[str, Any]:
    """Those that differ from their defaults."""
    try:
        from pandas._config import config
    except ImportError:
        return {}
    found = {}
    for name, option in config._registered_options.items():
        if name.startswith("display.") and name not in config._deprecated_options:
            value = config.get_option(name)
            if value != option.defval and isinstance(value, (str, int, float, bool, type(None))):
                found[name] = value
    return found


def _put_pandas(options: dict[str, Any]) -> None:
    for name, value in options.items():
        sys.modules["pandas"].set_option(name, value)


# ---------------------------------------------------------------- warnings


def _described(one: Any) -> Filter:
    action, message, category, module, line = one
    pattern = [text if isinstance(text, (str, type(None))) else text.pattern for text in (message, module)]
    return action, pattern[0] or "", f"{category.__module__}:{category.__qualname__}", pattern[1] or "", line


def _put_warnings(filters: tuple[Filter, ...]) -> None:
    """All of them, in the same order. One whose category is not known yet comes first when that has been imported."""
    warnings.resetwarnings()
    for one in filters:
        if _category(one[2]) is not None:
            _add(one, last=True)
        elif (module := one[2].partition(":")[0]) not in sys.modules:
            after_import(module, partial(_add, one, last=False))


def _add(one: Filter, last: bool) -> None:
    action, message, named, module, line = one
    category = _category(named)
    if category is not None:
        warnings.filterwarnings(action, message, category, module, line, append=last)  # type: ignore[arg-type]


def _category(named: str) -> type[Warning] | None:
    module, _, name = named.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Warning) else None
