"""The notebook's settings that every rank begins with: read in the kernel, set in the rank.

They are the same whatever the start method. All that is not named here is the rank's own, or under fork inherited.
docs/guide/what_a_rank_finds.md lists what is (a test compares).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from nbspawn._carried import by_value, loggers
from nbspawn._payload import pickler
from nbspawn._process.after_import import after_import
from nbspawn._protocol.settings import Filter, Packed, Settings


def read() -> Settings:
    """The settings of this process and, where torch keeps them for each thread, of this thread. Takes half a
    millisecond."""
    found = {name: get() for name, (get, _) in _torch().items()}
    return Settings(
        torch={**found, "default device": _of_rank(found["default device"])},
        numpy=_packed(_numpy()),
        numpy_errors=_numpy_errors(),
        pandas=_packed(_pandas()),
        matplotlib=_packed(_matplotlib()),
        figures=_packed(_figures()),
        recursion_limit=sys.getrecursionlimit(),
        warnings=tuple(map(_described, warnings.filters)),
        logging=loggers.read(),
    )


def put(settings: Settings) -> None:
    """Set them in this process; those of a library that is not imported yet, when it is."""
    for name, (get, put_one) in _torch().items():
        if name in settings.torch and settings.torch[name] != get():
            put_one(settings.torch[name])
    if settings.numpy:
        after_import("numpy", lambda: _put_numpy(settings.numpy, settings.numpy_errors))
    if settings.pandas:
        after_import("pandas", lambda: _put_pandas(settings.pandas))
    if settings.matplotlib:
        after_import("matplotlib", lambda: _put_matplotlib(settings.matplotlib))
    if settings.figures:
        after_import("matplotlib_inline.config", lambda: _put_figures(settings.figures))
    if settings.recursion_limit != sys.getrecursionlimit():
        with suppress(RecursionError):  # lower than what the rank has used by now
            sys.setrecursionlimit(settings.recursion_limit)
    _put_warnings(settings.warnings)
    loggers.put(settings.logging)


def adjust(settings: Settings) -> None:
    """Set what a forked rank must not inherit; the warning filters are those of the launch. It has inherited the rest:
    to set that again takes each rank a millisecond."""
    device = settings.torch["default device"]
    if device != _default_device():
        sys.modules["torch"].set_default_device(device)
    _put_warnings(settings.warnings)
    loggers.adjust(settings.logging)


# ---------------------------------------------------------------- torch

_PRECISIONS = (  # what torch's backends have a precision of 32-bit floats for; what is general comes first
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)


def _torch() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How each is read and set."""
    torch: Any = sys.modules["torch"]
    form = torch._tensor_str.PRINT_OPTS
    cudnn = torch.backends.cudnn
    return {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (_default_device, torch.set_default_device),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "deterministic algorithms": (
            torch.get_deterministic_debug_mode,  # 0, 1 (warn only) or 2
            torch.set_deterministic_debug_mode,
        ),
        "cuDNN benchmark": (lambda: cudnn.benchmark, partial(setattr, cudnn, "benchmark")),
        "cuDNN deterministic": (lambda: cudnn.deterministic, partial(setattr, cudnn, "deterministic")),
        # These three in this order: the older names set some of what the newer ones do, and not the other way round.
        "matmul precision": (partial(_by_older_name, torch.get_float32_matmul_precision), _put_matmul_precision),
        "cuDNN allow_tf32": (partial(_by_older_name, lambda: cudnn.allow_tf32), _put_cudnn_tf32),
        "fp32_precision": (_precisions, _put_precisions),
        "print options": (lambda: dict(vars(form)), lambda options: vars(form).update(options)),
    }


def _default_device() -> str | None:
    """The default device, not by torch.get_default_device(), which makes a tensor on it: that would initialise CUDA in
    the kernel."""
    torch: Any = sys.modules["torch"]
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else str(context.device)


def _of_rank(device: str | None) -> str | None:
    """A GPU is each rank's own, as a tensor's is."""
    return "cuda" if device is not None and device.startswith("cuda") else device


def _by_older_name(get: Callable[[], Any]) -> Any:
    """What ``get`` returns; None where the notebook has set it by torch.backends' newer ``fp32_precision`` to what has
    no older name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of the function, whoever reads
        try:
            return get()
        except RuntimeError:
            return None


def _put_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        sys.modules["torch"].set_float32_matmul_precision(precision)


def _put_cudnn_tf32(allowed: bool | None) -> None:
    if allowed is not None:
        sys.modules["torch"].backends.cudnn.allow_tf32 = allowed


def _precisions() -> dict[tuple[str, str], str]:
    """Empty before torch 2.9, which has no such settings."""
    get: Any = getattr(sys.modules["torch"]._C, "_get_fp32_precision_getter", None)
    found: dict[tuple[str, str], str] = {}
    for of in _PRECISIONS if get is not None else ():
        with suppress(RuntimeError):  # torch does not know this one
            found[of] = get(*of)
    return found


def _put_precisions(wanted: Mapping[tuple[str, str], str]) -> None:
    """Set the precisions that differ: one that is not set takes after the more general one."""
    torch: Any = sys.modules["torch"]
    for of, precision in wanted.items():
        if torch._C._get_fp32_precision_getter(*of) != precision:
            torch._C._set_fp32_precision_setter(*of, precision)


# ---------------------------------------------------------------- numpy, pandas, matplotlib


def _packed(options: Mapping[str, Any]) -> dict[str, Packed]:
    """The options, each pickled by itself: some are functions, and one that cannot travel must not keep the others
    here."""
    found = {}
    for name, value in options.items():
        with suppress(Exception):  # pickling runs whatever code an object brings; the rank has its default then
            found[name] = by_value.pack(value)
    return found


def _loaded(options: Mapping[str, Packed]) -> list[tuple[str, Any]]:
    found = []
    for name, packed in options.items():
        with suppress(Exception):  # a module that the rank does not find must not spoil the import of this library
            found.append((name, by_value.load(packed)))
    return found


def _numpy() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")
    if not hasattr(numpy, "get_printoptions"):  # not imported, or its import has failed or has not ended
        return {}
    options: dict[str, Any] = numpy.get_printoptions()
    return options


def _numpy_errors() -> dict[str, str]:
    """What numpy does about floating-point errors, but for what needs a function of the notebook's."""
    numpy: Any = sys.modules.get("numpy")
    found = numpy.geterr() if hasattr(numpy, "geterr") else {}
    return {name: action for name, action in found.items() if action not in ("call", "log")}


