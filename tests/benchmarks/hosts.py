"""Ranks on several hosts, over Ray, SSH and Slurm: nbspawn beside bare Ray actors, Ray's TorchTrainer, one host, and a
plain TCP connection.

    python tests/benchmarks/hosts.py [--rounds N] [--tasks start,train] [--json PATH]

The hosts are namespaces of this machine with a Ray cluster over them (tests/support/cluster.py): as root, in an
environment with all of binder/requirements.txt. All cells run in one kernel, in turn, and each is timed from its
submission to its end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import socket

import cluster
import samples
import slurm
import sshd
from cluster import Cluster
from kernels import ExecutedKernel, Kernel, Reply, ok
from machines import Machines
from slurm import Slurm
from sshd import Servers

MEGABYTES = 400

ALL_REDUCE = "import torch, torch.distributed as dist\nones = torch.ones(2)\ndist.all_reduce(ones)\nfloat(ones[0])"

ACTORS = """
import os, ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
@ray.remote(num_cpus=1, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "eth0"}})
class Worker:
    def meet(self):
        import socket
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    def run(self, rank, meet):
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=4)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        return float(ones[0])
def with_actors():
    group = placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    workers = [
        Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank // 2)).remote()
        for rank in range(4)
    ]
    meet = ray.get(workers[0].meet.remote())
    found = ray.get([worker.run.remote(rank, meet) for rank, worker in enumerate(workers)])
    for worker in workers:
        ray.kill(worker)
    remove_placement_group(group)
    return found
"""

TRAINER = """
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
def train():
    import torch, torch.distributed as dist
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert float(ones[0]) == 4
def with_trainer():
    scaling = ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD")
    env = {"env_vars": {"GLOO_SOCKET_IFNAME": "eth0"}}
    run = RunConfig(worker_runtime_env=env, storage_path=os.path.abspath("results"))
    gloo = TorchConfig(backend="gloo")
    return TorchTrainer(train, scaling_config=scaling, run_config=run, torch_config=gloo).fit()
