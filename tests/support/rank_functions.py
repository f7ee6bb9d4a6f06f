"""What the tests' ranks do. In a module of its own, because ranks that do not fork import their function by name."""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbspawn

LONG = 600.0  # seconds, more than any wait: a rank that sleeps this long is expected to be stopped

# ---------------------------------------------------------------- ends of every kind


def succeed(rank: int) -> None:
    pass


def square(rank: int) -> int:
    return rank * rank


def put_rank(rank: int, queue: Any) -> None:
    queue.put(rank)


def raise_if(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"legitimate exception from process {rank}")
    time.sleep(LONG)


def exit_if(rank: int, failing: int) -> None:
    if rank == failing:
        sys.exit(7)
    time.sleep(LONG)


def raise_in_all(rank: int) -> None:
    time.sleep(random.random() / 10)
    raise ValueError(f"legitimate exception from process {rank}")


def raise_keyboard_interrupt(rank: int) -> None:
    if rank == 0:
        raise KeyboardInterrupt("of the rank's own")


def abort_in_0(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(LONG)


def signal_self(rank: int, number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(LONG)


def sys_exit_in_0(rank: int, code: object) -> None:
    if rank == 0:
        sys.exit(code)  # type: ignore[arg-type]
    time.sleep(LONG)


def sys_exit(rank: int, code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def os_exit(rank: int, code: int) -> None:
    print("last words", flush=True)
    os._exit(code)


def segfault(rank: int) -> None:
    ctypes.string_at(0)


def first_0_then_raise(rank: int, queue: Any) -> None:
    if rank == 0:
        return
    queue.get()  # the test says when rank 0 has gone
    raise ValueError("legitimate exception")


def raise_with_teardown_that_hangs(rank: int) -> None:
    """What NCCL's teardown does: hang where the interpreter waits for it."""
    import atexit
    from multiprocessing import util

    atexit.register(time.sleep, LONG)
    util.Finalize(None, time.sleep, args=(LONG,), exitpriority=1)
    threading.Thread(target=time.sleep, args=(LONG,)).start()
    raise ValueError("with a teardown that hangs")


def goes_on_afterwards(rank: int, path: str) -> str:
    """What is the user's runs when a spawned interpreter ends: a thread of theirs, then what they have registered."""
    import atexit

    def say(word: str) -> None:
        with open(f"{path}-{rank}", "a") as file:
            file.write(word)

    def late() -> None:
        threading.main_thread().join(0.2)
        say("thread ")

    atexit.register(say, "atexit")
    threading.Thread(target=late).start()
    return "returned"


# ---------------------------------------------------------------- being stopped


def mark_and_sleep(rank: int, folder: str) -> None:
    """Say that this rank runs, by a file, and go on until it is stopped."""
    _mark(folder, f"running-{rank}")
    time.sleep(LONG)


def sleep_for_interrupt(rank: int, folder: str) -> str:
    caught = 0
    try:
        _mark(folder, f"running-{rank}")
        time.sleep(LONG)
    except KeyboardInterrupt:
        caught += 1
    finally:
        _mark(folder, f"finally-{rank}")
    try:
        time.sleep(0.3)  # a second KeyboardInterrupt would land here
    except KeyboardInterrupt:
        caught += 1
    return f"caught {caught}"


def fall_to_interrupt(rank: int, folder: str) -> None:
    try:
        _mark(folder, f"running-{rank}")
        time.sleep(LONG)
    finally:
        _mark(folder, f"finally-{rank}")


def interrupt_the_starter(rank: int, folder: str) -> None:
    """The first rank, at once: the others are started after it."""
    try:
        _mark(folder, f"running-{rank}")
        if not rank:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(LONG)
    finally:
        _mark(folder, f"finally-{rank}")


def swallow_interrupts(rank: int, folder: str) -> None:
    _mark(folder, f"running-{rank}")
    while True:
        try:
            time.sleep(LONG)
        except KeyboardInterrupt:
            continue


def ignore_sigterm(rank: int, folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark_and_sleep(rank, folder)


def ignore_sigterm_but_0_raises(rank: int, folder: str) -> None:
    """Rank 0 raises once its peers are deaf to SIGTERM."""
    if rank != 0:
        ignore_sigterm(rank, folder)
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.01)
    raise ValueError("rank 0 raised")


def leave_in_good_order_after_0_raised(rank: int, folder: str, seconds: float) -> None:
    if rank == 0:
        raise ValueError("rank 0 raised")
    time.sleep(seconds)
    _mark(folder, f"left-{rank}")


def stuck_in_c_with_grandchild(rank: int, folder: str) -> None:
    """Neither signal handlers nor the GIL are of use to whoever wants to end this rank."""
    child = subprocess.Popen(["sleep", "600"])
    _mark(folder, f"pids-{rank}", f"{os.getpid()} {child.pid}")
    ctypes.PyDLL(None).sleep(600)


def _mark(folder: str, name: str, text: str = "") -> None:
    """A file that is there whole or not at all."""
    draft = Path(folder, f".{name}")
    draft.write_text(text)
    draft.rename(Path(folder, name))


# ---------------------------------------------------------------- children of ranks


def start_children(rank: int, folder: str, end: str) -> None:
    """Subprocesses and forked workers, in the rank's session and in their own, left running when the rank ends."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    workers = [fork_sleeper(own_session=own) for own in (False, True)]
    _mark(folder, f"pids-{rank}", " ".join(map(str, [child.pid for child in children] + workers)))
    for child in children:
        child.returncode = 0  # no ResourceWarning: leaving it behind is the point
    if end == "raise":
        raise ValueError("children remain")


def fork_sleeper(own_session: bool) -> int:
    pid = os.fork()
    if pid == 0:
        if own_session:
            os.setsid()
        time.sleep(600)
        os._exit(0)
    return pid


def load_data_with_workers(rank: int) -> float:
    from torch.utils.data import DataLoader

    return float(sum(batch.sum() for batch in DataLoader(torch.arange(16.0), batch_size=4, num_workers=2)))


def nest(rank: int, folder: str, method: str) -> None:
    """A run within a rank that is killed in the middle: its own ranks must go too."""
    nbspawn.start_processes(mark_pid_and_sleep, (folder,), nprocs=2, join=False, start_method=method)
    while len(list(Path(folder).glob("pids-*"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LONG)


def mark_pid_and_sleep(rank: int, folder: str) -> None:
    _mark(folder, f"pids-{rank}", str(os.getpid()))
    time.sleep(LONG)


def sleep_long(rank: int) -> None:
    time.sleep(LONG)


def fail_in_nested(rank: int) -> None:
    nbspawn.start_processes(raise_if, args=(1,), nprocs=2, start_method="fork")


# ---------------------------------------------------------------- arguments


def use_everything(
    rank: int, queue: Any, event: Any, lock: Any, value: Any, connection: Any, shared: torch.Tensor
) -> None:
    event.wait(30)
    with lock:
        value.value += 1
    shared[rank] = rank + 1
    connection.send(f"from {rank}")
    queue.put((rank, torch.full((2,), rank).tolist()))


def daemonic(rank: int) -> bool:
    import multiprocessing

    return multiprocessing.current_process().daemon


# ---------------------------------------------------------------- torch.distributed


def all_reduce_here(rank: int) -> float:
    """As under torchrun: everything from the environment."""
    dist.init_process_group("gloo")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def meet_and_leave(rank: int) -> None:
    dist.init_process_group("gloo")


def all_reduce_in_ready_group(rank: int) -> tuple[float, int]:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item(), dist.get_world_size()


def tutorial(rank: int, world_size: int, port: int) -> float:
    """The DDP tutorial's set-up, with its own address and port."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2) * rank).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None
    dist.destroy_process_group()
    return float(grad.sum())


def one_leaves_a_collective(rank: int, failing: int) -> None:
    """The failing rank raises while its peers wait for it in a collective: they get only echoes."""
    dist.barrier()
    if rank == failing:
        raise ZeroDivisionError("the root cause")
    for _ in range(1000):
        dist.all_reduce(torch.ones(10))
    dist.barrier()


def group_that_stays(rank: int) -> bool:
    dist.all_reduce(torch.ones(1))
    return dist.is_initialized()


# ---------------------------------------------------------------- what a rank sees


def surroundings(rank: int, *names: str) -> dict[str, Any]:
    return {
        "env": {name: os.environ.get(name) for name in names},
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "threads": torch.get_num_threads(),
        "session": os.getsid(0) == os.getpid(),
    }


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def numpy_draw(rank: int) -> float:
    import numpy

    return float(numpy.random.rand())


def run_module(rank: int, name: str) -> object:
    import importlib

    return importlib.import_module(name).answer()


def listening(rank: int) -> list[tuple[str, int]]:
    """Where this rank could be reached from."""
    import psutil

    return [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]


def look_up_own_name(rank: int) -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def parallel_operation(rank: int) -> float:
    x = torch.ones(600, 600)
    return float((x @ x).sum())


def say(rank: int, text: str) -> None:
    print(f"{text} {rank}")


def mixed_end(rank: int, turn: int) -> int:
    """A different end at each turn."""
    kind = turn % 5
    if rank == 1 and kind == 1:
        raise ValueError(f"turn {turn}")
    if rank == 1 and kind == 2:
        os._exit(7)
    if rank == 1 and kind == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and kind in (1, 2, 3):
        time.sleep(LONG)
    print("turn", turn)
    return turn


# ---------------------------------------------------------------- what the sampler sees


def reduce_when_told(rank: int, go: str) -> None:
    if rank == 0:
        while not os.path.exists(go):
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1))


def ddp_backward_when_told(rank: int, go: str) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if rank == 0:
        while not os.path.exists(go):
            time.sleep(0.01)
    loss.backward()


def ddp_forward_when_told(rank: int, go: str) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(4))  # which has buffers
    if rank == 0:
        while not os.path.exists(go):
            time.sleep(0.01)
    model(torch.ones(2, 4))