def _put_numpy(options: Mapping[str, Packed], errors: Mapping[str, str]) -> None:
    wanted = dict(_loaded(options))
    if wanted != _numpy():
        sys.modules["numpy"].set_printoptions(**wanted)
    sys.modules["numpy"].seterr(**errors)


def _pandas() -> dict[str, Any]:
    """pandas' options that differ from their defaults."""
    if "pandas" not in sys.modules:
        return {}
    try:
        from pandas._config import config
    except ImportError:
        return {}
    found = {}
    for name, option in config._registered_options.items():
        if name not in config._deprecated_options:
            value = config.get_option(name)
            if value is not option.defval and value != option.defval:
                found[name] = value
    return found


def _put_pandas(options: Mapping[str, Packed]) -> None:
    for name, value in _loaded(options):
        with suppress(KeyError, ValueError):  # another library has registered it
            sys.modules["pandas"].set_option(name, value)


_OF_FRONT_END = ("backend", "backend_fallback", "interactive")


def _matplotlib() -> dict[str, Any]:
    """The rcParams that differ from those of the user's matplotlibrc, which a rank reads, too."""
    matplotlib: Any = sys.modules.get("matplotlib")
    if not hasattr(matplotlib, "rcParamsOrig"):
        return {}
    # As a plain dict: to ask RcParams for the backend is to choose one.
    read, present = (dict(dict.items(params)) for params in (matplotlib.rcParamsOrig, matplotlib.rcParams))
    return {name: value for name, value in present.items() if name not in _OF_FRONT_END and read.get(name) != value}


def _put_matplotlib(options: Mapping[str, Packed]) -> None:
    for name, value in _loaded(options):
        with suppress(KeyError, ValueError):  # one that this version does not have, or an extension's
            sys.modules["matplotlib"].rcParams[name] = value


def _figures() -> dict[str, Any]:
    """The settings of inline figures. Before the first figure they are in the shell's configuration only."""
    config: Any = sys.modules.get("matplotlib_inline.config")
    if not hasattr(config, "InlineBackend") or not config.InlineBackend.initialized():
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        return dict(shell.config.get("InlineBackend", {})) if shell is not None else {}
    backend = config.InlineBackend.instance()
    found = {name: getattr(backend, name) for name in ("figure_formats", "print_figure_kwargs", "close_figures")}
    return {name: value for name, value in found.items() if value != type(backend).class_traits()[name].default()}


def _put_figures(traits: Mapping[str, Packed]) -> None:
    backend = sys.modules["matplotlib_inline.config"].InlineBackend.instance()
    for name, value in _loaded(traits):
        setattr(backend, name, value)


# ---------------------------------------------------------------- warnings


def _described(one: Any) -> Filter:
    action, message, category, module, line = one
    pattern = [text if isinstance(text, (str, type(None))) else text.pattern for text in (message, module)]
    packed = b""
    if category.__module__ == "__main__":
        with suppress(Exception):  # a class may hold anything
            packed = by_value.pack(category)
    named = f"{category.__module__}:{category.__qualname__}"
    return Filter(action, pattern[0] or "", named, pattern[1] or "", line, packed)


def _put_warnings(filters: tuple[Filter, ...]) -> None:
    """Set all filters of warnings, in the same order. One whose category is not known yet comes first when that has
    been imported."""
    warnings.resetwarnings()
    for one in filters:
        if (category := _category(one)) is not None:
            _add(one, category, last=True)
        elif (module := one.category.partition(":")[0]) not in sys.modules:
            after_import(module, partial(_add_late, one))
    # What warns when it is made (torch's LeafSpec, which a Trainer of Lightning's has) has warned in the notebook.
    warnings.filterwarnings("ignore", category=FutureWarning, module=re.escape(pickler.__name__))


def _add_late(one: Filter) -> None:
    if (category := _category(one)) is not None:
        _add(one, category, last=False)


def _add(one: Filter, category: type[Warning], last: bool) -> None:
    warnings.filterwarnings(one.action, one.message, category, one.module, one.line, append=last)  # type: ignore[arg-type]


def _category(one: Filter) -> type[Warning] | None:
    module, _, name = one.category.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None and one.packed:
        with suppress(Exception):  # its module may be missing here: a filter less must not keep the rank from its work
            found = by_value.load(one.packed)
    return found if isinstance(found, type) and issubclass(found, Warning) else None