"""

TRAIN = """
import time, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(256, 64)
began = time.monotonic()
for _ in range(200):
    loss = model(inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
time.monotonic() - began
"""

RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listens", flush=True)
    while True:
        one, _ = listener.accept()
        data = memoryview(bytearray(int(sys.argv[2])))
        while data:
            data = data[one.recv_into(data):]
        one.sendall(b"!")
        one.close()
"""


def start(task: samples.Task, kernel: Kernel, hosts: Cluster, rounds: int) -> None:
    """Four ranks on two hosts, to the end of an all_reduce."""
    on = f"%%spawn 4 --on ray:{hosts.address} --nnodes 2 -b gloo\n{ALL_REDUCE}"
    here = f"%%spawn 4 -b gloo\n{ALL_REDUCE}"
    task.quantity("first", "4 ranks on 2 hosts, a cell with one all_reduce: the first one")
    task.quantity("again", "the same, later ones", "s", "nbspawn on one host")
    task.add("first", "nbspawn", ok(kernel.execute(on, 120)).seconds)
    ok(kernel.execute("%ranks release"))
    ok(kernel.execute(here))
    ok(kernel.execute(ACTORS))
    task.add("first", "bare Ray actors", ok(kernel.execute("with_actors()", 120)).seconds)
    for _ in range(3):
        task.add("again", "bare Ray actors", ok(kernel.execute("with_actors()", 120)).seconds)
    try:
        ok(kernel.execute(TRAINER, 120))
        for turn in range(3):
            seconds = finished(kernel.execute("with_trainer()", 240)).seconds
            task.add("again" if turn else "first", "Ray's TorchTrainer", seconds)
    except (AssertionError, TimeoutError) as error:
        task.miss("Ray's TorchTrainer", "fails", samples.brief(str(error)))
    ok(kernel.execute(on, 120))
    for _ in range(rounds):
        task.add("again", "nbspawn", ok(kernel.execute(on)).seconds)
        task.add("again", "nbspawn on one host", ok(kernel.execute(here)).seconds)


def finished(reply: Reply) -> Reply:
    """What TorchTrainer returns has the error, if there was one."""
    assert "error=None" in ok(reply).result, reply
    return reply


def train(task: samples.Task, kernel: Kernel, hosts: Cluster, folder: Path) -> None:
    """DistributedDataParallel, beside torchrun: the whole cell or command, and the loop alone."""
    on = f"%%spawn 4 --on ray:{hosts.address} --nnodes 2 -b gloo -o found\n{TRAIN}"
    program = folder / "train.py"
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    body, _, last = TRAIN.strip().rpartition("\n")
    program.write_text(f"{group}{body}\nprint('loop', {last})\ndist.destroy_process_group()\n")
    for _ in range(2):  # what the first imports, the agents' fork servers have then
        ok(kernel.execute(on, 120))
        time.sleep(10)
    task.quantity("whole", "200 steps of DistributedDataParallel: the whole cell or command", "s", "torchrun")
    task.quantity("loop", "the same, the loop alone", "s", "torchrun")
    for round_ in range(5):
        task.add("whole", "nbspawn", ok(kernel.execute(on, 120)).seconds)
        task.add("loop", "nbspawn", max(kernel.value("list(found)")))
        began = time.monotonic()
        meet = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", hosts.address_of(1)]
        meet += ["--master-port", str(29511 + round_)]
        runs = [
            subprocess.Popen(
                [*hosts.inside(host), "env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1"]
                + [sys.executable, "-m", "torch.distributed.run", *meet, "--node-rank", str(host - 1), str(program)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host in (1, 2)
        ]
        printed = "".join(run.communicate(timeout=120)[0] for run in runs)
        task.add("whole", "torchrun", time.monotonic() - began)
        task.add("loop", "torchrun", max(map(float, re.findall(r"loop ([\d.]+)", printed))))


def push(task: samples.Task, kernel: Kernel, hosts: Cluster, rounds: int) -> None:
    """A large array from the kernel to three nodes."""
    ok(kernel.execute(f"import numpy\nlarge = numpy.ones({MEGABYTES} * 125_000)"))
    on = f"%%spawn 3 --on ray:{hosts.address} --nnodes 3\n"
    ok(kernel.execute(on + "rank", 120))
    ok(kernel.execute("import ray"))
    through_ray = """
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def last(array): return float(array[-1])
held = ray.put(large)
ray.get([last.remote(held) for _ in range(3)])
del held"""
    data = memoryview(bytearray(b"1") * (MEGABYTES * 1_000_000))
    with ExitStack() as stack:
        addresses = [stack.enter_context(receiving(hosts, host)) for host in (1, 2, 3)]
        task.quantity("sent", f"{MEGABYTES} MB to each of 3 hosts", "s", "plain TCP")
        for _ in range(rounds):
            began = time.monotonic()
            threads = [threading.Thread(target=sending, args=(data, address)) for address in addresses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            task.add("sent", "plain TCP", time.monotonic() - began)
            empty = ok(kernel.execute(on + "rank")).seconds
            # What a cell takes longer that reads the array.
            task.add("sent", "nbspawn", ok(kernel.execute(on + "float(large[-1])", 120)).seconds - empty)
            task.add("sent", "ray.put", ok(kernel.execute(through_ray, 120)).seconds)


def kept(task: samples.Task, kernel: Kernel, hosts: Cluster) -> None:
    """Cells in ranks that stay, and the kernel while they wait."""
    task.quantity("cell", "a cell in 4 kept ranks on 2 hosts")
    task.quantity("idle", "processor time of the idle kernel, share of a core", "cores")
    ok(kernel.execute(f"%%spawn 4 --on ray:{hosts.address} --nnodes 2 -b gloo --keep\nrank"))
    for _ in range(60):
        task.add("cell", "nbspawn", ok(kernel.execute("%%ranks\npass")).seconds)
    idle = "import psutil, time\nkernel = psutil.Process()\nbefore = sum(kernel.cpu_times()[:2])\ntime.sleep(10)"
    for _ in range(3):
        ok(kernel.execute(idle))
        task.add("idle", "nbspawn", kernel.value("sum(kernel.cpu_times()[:2]) - before") / 10)
    ok(kernel.execute("%ranks stop"))


def ways(task: samples.Task, kernel: Kernel, rounds: int) -> None:
    """The same cell on two hosts by SSH and by Slurm, in turns with one host; and large data by SSH."""
    task.quantity("first", "4 ranks on 2 hosts, a cell with one all_reduce: the first one")
    task.quantity("again", "the same, later ones", "s", "one host")
    task.quantity("sent", f"{MEGABYTES} MB to a host", "s", "by Slurm, over plain TCP")
    with Servers(2) as servers, Slurm(2) as nodes:
        job = nodes.allocate("--nodes=2", "--cpus-per-task=2")
        environment = {**nodes.environment, "NBSPAWN_SSH": servers.client}
        ok(kernel.execute(f"import os\nos.environ.update({environment!r})"))
        for name, on in {"one host": "", "by SSH": "--on ssh:host1,host2", "by Slurm": f"--on slurm:{job}"}.items():
            cell = f"%%spawn 4 {on} -b gloo\n{ALL_REDUCE}"
            task.add("first", name, ok(kernel.execute(cell, 120)).seconds)
            for _ in range(rounds if on else 0):
                task.add("again", name, ok(kernel.execute(cell)).seconds)
                if name == "by SSH":
                    task.add("again", "one host", ok(kernel.execute(f"%%spawn 4 -b gloo\n{ALL_REDUCE}")).seconds)
        ok(kernel.execute(f"import numpy\nlarge = numpy.ones({MEGABYTES} * 125_000)"))
        for name, on in (("by SSH", "ssh:host2"), ("by Slurm, over plain TCP", f"slurm:{job} --nnodes 1")):
            cell = f"%%spawn 1 --on {on}\n"
            ok(kernel.execute(cell + "rank", 120))
            for _ in range(rounds):
                empty = ok(kernel.execute(cell + "rank")).seconds
                task.add("sent", name, ok(kernel.execute(cell + "float(large[-1])", 120)).seconds - empty)
        through = f"head -c {MEGABYTES * 1_000_000} /dev/zero | {servers.client} host2 'cat > /dev/null'"
        for _ in range(rounds):
            began = time.monotonic()
            subprocess.run(through, shell=True, check=True)
            task.add("sent", "ssh alone", time.monotonic() - began)
        ok(kernel.execute("%ranks release"))


@contextmanager
def receiving(hosts: Machines, host: int) -> Iterator[tuple[str, int]]:
    """A program there that receives, over plain TCP."""
    address = hosts.address_of(host)
    receiver = subprocess.Popen(
        [*hosts.inside(host), sys.executable, "-c", RECEIVE, address, str(MEGABYTES * 1_000_000)],
        stdout=subprocess.PIPE,
    )
    try:
        assert receiver.stdout is not None and receiver.stdout.readline()
        yield address, 7000
    finally:
        receiver.kill()
        receiver.wait()


def sending(data: memoryview, address: tuple[str, int]) -> float:
    """For how many seconds that takes."""
    began = time.monotonic()
    with socket.create_connection(address) as plain:
        plain.sendall(data)
        assert plain.recv(1) == b"!"
    return time.monotonic() - began


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tasks", metavar="A,B", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}")
    samples.add_option(parser)
    given = parser.parse_args()
    record = samples.Record("hosts", given.json)
    names = [name for name in TASKS if name in given.tasks.split(",")]
    absent = cluster.missing() or sshd.missing() or slurm.missing()
    if absent:
        for name in names:
            record.begin(name).miss(samples.ALL, "not measured", absent)
        record.save()
        sys.exit(f"Not measured: {absent}.")
    with Cluster(3) as hosts, tempfile.TemporaryDirectory() as folder, ExecutedKernel(Path(folder)) as kernel:
        ok(kernel.execute("%load_ext nbspawn\nimport torch"))
        for name in names:
            with record.measuring(name) as task:
                TASKS[name](task, kernel, hosts, given.rounds, Path(folder))
        ok(kernel.execute("import ray\nray.shutdown()"))


TASKS: dict[str, Callable[[samples.Task, Kernel, Cluster, int, Path], None]] = {
    "start": lambda task, kernel, hosts, rounds, folder: start(task, kernel, hosts, rounds),
    "kept": lambda task, kernel, hosts, rounds, folder: kept(task, kernel, hosts),
    "train": lambda task, kernel, hosts, rounds, folder: train(task, kernel, hosts, folder),
    "push": lambda task, kernel, hosts, rounds, folder: push(task, kernel, hosts, min(rounds, 5)),
    "ways": lambda task, kernel, hosts, rounds, folder: ways(task, kernel, rounds),
}

if __name__ == "__main__":
    main()
