"""A rank's end: what a program does at its end, without the teardown of an interpreter.

Teardown frees everything. That takes gloo 20 to 40 ms, waits for ever where a destructor of torch's waits for Python's
lock, and aborts now and then when a thread of torch's frees a tensor then ("terminate called without an active
exception", 4 of 60 runs with gloo on two cores, https://github.com/pytorch/pytorch/pull/179291). So a rank does what
its program may count on, and leaves the rest to the system: its threads are joined, its ``atexit`` handlers run,
files that it has left open are written, HDF5's too, and libraries of the user's own do what they have for the end
(exit_functions.py).

What the process that the rank was copied from has registered, opened or begun is not the rank's to end.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import io
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from multiprocessing import util
from typing import Any, NoReturn

from nbspawn._process import open_files
from nbspawn._rank.program import exit_functions, stdio

# As open_files.FILE.
_RAW, _TEXT = (kind.__base__ or object for kind in (io.RawIOBase, io.TextIOBase))

_WRITING = 1.0  # seconds in which a rank that has failed writes its files: a disk that hangs must not hide the error


_inherited: list[Any] = []
"""Files that this process has not opened itself, and what else closes itself when it is given up: nobody gives it up
here, so that a NamedTemporaryFile of the notebook's is not deleted."""

_inherited_hdf5: set[int] = set()
"""Of h5py's files, those of the process that this one was copied from."""

_Handler = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
_of_imports: list[_Handler] = []
"""Handlers that libraries registered in the importer, when it imported them, as they would in a new process."""
_NOT_KEPT = ("torch", "h5py", "IPython", "logging", "multiprocessing", "weakref", "concurrent", "nbspawn")
"""Packages whose handlers are not kept: those of the first only log, or tidy up their memory; the others are anew."""

_finalizers: Any = weakref.finalize
_first_finalizer = -1
"""Finalizers with a greater number are this process's own."""


