"""Records what a real GPU, NCCL, torch and nbspawn do where fake ones can only guess. No test: nothing is wrong.

    python tests/gpu_probe.py [--out probes.jsonl] [PROBE ...]

Each probe is a process of its own, in which everything is ended after its time. A failure is a result, and the next
probe is made. What happens becomes a line of JSON in the file, and text here. On one GPU two ranks are two hosts to
NCCL, which refuses two on one GPU by the hashes of their hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbspawn

BEGAN = float(os.environ.get("PROBE_BEGAN") or time.monotonic())
RANK = int(os.environ.get("PROBE_RANK", -1))
SECOND = 2 * 10**9  # cycles of torch.cuda._sleep, about

PROBES: dict[str, tuple[float, Callable[[], None]]] = {}
"""Seconds, and what is called in the probe's process."""
RANKS: dict[str, Callable[[torch.device], None]] = {}
"""What is called in each of two ranks of torch's alone."""


def say(**what: Any) -> None:
    """A fact: a line of JSON, with the seconds since the probe began."""
    rank = {"rank": RANK} if RANK >= 0 else {}
    fact = json.dumps({"at": round(time.monotonic() - BEGAN, 2), **rank, **what}, default=str)
    print(f"\n{fact}", flush=True)  # others write there, too, and may not have ended their line


def timed(name: str, action: Callable[[], Any]) -> Any:
    """What it returns or raises, and when."""
    began = time.monotonic()
    try:
        result = action()
        text = str(result)
    except BaseException as error:
        result, text = None, f"{type(error).__name__}: {error}"[:600]
    say(**{name: text, "took": round(time.monotonic() - began, 3)})
    return result


def probe(seconds: float) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        PROBES[function.__name__] = seconds, function
        return function

    return add


def ranks(seconds: float = 30.0, spy_at: float = 0.0, **variants: dict[str, str]) -> Any:
    """The function runs in two ranks. ``spy_at``: py-spy looks at rank 0 then. Each of the variants is a probe with
    these environment variables."""

    def add(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
        name = function.__name__
        RANKS[name] = function
        for variant, env in (variants or {"": {}}).items():
            PROBES[f"{name}_{variant}".rstrip("_")] = seconds, lambda env=env: two(name, spy_at, env)
        return function

    return add


def two(name: str, spy_at: float, env: dict[str, str]) -> None:
    single = torch.cuda.device_count() < 2
    started = []
    for rank in range(2):
        own = {"PROBE_RANK": str(rank), "PROBE_STORE": f"{tempfile.gettempdir()}/probe-{os.getpid()}"}
        if single:
            own |= {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket"}
        command = [sys.executable, __file__, "--rank", name]
        started.append(subprocess.Popen(command, env={**os.environ, **own, **env}))
    if spy_at:
        time.sleep(spy_at)
        command = ["py-spy", "dump", "--native", "--pid", str(started[0].pid)]
        timed(
            "py-spy", lambda: subprocess.check_output(command, text=True, timeout=10).split("\n\n")[1].splitlines()[:16]
        )
    for rank, process in enumerate(started):
        code = process.wait()
        say(ended=rank, code=signal.Signals(-code).name if code < 0 else code)


def in_rank(name: str) -> None:
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    join(20.0 if name == "group_timeout" else 600.0)
    timed("first all_reduce", lambda: summed(device))
    threading.Thread(target=watch, daemon=True).start()
    timed(name, lambda: RANKS[name](device))
    os._exit(0)  # the end of a process with a hung stream is not asked about


def join(timeout: float = 600.0, again: str = "") -> None:
    store = dist.FileStore(os.environ["PROBE_STORE"] + again, 2)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=2, timeout=timedelta(seconds=timeout))


def summed(device: torch.device, size: int = 4) -> float:
    x = torch.ones(size, device=device)
    dist.all_reduce(x)
    return x[0].item()


def watch() -> None:
    """Each 5 s, as nbspawn's sampler: where the main thread is, how much it computes, and what NCCL has."""
    main = threading.main_thread().ident or 0
    clock = time.pthread_getcpuclockid(main)
    used = time.clock_gettime(clock)
    while True:
        time.sleep(5)
        before, used = used, time.clock_gettime(clock)
        frame = sys._current_frames()[main]
        at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        say(at_line=at, cpu_share=round((used - before) / 5, 2), **recorded())


def recorded() -> dict[str, Any]:
    began = time.monotonic()
    dump = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace(True, False, False))
    shown = ("collective_seq_id", "p2p_seq_id", "profiling_name", "state", "retired", "input_sizes")
    calls = [" ".join(str(entry[name]) for name in shown) for entry in dump.get("entries", ())[-4:]]
    return {"pg_status": dump.get("pg_status"), "calls": calls, "asking_took": round(time.monotonic() - began, 4)}


