"""Is it safe to fork this kernel? What is known of its runtimes, threads and locks, what a forked child says; OpenMP's
pool."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import re
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._engine.start.reachable import findings
from nbspawn._process import traced
from nbspawn._protocol.frames import described, users_frames, written_frames
from nbspawn._protocol.signals import STACK

_PROBE_SECONDS = 5.0  # a healthy child answers in 40 ms; one that hangs never does


def unsafe_to_fork() -> list[str]:
    """The reasons why a fork is not safe: the static ones, and if there are none, what a forked probe says."""
    return fork_hazards() + foreign_threads() or probe()


# ---------------------------------------------------------------- static checks

_first_seen: dict[str, int] = {}


def note_cell(number: int) -> None:
    """After a cell has run: remember which one made fork unsafe, so that the error can name it."""
    for name in _running():
        _first_seen.setdefault(name, number)


def fork_hazards() -> list[str]:
    """What runs in this process and would be broken in a forked copy of it, a sentence each; microseconds."""
    return [sentence + _since(name) for name, sentence in _running().items()]


def holds_the_tpu(name: str) -> str:
    """Why no rank can be started, by any method, when the runtime 'xla' or 'tpu' is initialised in this kernel."""
    return (
        f"this kernel holds the TPU{_since(name)}, and then no other process can use it: restart the kernel, and use "
        "the device in cells with %%spawn only"
    )


def _since(name: str) -> str:
    number = _first_seen.get(name)
    return f" (since cell {number} ran)" if number is not None else ""


def _running() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in kinds.initialised():
        found[name] = f"torch.{name} is initialised in this kernel and cannot be initialised again in a forked rank"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found["group"] = (
            "this kernel is a member of a process group, whose sockets and threads a forked rank would inherit dead "
            "(torch.distributed.destroy_process_group() ends it)"
        )
    if _has_compiled():
        found["compile"] = "torch.compile has started its workers in this kernel; it hangs in a forked rank"
    if "torch_tpu" in sys.modules:
        # It takes part in each backward, which in a forked child without a TPU hangs for ten minutes.
        found["torch_tpu"] = "torch_tpu is loaded in this kernel, and is not made for forked processes"
    xla = sys.modules.get("_XLAC")
    if xla is not None and xla._xla_runtime_is_initialized():
        found["xla"] = "the XLA runtime is initialised in this kernel; it hangs in a forked rank"
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "backends_are_initialized", bool)():
        found["jax"] = "JAX has started its threads in this kernel"
    return found


def _has_compiled() -> bool:
    """Has torch.compile started the threads whose executor a forked process would wait for? Its modules alone, which
    torch_xla and torch_tpu import, start none."""
    compiler = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    asked = getattr(getattr(compiler, "pool", None), "cache_info", None)
    return compiler is not None and (asked is None or asked().currsize > 0)


# ---------------------------------------------------------------- threads of libraries

_WORK = re.compile(r"ZMQbg/|jemalloc_bg_thd|polars-ooc|grpc_|event_engine|default-exec|resolver-exec|pt_|python|iou-")
"""Names of threads that forked ranks do without: zmq's, pyarrow's, that of polars from its import on, grpc's, torch's
(``probe`` tries it), those without a name of their own, the operating system's."""
_POLARS = re.compile(r"polars-\d|async-executor|tokio-r")


def foreign_threads() -> list[str]:
    """What a forked copy of this process may wait for: threads that Python does not know, of libraries that are not
    known to do without them, a sentence each. docs/guide/start_methods.md says what was tried. Most libraries give
    their threads no name: of such, only those count that are known to hang. Linux only."""
    names = _names_of_native_threads()
    found = []
    if "polars" in sys.modules and any(map(_POLARS.match, names)):
        found.append(
            "polars has started its threads in this kernel, and a query in a forked rank waits for them for ever"
        )
        names = {name for name in names if not _POLARS.match(name)}
    with suppress(Exception):  # it has started none, or is not here
        if sys.modules["numba"].threading_layer() != "tbb":
            found.append(
                "numba has started its threads in this kernel; a parallel function hangs in a forked rank, or ends it"
            )
    if others := sorted(name for name in names if not _WORK.match(name)):
        shown = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
        found.append(f"a library's threads ({shown}) run in this kernel, which forked ranks do not have")
    return found


_NAMED = 3


def _names_of_native_threads() -> set[str]:
    own = {thread.native_id for thread in threading.enumerate()}
    names = set()
    with suppress(OSError):  # not Linux
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:  # one that has ended
                if int(task) not in own:
                    names.add(comm.read().rstrip("\n"))
    with suppress(OSError), open("/proc/self/comm") as comm:
        names.discard(comm.read().rstrip("\n"))
    return names


# ---------------------------------------------------------------- locks, threads, processes


def stranded(variables: Mapping[str, object]) -> list[str]:
    """What these variables are or use that a forked copy of this process cannot have, a sentence each: locks that are
    held at this moment, which nobody would release there; threads that run (of a queue, a SummaryWriter), which a fork
    does not copy; and processes that work for this one (of a DataLoader's iterator)."""
    return [f"{path} {reason}" for path, reason in findings(variables, _stranded)]


_SURVIVES = {("multiprocessing.managers", "BaseManager"), ("concurrent.futures.thread", "ThreadPoolExecutor")}


def _stranded(value: Any) -> str | None:
    """Why a forked copy of this process cannot have it, if it is a lock, a thread or a process. A manager's process
    works for all, and an executor starts other threads (_rank/notebook/libraries.py)."""
    if any((base.__module__, base.__name__) in _SURVIVES for base in type(value).__mro__):
        return None
    if issubclass(type(value), threading.Thread):
        if value.is_alive() and value is not threading.current_thread():
            return "is a thread that runs in this kernel, and a forked rank would wait for it for ever"
    elif issubclass(type(value), BaseProcess):
        if value.is_alive():
            return "is a process that works for this kernel, and forked ranks would take each other's answers from it"
    elif type(value).__module__ in ("_thread", "threading") and hasattr(value, "acquire"):
        if not value.acquire(blocking=False):
            return "is a lock that is held in this kernel, and a forked rank would wait for it for ever"
        value.release()
    return ""


