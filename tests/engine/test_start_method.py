"""Which start method is used and why; and the hazards of fork, each with its remedy and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_functions as ranks
import torch
import torch.distributed as dist
from leftovers import until
from methods import SUPPORT

import nbspawn
from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._engine.launch import resolve_start
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.start import fork_safety, forkserver, start_method

pytestmark = pytest.mark.usefixtures("nothing_left")


def chosen(fn: Any = ranks.succeed, args: tuple[Any, ...] = (), requested: str = "auto") -> start_method.Start:
    choice = resolve_start(FunctionJob(fn, args), LaunchOptions(nprocs=1, start_method=requested))
    if choice.packed is not None:
        choice.packed.close()
    return choice


def function_with_a_lock() -> Any:
    lock = threading.Lock()

    def locked(rank: int) -> int:
        with lock:
            return rank

    return locked


# ---------------------------------------------------------------- auto, and what was asked for


def test_unknown_method() -> None:
    with pytest.raises(nbspawn.UsageError, match="'thread'.*auto, fork, forkserver, spawn"):
        nbspawn.spawn(ranks.succeed, start_method="thread")


@pytest.mark.parametrize("nprocs", [0, -1, 100_000])
def test_absurd_number_of_ranks(nprocs: int) -> None:
    with pytest.raises(nbspawn.UsageError, match=f"nprocs must be between 1 and 512, got {nprocs}"):
        nbspawn.spawn(ranks.succeed, nprocs=nprocs)


def test_auto_takes_the_warm_fork_server() -> None:
    choice = chosen()
    assert (choice.method, choice.news) == ("forkserver", False)
    assert "can travel" in choice.why


def test_auto_falls_back_to_fork_for_what_cannot_travel() -> None:
    """And says which variable it was."""
    locked = function_with_a_lock()
    choice = chosen(locked)
    assert choice.method == "fork"
    assert "fn (it uses lock) cannot travel" in choice.why
    assert list(nbspawn.spawn(locked, nprocs=2)) == [0, 1]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_cannot_travel_is_named(method: str) -> None:
    with pytest.raises(nbspawn.PayloadError, match="lock"):
        nbspawn.spawn(function_with_a_lock(), nprocs=2, start_method=method)


def test_fork_as_asked() -> None:
    assert chosen(requested="fork").method == "fork"


# ---------------------------------------------------------------- an inherited process group


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_process_group_of_the_kernel_forbids_fork(process_group: None) -> None:
    with pytest.raises(nbspawn.StartError, match=r"member of a process group.*forkserver"):
        nbspawn.spawn(ranks.succeed, nprocs=2, start_method="fork")


def test_auto_goes_to_the_fork_server_with_a_process_group_in_the_kernel(process_group: None) -> None:
    assert chosen().method == "forkserver"
    assert list(nbspawn.spawn(ranks.all_reduce_here, nprocs=2)) == [1.0, 1.0]


def test_both_impossible_is_one_error_that_names_both(process_group: None) -> None:
    with pytest.raises(nbspawn.PayloadError) as caught:
        nbspawn.spawn(function_with_a_lock(), nprocs=2)
    assert "it uses lock" in str(caught.value)
    assert caught.value.culprit == "fn (it uses lock)"
    assert "process group" in str(caught.value)


def test_hazard_names_the_cell_that_made_it(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_safety, "_first_seen", {})
    fork_safety.note_cell(7)
    fork_safety.note_cell(9)
    assert "cell 7" in "".join(fork_safety.fork_hazards())


# ---------------------------------------------------------------- a poisoned CUDA runtime


@pytest.fixture
def poisoned_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build in which ``torch.cuda.is_available()`` was called: a forked child finds itself in a bad fork, and
    nothing in the kernel says so. (The one mock: this machine has no CUDA.)"""
    kernel = os.getpid()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != kernel)


def test_poisoned_cuda_forbids_fork(poisoned_cuda: None) -> None:
    assert not torch.cuda.is_initialized()
    with pytest.raises(nbspawn.StartError, match="CUDA was used.*forkserver"):
        nbspawn.spawn(ranks.succeed, nprocs=2, start_method="fork")


COMPILED = """
import torch, sys, warnings
from nbspawn._engine.start.fork_safety import fork_hazards
warnings.simplefilter("ignore")
import torch._inductor.async_compile
assert fork_hazards() == [], "importing it starts nothing"
torch.compile(lambda x: (x * 2).sin().sum())(torch.ones(1000))
print(fork_hazards())
"""


