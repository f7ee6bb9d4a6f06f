"""Is a module safe to import before ranks are forked? Tried in a temporary child process of the importer.

What a rank must not inherit: threads (a fork does not copy them, but the library's state says that they run), open
files and sockets, children, a runtime that holds an accelerator, changed signal handlers, a changed directory, a
changed environment, and code that is not installed but the user's own.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import select
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbspawn._accelerators import kinds

_PR_SET_PDEATHSIG = 1
_libc: Any = ctypes.CDLL(None)

_IMPORT_SECONDS = 60.0
_THREAD_SECONDS = 0.3  # seconds within which a library that stops its threads for a fork has done so

# jemalloc (in pyarrow) stops its thread around a fork and starts another one in the child:
# https://github.com/jemalloc/jemalloc/blob/5.3.0/src/background_thread.c, background_thread_postfork_child.
_RESTARTED_AFTER_FORK = {"jemalloc_bg_thd"}

# Only the kernel sets these, and knows whether their values differ by rank.
_OF_RANKS = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "CUDA_VISIBLE_", "OMP_NUM_")


def first_refused(modules: Sequence[str]) -> tuple[str, str] | None:
    """The first of these ``modules`` that must not be imported in this process, after those before it, and the reason;
    None if all of them are safe.

    Imports them in a forked child, each within a minute, and compares the state of that process after each import with
    that at the beginning.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            if hasattr(_libc, "prctl"):
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(read)
            _try(modules, write)
        finally:
            os._exit(0)
    os.close(write)
    answer = b""
    why = ""
    try:
        while answer.count(b"\n") < len(modules) and not why:
            answered = _readable(read)
            part = os.read(read, 65536) if answered else b""
            answer += part
            if not part:
                why = "its import ends the process" if answered else f"its import takes over {_IMPORT_SECONDS:g} s"
    finally:
        os.close(read)
        for kill in (os.kill, os.killpg):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # no group: setpgid has not run yet
                continue
        os.waitpid(pid, 0)
    verdicts = answer.decode().splitlines()
    found = next((number for number, verdict in enumerate(verdicts) if verdict), len(verdicts))
    return (modules[found], (verdicts[found:] or [why])[0]) if found < len(modules) else None


def _readable(read: int) -> bool:
    end = time.monotonic() + _IMPORT_SECONDS
    while not select.select([read], [], [], 0.25)[0]:
        exit_if_orphaned()
        if time.monotonic() > end:
            return False
    return True


_kernel = os.getppid()


def exit_if_orphaned() -> None:
    """Exit if the kernel is dead: the importer notices that only between two plans."""
    if os.getppid() != _kernel:
        os._exit(0)


def _try(modules: Sequence[str], write: int) -> None:
    """Write a line for each module: the reason against it, or an empty line."""
    before = _State.now()
    for module in modules:
        verdict = ""
        if module not in sys.modules:
            try:
                importlib.import_module(module)
                verdict = _State.now().changed(before)
            except BaseException as error:  # whatever a module raises, SystemExit too
                verdict = failed(error)
        os.write(write, f"{' '.join(verdict.split())[:1000]}\n".encode("utf-8", "replace"))
        if verdict:
            break


def failed(error: BaseException) -> str:
    """The reason against a module whose import raises."""
    return f"its import fails here: {type(error).__name__}: {error}"


@dataclass
class _State:
    threads: list[str]
    files: dict[str, str]
    children: set[str]
    environment: dict[str, str]
    handlers: list[object]
    directory: str
    start_method: str | None
    modules: set[str]

    @classmethod
    def now(cls) -> _State:
        return cls(
            _threads_after_fork(),
            _open_files(),
            _children(),
            dict(os.environ),
            [signal.getsignal(number) for number in sorted(signal.valid_signals())],
            os.getcwd(),
            multiprocessing.get_start_method(allow_none=True),
            set(sys.modules),
        )

    def changed(self, before: _State) -> str:
        if len(self.threads) > len(before.threads):
            return f"it starts a thread ({', '.join(sorted(set(self.threads) - {'MainThread'}))})"
        if len(self.files) > len(before.files):
            opened = set(self.files.items()) - set(before.files.items())
            return f"it leaves a file or socket open ({min(opened)[1]})"
        if self.children - before.children:
            return "it starts a process"
        if runtime := _initialised():
            return f"it initialises {runtime}"
        for name, value in before.environment.items():
            if self.environment.get(name) != value:
                return f"it changes the environment variable {name}"
        for name in self.environment.keys() - before.environment.keys():
            if name.startswith(_OF_RANKS):
                return f"it sets the environment variable {name}"
        if self.handlers != before.handlers:
            return "it changes a signal handler"
        if self.directory != before.directory:
            return "it changes the working directory"
        if self.start_method != before.start_method:
            return "it sets multiprocessing's start method"
        return _not_installed(self.modules - before.modules)


def _threads_after_fork() -> list[str]:
    """The names of the threads that still run after a fork: some libraries, such as OpenBLAS, end theirs before it."""
    python = [thread.name for thread in threading.enumerate()]
    if not os.path.isdir("/proc/self/task"):
        return python
    _in_child(bool)
    end = time.monotonic() + _THREAD_SECONDS
    while len(native := _native_threads()) > len(python) and time.monotonic() < end:
        time.sleep(0.005)
    return python + native[len(python) :]


def _in_child(question: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(question())
    return os.waitpid(child, 0)[1] != 0


def _native_threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return [name for name in names if name not in _RESTARTED_AFTER_FORK]


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/dev/fd"):
        try:
            found[fd] = os.readlink(f"/dev/fd/{fd}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        except OSError:  # not a link, on other systems than Linux
            found[fd] = fd
    return found


def _children() -> set[str]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(file.read().split())
    except FileNotFoundError:  # not Linux
        return set()


def _initialised() -> str:
    for name in kinds.initialised():
        return f"torch.{name}"
    torch: Any = sys.modules.get("torch")
    if torch is not None and kinds.own().type == "cuda" and _in_child(torch.cuda._is_in_bad_fork):
        return "CUDA"  # by a query of its devices, which torch.cuda.is_initialized() does not detect
    bridge = sys.modules.get("jax._src.xla_bridge")
    return "JAX" if getattr(bridge, "backends_are_initialized", bool)() else ""


def _not_installed(modules: set[str]) -> str:
    places = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib"))
    places += (os.path.realpath(sysconfig.get_path("platlib")) + os.sep,)
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and os.path.isabs(file) and not os.path.realpath(file).startswith(places):
            return f"it imports {name}, which is not an installed module, but in {os.path.dirname(file)}"
    return ""