# ---------------------------------------------------------------- what only a forked child can tell


def poisoned_runtimes() -> list[str]:
    """``torch.cuda.is_available()`` alone can spoil CUDA for forked children without ``is_initialized`` saying so:
    ask in one. Only a build with CUDA or ROCm can have it."""
    if "torch" not in sys.modules or kinds.own().type != "cuda":
        return []
    return _answers(_ask_cuda)


def probe() -> list[str]:
    """Fork a child that does what ranks do, a backward and a parallel operation, and see whether it survives; 20-40 ms.

    ``pause_openmp`` is part of the launch, so it comes before the probe too.
    """
    if "torch" not in sys.modules:
        return []
    pause_openmp()
    return _answers(_try_torch)


def probe_if_changed() -> list[str]:
    """``probe``, but not again while this process has the modules and the threads that it had when that found nothing:
    20 ms would be half of what a start takes."""
    global _found_safe
    pause_openmp()
    state = len(sys.modules), _threads()
    found = [] if state == _found_safe else probe()
    if not found:
        _found_safe = state
    return found


_found_safe: tuple[int, int] | None = None


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:  # not Linux
        return threading.active_count()


_SPOILED = "CUDA was used or asked for in this kernel, and a forked rank could not use it any more"
_without_gpu = False
"""There is none to be used."""


def _answers(question: Callable[[], str]) -> list[str]:
    """What a forked child says. Where a build for CUDA runs without a GPU, there is nothing to spoil (torch_xla asks it
    for GPUs when it is imported). Their number is asked for here only when this process has been spoiled already."""
    global _without_gpu
    found = _in_forked_child(question)
    if found == [_SPOILED] and sys.modules["torch"].cuda.device_count() == 0:
        _without_gpu = True
        found = _in_forked_child(question)
    return found


def _ask_cuda() -> str:
    import torch

    return _SPOILED if torch.cuda._is_in_bad_fork() and not _without_gpu else ""


def _try_torch() -> str:
    import torch

    bad = _ask_cuda()
    if not bad:
        if not openmp_can_be_paused():
            torch.set_num_threads(1)
        # Whatever the notebook has set (a default device, no gradients) says nothing about fork.
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(4, requires_grad=True, device="cpu", dtype=torch.float32)
            x.sum().backward()
            square = torch.ones(300, 300, device="cpu", dtype=torch.float32)
            torch.mm(square, square).sum().item()
    return bad


def _in_forked_child(question: Callable[[], str]) -> list[str]:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+: fork in a process with threads; a kernel has some
        with traced.not_in_children():
            pid = os.fork()
    if pid == 0:
        try:
            traced.leave()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            faulthandler.register(STACK, file=write, all_threads=False)
            os.write(write, b"ok" + question().encode())
        except BaseException as error:
            os.write(write, b"ok" + f"in a forked process torch fails with {type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        answered = select.select([read], [], [], _PROBE_SECONDS)[0]
        answer = os.read(read, 4096) if answered else _stack_of(pid, read)
    finally:
        os.close(read)
        with suppress(ProcessLookupError, ChildProcessError):  # where somebody else waits for any child
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not answered:
        frames = users_frames(written_frames(answer.decode("utf-8", "replace")))
        where = described(frames[-1]) if frames else "in a library's own code for forked processes"
        return [
            "a forked process hangs in torch: a lock that some thread of this kernel holds stays locked there "
            f"(it waits {where})"
        ]
    if not answer:
        return ["a forked process crashes in torch"]
    return [answer[2:].decode()] if len(answer) > 2 else []


def _stack_of(pid: int, written: int) -> bytes:
    """What the child that hangs writes when it is asked where; nothing if it hangs in fork itself."""
    os.kill(pid, STACK)
    text = b""
    while select.select([written], [], [], 0.1 if text else 1.0)[0]:  # it comes line by line
        line = os.read(written, 65536)
        if not line:
            break  # the signal has ended the child
        text += line
    return text


# ---------------------------------------------------------------- OpenMP


def pause_openmp() -> None:
    """Shut the OpenMP pools of this process down; the next parallel operation makes new ones (0.8 ms).

    Without it, once any torch operation has run in parallel here, the first parallel operation of a forked rank waits
    for ever for threads that fork did not copy: https://github.com/pytorch/pytorch/issues/17199.
    """
    for library in map(ctypes.CDLL, _openmp_libraries(len(sys.modules))):
        if hasattr(library, _PAUSE):
            getattr(library, _PAUSE)(1)  # omp_pause_soft


def openmp_can_be_paused() -> bool:
    """The OpenMP library in torch's older wheels (2.4, say) cannot; then a forked rank must keep to one thread."""
    return all(hasattr(library, _PAUSE) for library in map(ctypes.CDLL, _openmp_libraries(len(sys.modules))))


_PAUSE = "omp_pause_resource_all"


@functools.lru_cache(maxsize=1)
def _openmp_libraries(modules: int) -> set[str]:
    """The OpenMP libraries that are loaded. They come with modules: as long as no more of these have come (``modules``
    counts them), the long list of mappings need not be read again."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(None, 5)[5].strip() for line in maps if "/" in line and "omp" in line}
    except FileNotFoundError:  # not Linux
        return set()
    return {path for path in paths if os.path.basename(path).startswith(("libgomp", "libiomp", "libomp"))}