@pytest.mark.extended
def test_torch_compile(tmp_path: Path) -> None:
    """In a process of its own: it starts threads that stay."""
    headers = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}  # 4 s of a processor, for one use of them
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **headers}
    ran = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=env)
    assert "torch.compile has started its workers" in ran.stdout, ran.stderr


def test_without_a_gpu_there_is_nothing_to_poison(poisoned_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA on a machine without it; torch_xla asks it for GPUs when it is imported."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(fork_safety, "_without_gpu", False)
    assert list(nbspawn.spawn(ranks.square, nprocs=2, start_method="fork")) == [0, 1]


def test_auto_goes_to_the_fork_server_with_a_poisoned_cuda(poisoned_cuda: None) -> None:
    assert chosen().method == "forkserver"
    assert list(nbspawn.spawn(ranks.square, nprocs=2)) == [0, 1]
    with pytest.raises(nbspawn.PayloadError, match="(?s)lock.*CUDA"):
        nbspawn.spawn(function_with_a_lock(), nprocs=2)


@pytest.mark.parametrize("requested", ["auto", "forkserver"])
def test_the_method_does_not_depend_on_the_clock(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can travel waits for the fork server, though fork would be safe, and the view says so."""
    cold = forkserver.PrivateServer()
    monkeypatch.setattr(start_method, "server", cold)
    try:
        choice = chosen(requested=requested)
        assert (choice.method, choice.news, choice.title) == ("forkserver", True, "fork server")
        assert re.fullmatch(r"waited \d+\.\d s for it to start", choice.why)
        choice = chosen(requested=requested)
        assert (choice.method, choice.news, choice.title) == ("forkserver", False, "fork server")
    finally:
        cold.stop()


def test_an_interrupt_ends_the_wait_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = forkserver.PrivateServer()
    monkeypatch.setattr(start_method, "server", cold)
    try:
        stop = InterruptFlag()
        stop.press()
        with pytest.raises(KeyboardInterrupt) as stopped:
            resolve_start(FunctionJob(ranks.succeed), LaunchOptions(nprocs=1), stop)
        assert "no ranks have been started" in stopped.value._render_traceback_()[0]
    finally:
        cold.stop()


# ---------------------------------------------------------------- OpenMP's pool

OPENMP = """
import sys, torch, nbspawn, rank_functions as ranks
from nbspawn._engine import launch
from nbspawn._engine.start import fork_safety, start_method
if __name__ == "__main__":
    torch.set_num_threads(2)
    ranks.parallel_operation(0)  # the kernel's pool has its threads now, which no fork copies
    if sys.argv[1] == "without":
        fork_safety.pause_openmp = lambda: None
        fork_safety.openmp_can_be_paused = lambda: True
        start_method.probe_if_changed = lambda: []  # it would find out
    try:
        print(list(nbspawn.spawn(ranks.parallel_operation, nprocs=2, threads=2, start_method="fork", grace_period=0.5,
                                 timeout=5 if sys.argv[1] == "without" else 100)))
    except nbspawn.RunTimeoutError as error:
        print("hangs", "parallel_operation" in str(error))
        print(error, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "remedy, printed",
    [("with", "[216000000.0, 216000000.0]"), pytest.param("without", "hangs True", marks=pytest.mark.extended)],
)
def test_parallel_operations_after_one_in_the_kernel(remedy: str, printed: str) -> None:
    """In a process of its own: the kernel without the remedy must not be this one."""
    env = {**os.environ, "PYTHONPATH": SUPPORT}
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", OPENMP, remedy]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env)
    assert ran.stdout.strip() == printed, ran.stdout + ran.stderr


def test_kernel_can_compute_in_parallel_again_after_a_fork() -> None:
    assert ranks.parallel_operation(0) == 216000000.0
    assert (
        list(nbspawn.spawn(ranks.parallel_operation, nprocs=2, threads=2, start_method="fork", timeout=30))
        == [216000000.0] * 2
    )
    assert ranks.parallel_operation(0) == 216000000.0
    fork_safety.pause_openmp()  # the threads of this process's own pool


# ---------------------------------------------------------------- locks


def test_probe_names_where_a_forked_process_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no static check knows: a child that hangs in torch."""
    lock = threading.Lock()

    def wait_for_it() -> str:
        lock.acquire()
        return ""

    monkeypatch.setattr(fork_safety, "_PROBE_SECONDS", 2.0)
    monkeypatch.setattr(fork_safety, "_try_torch", wait_for_it)
    assert fork_safety.probe() == []
    with lock:
        (sentence,) = fork_safety.probe()
    line = wait_for_it.__code__.co_firstlineno + 1
    assert sentence.endswith(f"(it waits in wait_for_it (test_start_method.py, line {line}))")


def test_fork_as_asked_is_tried_once_and_again_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    trial = fork_safety._try_torch
    monkeypatch.setattr(fork_safety, "_found_safe", None)
    monkeypatch.setattr(fork_safety, "_in_forked_child", lambda question: tried.append(question) or [])
    for _ in range(3):
        assert chosen(requested="fork").method == "fork"
    assert tried == [trial]
    threads = fork_safety._threads()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert chosen(requested="fork").method == "fork"
    assert tried == [trial] * 2
    monkeypatch.setattr(fork_safety, "_in_forked_child", lambda question: ["a forked process hangs in torch"])
    done.set()
    thread.join()
    until(lambda: fork_safety._threads() == threads)  # the system's thread outlives Python's a little
    with pytest.raises(nbspawn.StartError, match="fork cannot work here: a forked process hangs.*-m forkserver"):
        nbspawn.spawn(ranks.succeed, nprocs=2, start_method="fork")


def test_probe_of_a_hang_within_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's handler runs in the child before any code of ours does."""
    armed = False
    os.register_at_fork(after_in_child=lambda: armed and threading.Event().wait())
    monkeypatch.setattr(fork_safety, "_PROBE_SECONDS", 0.5)
    armed = True
    try:
        (sentence,) = fork_safety.probe()
    finally:
        armed = False
    assert "in a library's own code for forked processes" in sentence


def test_what_will_not_say_what_it_is_does_not_hide_a_held_lock() -> None:
    """Proxies (weakref's, werkzeug's) raise whenever they are asked, once what they stand for has gone."""

    class Gone:
        pass

    class OutOfContext:
        @property
        def __class__(self) -> type:
            raise RuntimeError("working outside of a context")

    lock = threading.Lock()
    with lock:
        (message,) = fork_safety.stranded({"proxy": weakref.proxy(Gone()), "request": OutOfContext(), "lock": lock})
    assert message.startswith("lock is a lock that is held")


def test_held_lock_that_the_ranks_would_use_is_named() -> None:
    """Held by a thread of the kernel: nobody would release it in a forked rank."""
    lock, nested = threading.RLock(), {"of rows": [threading.Lock()]}

    def locked(rank: int) -> int:
        with lock, nested["of rows"][0]:
            return rank

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock, nested["of rows"][0]:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        with pytest.raises(nbspawn.StartError) as asked:
            nbspawn.spawn(locked, nprocs=2, start_method="fork")
        with pytest.raises(nbspawn.PayloadError, match="(?s)cannot travel.*fork.*is unsafe: fn -> lock is a lock"):
            nbspawn.spawn(locked, nprocs=2)
    finally:
        done.set()
        holder.join()
    assert "fn -> lock is a lock that is held" in str(asked.value)
    assert "fn -> nested['of rows'][0] is a lock that is held" in str(asked.value)
    assert list(nbspawn.spawn(locked, nprocs=2)) == [0, 1]


# ---------------------------------------------------------------- threads of libraries


NATIVE_THREAD = """
import ctypes
libc, thread, semaphore = ctypes.CDLL(None), ctypes.c_ulong(), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
libc.pthread_create(ctypes.byref(thread), None, libc.sem_wait, semaphore)
libc.pthread_setname_np(thread, {name!r})
"""


@pytest.fixture(params=[b"mine-0", b"ZMQbg/mine"])
def native_thread(request: pytest.FixtureRequest) -> Iterator[bytes]:
    """The name of a thread of C code."""
    made: dict[str, Any] = {}
    exec(NATIVE_THREAD.format(name=request.param), made)
    yield request.param
    made["libc"].sem_post(made["semaphore"])
    made["libc"].pthread_join(made["thread"], None)


def test_a_librarys_threads_make_fork_unsafe(native_thread: bytes) -> None:
    """By default; those that are known to do no harm, and Python's own, do not."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(threading.get_native_id).result()
        if native_thread.startswith(b"ZMQ"):
            assert chosen(function_with_a_lock()).method == "fork"
        else:
            with pytest.raises(nbspawn.PayloadError) as refused:
                chosen(function_with_a_lock())
            assert "is unsafe: a library's threads (mine-0) run in this kernel" in str(refused.value)
    assert chosen(requested="fork").method == "fork"
    assert chosen().method == "forkserver"