# ---------------------------------------------------------------- what torch and NCCL do


@ranks(spy_at=18.0)
def missing(device: torch.device) -> None:
    if RANK == 0:
        summed(device)
    time.sleep(20)


@ranks(spy_at=18.0)
def another_shape(device: torch.device) -> None:
    summed(device, size=4 + 100_000 * RANK)


@ranks(spy_at=18.0)
def another_call(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    dist.all_reduce(x) if RANK == 0 else dist.broadcast(x, 0)
    x.tolist()


@ranks()
def a_batch_of_sends_that_is_over(device: torch.device) -> None:
    came = torch.empty(4, device=device)
    pair = [dist.P2POp(dist.isend, torch.ones_like(came), 1 - RANK), dist.P2POp(dist.irecv, came, 1 - RANK)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    came.tolist()
    time.sleep(5)


@ranks(both={"BOTH": "1"}, one={"BOTH": ""})
def abort_from_a_thread(device: torch.device) -> None:
    def abort() -> None:
        time.sleep(3)
        if RANK == 0 or os.environ["BOTH"]:
            timed("abort", dist.group.WORLD._get_backend(device).abort)  # type: ignore[union-attr]

    threading.Thread(target=abort, daemon=True).start()
    if RANK == 0:
        timed("item", lambda: summed(device))
    time.sleep(6 - RANK)
    timed("abort of the group", dist.distributed_c10d._abort_process_group)
    join(again="-again")
    timed("a new group's all_reduce", lambda: summed(device))


@ranks(destroy={"HOW": "destroy_process_group"}, abort={"HOW": "_abort_process_group"})
def with_a_call_in_flight(device: torch.device) -> None:
    if RANK == 0:
        dist.all_reduce(torch.ones(4, device=device))
    timed(os.environ["HOW"], getattr(dist.distributed_c10d, os.environ["HOW"]))


@ranks(rethrow_0={"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}, rethrow_1={"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"})
def device_assert(device: torch.device) -> None:
    if RANK == 0:
        torch._assert_async(torch.tensor(False, device=device))
        time.sleep(1)  # the watchdog sees it first
    timed("item", lambda: summed(device))


@ranks(seconds=40.0)
def rank_0_leaves(device: torch.device) -> None:
    if RANK == 0:
        time.sleep(2)
        os._exit(0)
    summed(device)


@ranks(seconds=60.0)
def group_timeout(device: torch.device) -> None:
    if RANK == 0:
        summed(device)
    time.sleep(50)


@ranks()
def ask_the_recorder_in_a_graph_capture(device: torch.device) -> None:
    x, graph = torch.ones(4, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        say(asked_while_capturing=recorded())
        time.sleep(3)  # the watching thread asks, too
        x += 1
    timed("replay", graph.replay)
    timed("item", lambda: x[0].item())


@ranks()
def long_kernel(device: torch.device) -> None:
    torch.cuda._sleep(8 * SECOND)
    summed(device)


@ranks()
def long_backward(device: torch.device) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: torch.cuda._sleep(8 * SECOND) or gradient * gradient.sum().item())
    y.sum().backward()


# ---------------------------------------------------------------- what nbspawn does

STATES = {
    "sleep": "time.sleep(600)",
    "python": "while True: pass",
    "kernels": "while True: x = x @ x; torch.cuda.synchronize()",
    "long_kernel": "torch.cuda._sleep(200 * 10**9); torch.cuda.synchronize()",
    "collective": "dist.all_reduce(x) if rank == 0 else time.sleep(600)\nx.tolist()",
    "first_collective": "group = dist.new_group()\ndist.all_reduce(x, group=group) if rank == 0 else time.sleep(600)",
}


SUM = "x = torch.ones(512, 512, device=device)\ndist.all_reduce(x)\nx[0, 0].item()"


def stop(state: str) -> None:
    """Seconds from Stop to the command's end, whether the kept ranks live, and seconds until their processes end."""
    with nbspawn.Session("gpu", backend="auto") as session:
        pids = session.pids
        session.execute(f"import time, torch, torch.distributed as dist\n{SUM}")
        running = session.execute(STATES[state], background=True)
        time.sleep(6)
        say(shown=running.status())
        running.cancel()
        timed("the command", running.result)
        say(alive=session.alive, ended=session.ended)
        timed("a sum", lambda: session.execute(SUM, timeout=10))
        began = time.monotonic()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    say(last_process_after=round(time.monotonic() - began, 2))


for state in STATES:
    PROBES[f"stop_{state}"] = 40.0, lambda state=state: stop(state)


@probe(60.0)
def an_idle_rank() -> None:
    """Seconds and MB of its own memory, before and after its first use of the GPU."""
    memory = "[int(line.split()[1]) >> 10 for line in open('/proc/self/smaps_rollup') if line.startswith('Pss:')]"
    for method in ("fork", "forkserver", "forkserver", "spawn"):
        began = time.monotonic()
        with nbspawn.Session("gpu", start_method=method) as session:
            say(method=method, start=round(time.monotonic() - began, 3), mb=list(session.execute(memory)))
            timed("first use", lambda: session.execute("import torch\ntorch.ones(1, device=device).item()"))
            say(mb=list(session.execute(memory)), gpu=list(session.execute("torch.cuda.mem_get_info()")))


def parameters(rank: int, model: list[torch.Tensor]) -> tuple[str, float]:
    return str(model[0].device), float(sum(each[0].item() for each in model))


@probe(180.0)
def a_big_model() -> None:
    """On the GPU of the kernel: 10 GB, or half of what is free there, in tensors of 256 MB. The machine's memory may
    have to hold it three times."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(10 << 30, torch.cuda.mem_get_info()[0] // 2, free // 4)
    model = [torch.ones(64 << 20, device="cuda") for _ in range(size >> 28)]
    timed("sent", lambda: list(nbspawn.spawn(parameters, (model,), 1, timeout=150)))
    say(gb=size / 2**30, peak_of_the_kernel_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def imported(package: str) -> None:
    """In what a fork server does: it imports, and the child uses the GPU."""
    timed("import", lambda: __import__(package))
    say(initialised=torch.cuda.is_initialized(), threads=threading.active_count())
    if not (child := os.fork()):
        timed("use in a forked process", lambda: torch.ones(1, device="cuda").item())
        os._exit(0)
    say(status=os.waitpid(child, 0)[1])


for package in ("triton", "bitsandbytes", "transformers", "torchvision", "deepspeed", "flash_attn", "torch._inductor"):
    PROBES[f"import_{package}"] = 60.0, lambda package=package: imported(package)


# ---------------------------------------------------------------- one probe after the other


def record(name: str) -> dict[str, Any]:
    """What it said, and how it ended; what is left of it is killed."""
    seconds, began = PROBES[name][0], time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        env = {**os.environ, "PROBE_BEGAN": str(began)}
        command = [sys.executable, __file__, "--probe", name]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        try:
            code = process.wait(seconds)
            ended = signal.Signals(-code).name if code < 0 else f"code {code}"
        except subprocess.TimeoutExpired:
            ended = f"killed after {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            left = end_all(f"PROBE_BEGAN={began}".encode())
        process.wait()
        out.seek(0)
        lines = out.read().splitlines()
    facts, printed = [], []
    for line in filter(None, lines):
        try:
            facts.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            printed.append(line[:300])
    took = round(time.monotonic() - began, 1)
    return {"probe": name, "ended": ended, "took": took, "left": left, "facts": facts, "printed": printed[-40:]}


def end_all(mark: bytes) -> int:
    """Outside of its process group: kill all processes with this in their environment; returns how many there were."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found += 1
        except OSError:
            continue  # another user's, or it has ended
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probes", nargs="*", metavar="PROBE", help=f"of {', '.join(PROBES)}")
    parser.add_argument("--out", default="probes.jsonl")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return in_rank(given.rank)
    if given.probe:
        return PROBES[given.probe][1]()
    for name in given.probes or PROBES:
        found = record(name)
        with open(given.out, "a") as file:
            print(json.dumps(found), file=file)
        print(f"{name}: {found['ended']}, {found['took']} s, {found['left']} processes left behind", flush=True)
        for fact in found["facts"]:
            print(
                f"  {fact.pop('at'):6.2f}  "
                + ", ".join(f"{key}: {' '.join(str(value).split())}" for key, value in fact.items())
            )
        print("".join(f"  | {line}\n" for line in found["printed"][-8:]), end="", flush=True)


if __name__ == "__main__":
    main()