def begin() -> None:
    """Early in a rank that is a copy of another process: forget what that one has registered for its own end, and
    register what every process has."""
    global _first_finalizer
    atexit._clear()
    _first_finalizer = next(_finalizers._index_iter)
    _finalizers._registered_with_atexit = True
    logging._handlerList.clear()  # type: ignore[attr-defined]
    for own in (logging.shutdown, util._exit_function, _finalize):  # type: ignore[attr-defined]
        atexit.register(own)  # the last one is called first
    for handler, args, kwargs in _of_imports:
        atexit.register(handler, *args, **kwargs)
    _inherited_hdf5.update(one.id for one in _hdf5_files())
    exit_functions.begin()


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """In the importer, while it imports libraries: keep the handlers that they register."""
    register: Any = atexit.register

    def note(handler: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(handler, "__module__", None) or "torch"  # of pybind11's functions
        if module.partition(".")[0] not in _NOT_KEPT:
            _of_imports.append((handler, args, kwargs))
        return register(handler, *args, **kwargs)

    atexit.register = note  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register = register


def _finalize() -> None:
    """Run this process's own finalizers that are due at its end: to remove a TemporaryDirectory, for one. The last one
    made is the first to run. (To touch the inherited ones would copy their memory.)"""
    newest_first = reversed(_finalizers._registry.items())
    for finalizer, info in list(takewhile(lambda one: one[1].index > _first_finalizer, newest_first)):
        if info.atexit:
            try:
                finalizer()
            except Exception:
                sys.excepthook(*sys.exc_info())


def unfreeze() -> None:
    """Have the garbage collector see what this process has inherited (main.py has frozen it). It stays the other's."""
    own = set(map(id, gc.get_objects()))
    gc.unfreeze()
    _inherited.extend(one for one in _closing(gc.get_objects()) if id(one) not in own)


def run() -> None:
    """Do what a program does at its end. Raises KeyboardInterrupt if one comes while it waits for a thread; a handler
    that is interrupted, or fails, says so on stderr, and the next one runs."""
    threading._shutdown()  # type: ignore[attr-defined]
    _forget_shell()
    atexit._run_exitfuncs()
    write_files()


def leave(code: int) -> NoReturn:
    """Be gone, with all that was printed in the log."""
    stdio.flush()
    exit_functions.run(code)  # one may crash, as at the end of any process
    stdio.flush()
    os._exit(code)


def write_soon() -> None:
    """Write the files that are open, within a moment."""
    writer = threading.Thread(target=write_files, name="nbspawn-files", daemon=True)
    writer.start()
    writer.join(_WRITING)


def _forget_shell() -> None:
    """Unregister what IPython has registered when its shell was made: it would empty the namespace, and so run every
    destructor."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        atexit.unregister(shell.atexit_operations)


# ---------------------------------------------------------------- open files


def write_files() -> None:
    """Write out every file that this process has left open, as an interpreter does when it gives them up."""
    for one in _unwritten():
        try:
            _write(one)
        except OSError as error:
            print(f"{_name(one)} could not be written: {error}", file=sys.stderr, flush=True)
        except Exception:
            continue  # a class of the user's or a library's, which an interpreter would leave as it is, too
    for one in _hdf5_files():
        if one.id not in _inherited_hdf5:
            try:
                sys.modules["h5py"].File(one).close()
            except Exception as error:
                print(f"an HDF5 file could not be closed: {error}", file=sys.stderr, flush=True)


def _hdf5_files() -> list[Any]:
    """h5py's, which their library would close at exit(3): until then they cannot be read."""
    h5f: Any = sys.modules.get("h5py.h5f")
    return h5f.get_obj_ids(h5f.OBJ_ALL, h5f.OBJ_FILE) if hasattr(h5f, "get_obj_ids") else []


def _unwritten() -> list[Any]:
    """What this process has opened, the outermost first: a text file writes to a buffer, and that to the file. (What it
    has inherited is frozen, and no longer among the objects that can be collected.)"""
    found = [*_closing(gc.get_objects()), *open_files.named_in(vars(sys.modules["__main__"]))]
    others = {id(part) for stream in _streams() for part in (stream, getattr(stream, "buffer", None))}
    others.update(map(id, _inherited))
    own = {id(one): one for one in found if id(one) not in others}
    return sorted(reversed(list(filter(open_files.is_unwritten, own.values()))), key=_layer)


def _closing(objects: list[Any]) -> list[Any]:
    kinds = {id(kind): kind for kind in map(type, objects)}  # a metaclass may raise when its hash is asked for
    closing = {number for number, kind in kinds.items() if _writes_itself(kind)}
    return [one for one in objects if id(type(one)) in closing] if closing else []


def _streams() -> Iterable[Any]:
    """Which stdio.flush() writes."""
    return [getattr(sys, name) for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")]


def _writes_itself(kind: type) -> bool:
    """Files; and what closes itself when it is given up (a ZipFile, a NamedTemporaryFile, which deletes itself)."""
    if issubclass(kind, open_files.FILE):
        return not issubclass(kind, (_RAW, io.BytesIO, io.StringIO))
    with suppress(Exception):  # a metaclass may raise whatever it is asked
        close = getattr(kind, "close", None)
        by_itself = isinstance(getattr(kind, "__del__", None), types.FunctionType)
        return by_itself and inspect.isroutine(close) and not inspect.iscoroutinefunction(close)
    return False


def _layer(one: Any) -> int:
    kind = type(one)
    if not issubclass(kind, open_files.FILE):
        return 0
    if issubclass(kind, _TEXT):
        return 1
    return 2 if kind.__module__ != "_io" else 3


def _write(one: Any) -> None:
    """Python's own files are flushed and not closed: a thread that still runs may write to them. What is made in Python
    (a GzipFile) has more to write at its end."""
    if type(one).__module__ == "_io":
        one.flush()
    else:
        one.close()


def _name(one: Any) -> str:
    with suppress(Exception):
        return str(one.name)
    return f"a {type(one).__qualname__}"
