"""The notebook's logging, as every rank begins with it: levels, filters, and the handlers that write to the notebook.

In a rank those write to the rank's own output. A handler that writes elsewhere (a file, a server, a queue) is not sent,
and is taken away from a rank that was forked: N processes would write into one place, or into one that nobody reads. A
rank that wants one makes it in the cell.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nbspawn._carried import by_value
from nbspawn._process import streams
from nbspawn._process.after_import import after_import
from nbspawn._protocol.settings import Handler, Logger, Logging, Packed

_OWN = ("traitlets", "IPKernelApp", "ipykernel", "IPython", "comm", "tornado", "asyncio", "concurrent", "nbspawn")
"""The kernel's own loggers, which are not the notebook's."""

_ORDINARY_LEVELS = {0: "NOTSET", 10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}

_there: dict[str, Logger] = {}
"""How loggers are configured in this process, or were in the one that it was forked from. What is so already needs not
be set."""

_elsewhere: list[tuple[logging.Logger, logging.Handler]] = []
"""The handlers that are not sent, in the kernel and in what is forked from it."""


def read() -> Logging:
    """In the kernel: the notebook's logging."""
    _elsewhere.clear()
    found = tuple(_described(logger) for logger in _configured())
    _there.clear()
    _there.update((one.name, one) for one in found)
    return Logging(
        found,
        logging.root.manager.disable,
        getattr(logging, "_warnings_showwarning", None) is not None,
        {level: name for level, name in logging._levelToName.items() if _ORDINARY_LEVELS.get(level) != name},
    )


def note_preloaded() -> None:
    """In the fork server: which loggers the libraries have configured there. The notebook's are mostly the same, and a
    rank then leaves them (all 60 of torch's, else 4 ms)."""
    _there.update((logger.name, _described(logger)) for logger in _configured())


def put(found: Logging) -> None:
    """In the rank: put the notebook's logging into force. A library that is imported later would set its loggers anew:
    they are set again after it.

    Only what differs is set: setting any level empties the caches of all loggers, which copies their memory."""
    for level, name in found.level_names.items():
        logging.addLevelName(level, name)
    if logging.root.manager.disable != found.disabled:
        logging.disable(found.disabled)
    logging.captureWarnings(found.captures)
    for one in found.loggers:
        if _there.get(one.name) != one:
            _put(one)
    _put_after_imports(found)


def adjust(found: Logging) -> None:
    """In a forked rank, which has inherited them: take the handlers away that write elsewhere than to the notebook."""
    for logger, handler in _elsewhere:
        logger.removeHandler(handler)
    _put_after_imports(found)


def _put_after_imports(found: Logging) -> None:
    for one in found.loggers:
        package = one.name.partition(".")[0]
        if one.name != "root" and package not in sys.modules:
            after_import(package, lambda one=one: _put(one))  # type: ignore[misc]


def _configured() -> Iterator[logging.Logger]:
    yield logging.root
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] not in _OWN:
            if logger.level or logger.handlers or logger.filters or logger.disabled or not logger.propagate:
                yield logger


def _described(logger: logging.Logger) -> Logger:
    handlers = {handler: _sent(handler) for handler in logger.handlers}
    _elsewhere.extend((logger, handler) for handler, sent in handlers.items() if sent is None)
    filters = _packed(logger.filters) if logger.filters else b""
    sent = tuple(filter(None, handlers.values()))
    return Logger(logger.name, logger.level, logger.propagate, logger.disabled, sent, filters)


_NOT_SENT = ("stream", "lock", "console", "flush")


def _sent(handler: logging.Handler) -> Handler | None:
    """The handler as it travels, if it writes to the notebook: to one of its streams; or by what a class of the
    notebook's own does, which prints or displays. None for one that writes elsewhere, or that holds what cannot travel,
    such as a file."""
    stream = _stream(handler)
    if not stream and not _is_the_notebooks(type(handler)):
        return None
    formatter = handler.formatter
    form = (getattr(formatter, "_fmt", None) or "%(message)s", getattr(formatter, "datefmt", None))
    state = {name: value for name, value in vars(handler).items() if name not in _NOT_SENT}
    packed = _packed((type(handler), state, hasattr(handler, "console")))
    return Handler(stream, handler.level, form, packed) if stream or packed else None


def _is_the_notebooks(kind: type) -> bool:
    ordinary = (logging.Handler, logging.Filterer, object)
    return kind.__module__ == "__main__" and all(
        base.__module__ == "__main__" or base in ordinary for base in kind.__mro__
    )


def _stream(handler: logging.Handler) -> str:
    """'stdout' or 'stderr' if that is where it writes, else ''. rich's handler has a console in place of a stream."""
    console = getattr(handler, "console", None)
    return streams.name_of(getattr(console, "file", None) if console is not None else getattr(handler, "stream", None))


def _packed(obj: object) -> Packed:
    with suppress(Exception):  # a foreign handler or filter may hold anything; Settings tells what then happens
        return by_value.pack(obj)
    return b""


def _put(one: Logger) -> None:
    logger = logging.getLogger(one.name if one.name != "root" else None)
    if logger.level != one.level:
        logger.setLevel(one.level)
    logger.propagate, logger.disabled = one.propagate, one.disabled
    if one.filters:
        with suppress(Exception):  # its module may be missing here
            logger.filters[:] = by_value.load(one.filters)
    there = [handler for handler in logger.handlers if _stream(handler) or _is_the_notebooks(type(handler))]
    for made in filter(None, map(_made, one.handlers)):
        same = next((handler for handler in there if type(handler) is type(made)), None)
        if same is None:
            logger.addHandler(made)
        else:  # the library's own, which it may know by name
            there.remove(same)
            same.level, same.formatter, same.filters = made.level, made.formatter, made.filters
    for handler in there:
        logger.removeHandler(handler)


def _made(one: Handler) -> logging.Handler | None:
    made: Any
    try:
        kind, state, on_console = by_value.load(one.packed)
        made = kind.__new__(kind)
        vars(made).update(state)
        if on_console:
            from rich.console import Console

            made.console = Console(stderr=one.stream == "stderr")
        elif one.stream:
            made.stream = getattr(sys, one.stream)
        made.createLock()
    except Exception:  # it did not travel, or its module is not here
        if not one.stream:
            return None
        made = logging.StreamHandler(getattr(sys, one.stream))
        made.setLevel(one.level)
        made.setFormatter(logging.Formatter(*one.format))
    return made  # type: ignore[no-any-return]