def ddp_made_when_told(rank: int, go: str) -> None:
    if rank == 0:
        while not os.path.exists(go):
            time.sleep(0.01)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))


def wait_when_told(rank: int, go: str) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True) if rank else None
    if work is None:
        while not os.path.exists(go):
            time.sleep(0.01)
        work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()


def reduce_for(rank: int, seconds: float) -> None:
    end = torch.tensor(time.monotonic() + seconds, dtype=torch.float64)
    dist.broadcast(end, 0)
    go_on = torch.ones(1)
    while go_on.item():
        go_on[0] = float(time.monotonic() < end.item())
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)


def sleep_for(rank: int, seconds: float) -> None:
    time.sleep(seconds)


def work_for(rank: int, seconds: float, size: int) -> int:
    used = bytearray(size)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return len(used)


def use_for_a_moment(rank: int, size: int) -> None:
    """So many bytes."""
    bytearray(size)


def use_and_fail(rank: int, size: int) -> None:
    use_for_a_moment(rank, size)
    raise KeyError("hieght")


def hold_the_gil(rank: int, seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    time.sleep(1.5)


def two_steps(rank: int, first: float, second: float) -> None:
    pause(first)
    time.sleep(second)


def pause(seconds: float) -> None:
    time.sleep(seconds)


def stand_in_different_places(rank: int, folder: str) -> None:
    threading.Thread(target=threading.Event().wait, args=(600,), name="feeder", daemon=True).start()
    _mark(folder, f"running-{rank}")
    if rank == 1:
        collections.deque(itertools.repeat(0, 10**12), 0)
    pause(600)


def stand_here_then_there(rank: int, folder: str) -> None:
    def stand_here() -> None:
        while not os.path.exists(f"{folder}/go"):
            pass

    def stand_there() -> None:
        while True:
            pass

    _mark(folder, f"running-{rank}")
    stand_here()
    _mark(folder, f"there-{rank}")
    stand_there()


def of_main(rank: int, name: str) -> Any:
    return vars(sys.modules["__main__"])[name]


# ---------------------------------------------------------------- losses (test_survival.py)


def add(rank: int, one: int, other: int) -> int:
    return one + other


def wait_for_file(rank: int, path: str, value: object) -> object:
    """The value; without one, many bytes."""
    while not os.path.exists(path):
        pause(0.01)
    return bytes(4_000_000) if value is None else value


def print_beyond_the_limit(rank: int, how: str) -> None:
    """As on a disk that is full; the line has no end, so that nothing is written before the rank does."""
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        if how == "python":
            print("x" * 5000, end="")
        else:
            ctypes.CDLL(None).printf(b"x" * 5000)


def leave_child(rank: int, folder: str) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, f"child-{rank}").write_text(str(child.pid))


def leave_a_child_and_stop(rank: int, guardian: int) -> int:
    """The child is in a session of its own, so that only the guardian, which is stopped, can end it."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.kill(guardian, signal.SIGSTOP)
    return child.pid


def wait_for_nobody(rank: int, what: str) -> None:
    child = subprocess.Popen(["sleep", "3"])
    if what == "process":
        child.wait()
    elif what == "any child":
        os.wait()
    elif what == "event":
        threading.Event().wait(3.0)
    elif what == "work that is done":
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(3.0), work.wait()  # fmt: skip
    else:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            concurrent.futures.wait([pool.submit(time.sleep, 3.0)])
    child.wait()
