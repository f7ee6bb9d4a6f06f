"""The notebook's logging, as every rank begins with it: levels, and the handlers that write to the notebook.

In a rank those write to the rank's own output. A handler that writes elsewhere (a file, a server) is not sent: N
processes would write into one place; a rank that wants one makes it in the cell.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nbspawn._protocol.settings import Handler, Logger, Logging
from nbspawn._rank import stdio
from nbspawn._rank.after_import import after_import

_OWN = ("traitlets", "IPKernelApp", "ipykernel", "IPython", "comm", "tornado", "asyncio", "concurrent", "nbspawn")
"""The kernel's own loggers, which are not the notebook's."""


def read() -> Logging:
    """In the kernel."""
    return Logging(
        tuple(_described(logger) for logger in _configured()),
        logging.root.manager.disable,
        getattr(logging, "_warnings_showwarning", None) is not None,
    )


_preloaded: dict[str, Logger] = {}


def note_preloaded() -> None:
    """In the fork server: which loggers the libraries have configured there. The notebook's are mostly the same, and a
    rank then leaves them (all 60 of torch's, else 4 ms)."""
    _preloaded.update({logger.name: _described(logger) for logger in _configured()})


def put(found: Logging) -> None:
    """In the rank. A library that is imported later would set its loggers anew: they are set again after it.

    Only what differs is set: setting any level empties the caches of all loggers, which copies their memory."""
    if logging.root.manager.disable != found.disabled:
        logging.disable(found.disabled)
    logging.captureWarnings(found.captures)
    for one in found.loggers:
        if _preloaded.get(one.name) == one:
            continue
        _put(one)
        package = one.name.partition(".")[0]
        if package not in sys.modules:
            after_import(package, lambda one=one: _put(one))  # type: ignore[misc]


def _configured() -> Iterator[logging.Logger]:
    yield logging.root
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] not in _OWN:
            if logger.level or logger.handlers or logger.disabled or not logger.propagate:
                yield logger


def _described(logger: logging.Logger) -> Logger:
    handlers = ((handler, _stream(handler)) for handler in logger.handlers)
    told = tuple(_handler(handler, stream) for handler, stream in handlers if stream)
    return Logger(logger.name, logger.level, logger.propagate, logger.disabled, told)


def _stream(handler: logging.Handler) -> str:
    """'stdout' or 'stderr' if that is where it writes, else ''. rich's handler has a console in place of a stream."""
    console = getattr(handler, "console", None)
    stream = getattr(console, "file", None) if console is not None else getattr(handler, "stream", None)
    for name in ("stdout", "stderr"):
        if stream is not None and stream in (
            getattr(sys, name),
            getattr(sys, f"__{name}__"),
            stdio.inherited.get(name),
        ):
            return name
    return ""


_NOT_SENT = ("stream", "lock", "console", "flush")


def _handler(handler: logging.Handler, stream: str) -> Handler:
    formatter = handler.formatter
    form = (getattr(formatter, "_fmt", None) or "%(message)s", getattr(formatter, "datefmt", None))
    state = {name: value for name, value in vars(handler).items() if name not in _NOT_SENT}
    packed = b""
    with suppress(Exception):  # a foreign handler may hold anything
        packed = _packed((type(handler), state, hasattr(handler, "console")))
    return Handler(stream, handler.level, form, packed)


def _packed(obj: object) -> bytes:
    """By pickle, which takes a sixth of the time, unless it would only name what the notebook defines."""
    try:
        packed = pickle.dumps(obj)
    except Exception:
        packed = b"__main__"
    if b"__main__" in packed:
        import cloudpickle

        packed = cloudpickle.dumps(obj)
    return packed


def _put(one: Logger) -> None:
    logger = logging.getLogger(one.name if one.name != "root" else None)
    if logger.level != one.level:
        logger.setLevel(one.level)
    logger.propagate, logger.disabled = one.propagate, one.disabled
    there = [handler for handler in logger.handlers if _stream(handler)]
    for made in map(_made, one.handlers):
        same = next((handler for handler in there if type(handler) is type(made)), None)
        if same is None:
            logger.addHandler(made)
        else:  # the library's own, which it may know by name
            there.remove(same)
            same.level, same.formatter, same.filters = made.level, made.formatter, made.filters
    for handler in there:
        logger.removeHandler(handler)


def _made(one: Handler) -> logging.Handler:
    stream = getattr(sys, one.stream)
    made: Any
    try:
        kind, state, on_console = pickle.loads(one.packed)
        made = kind.__new__(kind)
        vars(made).update(state)
        if on_console:
            from rich.console import Console

            made.console = Console(stderr=one.stream == "stderr")
        else:
            made.stream = stream
        made.createLock()
    except Exception:  # it did not travel, or its module is not here
        made = logging.StreamHandler(stream)
        made.setLevel(one.level)
        made.setFormatter(logging.Formatter(*one.format))
    return made  # type: ignore[no-any-return]
