"""Is a module safe to import in the fork server, before ranks are forked? Tried in a throw-away child of it.

What a rank must not inherit: threads (a fork copies none, but what they were for believes that they run), open files
and sockets, children, a runtime that holds an accelerator, changed signal handlers, a changed directory, a changed
environment, and code that is not installed but the user's.
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

_PR_SET_PDEATHSIG = 1
_libc: Any = ctypes.CDLL(None)

_IMPORT_SECONDS = 60.0
_THREAD_SECONDS = 0.3  # a library that stops its threads for a fork has done so by then

# jemalloc (in pyarrow) stops its thread around a fork and starts another one in the child:
# https://github.com/jemalloc/jemalloc/blob/5.3.0/src/background_thread.c, background_thread_postfork_child.
_AT_HOME_AFTER_FORK = {"jemalloc_bg_thd"}

# Whether each rank has a value of its own is for the kernel to say.
_OF_RANKS = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "CUDA_VISIBLE_", "OMP_NUM_")


def first_refused(modules: Sequence[str]) -> tuple[str, str] | None:
    """The first of these ``modules`` that is not to be imported in this process, after those before it, and why; None
    if nothing was found against any of them.

    Imports them in a forked child, each within a minute, and compares what that process holds after each with what it
    held at the beginning.
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
    told = b""
    why = ""
    try:
        while told.count(b"\n") < len(modules) and not why:
            answered = _readable(read)
            part = os.read(read, 65536) if answered else b""
            told += part
            if not part:
                why = "its import ends the process" if answered else f"its import takes over {_IMPORT_SECONDS:g} s"
    finally:
        os.close(read)
        for kill in (os.kill, os.killpg):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # no group: it has not come so far
                continue
        os.waitpid(pid, 0)
    verdicts = told.decode().splitlines()
    found = next((number for number, verdict in enumerate(verdicts) if verdict), len(verdicts))
    return (modules[found], (verdicts[found:] or [why])[0]) if found < len(modules) else None


def _readable(read: int) -> bool:
    end = time.monotonic() + _IMPORT_SECONDS
    while not select.select([read], [], [], 0.25)[0]:
        leave_if_orphaned()
        if time.monotonic() > end:
            return False
    return True


_kernel = os.getppid()


def leave_if_orphaned() -> None:
    """Be gone if the kernel has: the fork server itself looks for that only after its imports."""
    if os.getppid() != _kernel:
        os._exit(0)


def _try(modules: Sequence[str], write: int) -> None:
    """A line for each: why not, or an empty one."""
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
    """Why a module is left out whose import raises."""
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
    """The names of the threads that go on after a fork: OpenBLAS, for one, ends its own before it."""
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
    return [name for name in names if name not in _AT_HOME_AFTER_FORK]


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/dev/fd"):
        try:
            found[fd] = os.readlink(f"/dev/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        except OSError:  # no link, where this is not Linux
            found[fd] = fd
    return found


def _children() -> set[str]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(file.read().split())
    except FileNotFoundError:  # not Linux
        return set()


def _initialised() -> str:
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu", "mtia", "hpu", "npu", "tpu"):
        runtime = getattr(torch, name, None)
        if runtime is not None and getattr(runtime, "is_initialized", bool)():
            return f"torch.{name}"
    if torch is not None and torch.version.cuda is not None and _in_child(torch.cuda._is_in_bad_fork):
        return "CUDA"  # asked for its devices, which torch.cuda.is_initialized() does not tell
    bridge = sys.modules.get("jax._src.xla_bridge")
    return "JAX" if getattr(bridge, "backends_are_initialized", bool)() else ""


def _not_installed(modules: set[str]) -> str:
    places = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib"))
    places += (os.path.realpath(sysconfig.get_path("platlib")) + os.sep,)
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and os.path.isabs(file) and not os.path.realpath(file).startswith(places):
            return f"it imports {name}, which is not installed but lies in {os.path.dirname(file)}"
    return ""
