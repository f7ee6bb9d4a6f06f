"""Ranks on several hosts: nbspawn beside bare Ray actors, Ray's TorchTrainer, one host, and a plain TCP connection.

    python tests/benchmarks/hosts.py [--rounds N]

The hosts are namespaces of this machine with a Ray cluster over them (tests/support/cluster.py): as root, in an
environment with all of binder/requirements.txt. All cells run in one kernel, in turn, and each is timed from its
submission to its end. Shown are medians, with the least and the greatest, and ratios of the rounds with their quarter
and three-quarter points.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import socket

from cluster import Cluster
from kernels import Kernel, Reply, ok

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


def described(times: list[float]) -> str:
    """The median, with the least and the greatest."""
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f}, {len(times)})"


def ratio(of: list[float], to: list[float]) -> str:
    """Round by round."""
    ratios = [one / other for one, other in zip(of, to, strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def start(kernel: Kernel, hosts: Cluster, rounds: int) -> None:
    """Four ranks on two hosts, to the end of an all_reduce."""
    on = f"%%spawn 4 --on ray:{hosts.address} --nnodes 2 -b gloo\n{ALL_REDUCE}"
    here = f"%%spawn 4 -b gloo\n{ALL_REDUCE}"
    print("4 ranks on 2 nodes, to the end of a cell with one gloo all_reduce")
    print(f"  nbspawn, first:      {ok(kernel.execute(on, 120)).seconds:.2f} s")
    ok(kernel.execute("%ranks release"))
    ok(kernel.execute(here))
    ok(kernel.execute(ACTORS))
    print(f"  bare actors, first:  {ok(kernel.execute('with_actors()', 120)).seconds:.2f} s")
    actors = [ok(kernel.execute("with_actors()", 120)).seconds for _ in range(3)]
    print(f"  bare actors, again:  {described(actors)}")
    ok(kernel.execute(TRAINER, 120))
    trainer = [finished(kernel.execute("with_trainer()", 240)).seconds for _ in range(3)]
    print(f"  TorchTrainer:        first {trainer[0]:.1f} s, then {trainer[1]:.1f} and {trainer[2]:.1f} s")
    ok(kernel.execute(on, 120))
    several, one = [], []
    for _ in range(rounds):
        several.append(ok(kernel.execute(on)).seconds)
        one.append(ok(kernel.execute(here)).seconds)
    print(f"  nbspawn, again:      {described(several)}")
    print(f"  nbspawn on one host: {described(one)}; several are {ratio(several, one)} x as long")
    print(f"  bare actors / nbspawn: {statistics.median(actors) / statistics.median(several):.0f}")


def finished(reply: Reply) -> Reply:
    """What TorchTrainer returns has the error, if there was one."""
    assert "error=None" in ok(reply).result, reply
    return reply


def train(kernel: Kernel, hosts: Cluster, folder: Path) -> None:
    """DistributedDataParallel, beside torchrun: the whole cell or command, and the loop alone."""
    on = f"%%spawn 4 --on ray:{hosts.address} --nnodes 2 -b gloo -o found\n{TRAIN}"
    program = folder / "train.py"
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    body, _, last = TRAIN.strip().rpartition("\n")
    program.write_text(f"{group}{body}\nprint('loop', {last})\ndist.destroy_process_group()\n")
    for _ in range(2):  # what the first imports, the agents' fork servers have then
        ok(kernel.execute(on, 120))
        time.sleep(10)
    ours, theirs, loops, their_loops = [], [], [], []
    for round_ in range(5):
        ours.append(ok(kernel.execute(on, 120)).seconds)
        loops.append(max(kernel.value("list(found)")))
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
        theirs.append(time.monotonic() - began)
        their_loops.append(max(map(float, re.findall(r"loop ([\d.]+)", printed))))
    print("200 steps of DistributedDataParallel on 2 nodes of 2 ranks")
    print(f"  nbspawn: the cell {described(ours)}, its loop {described(loops)}")
    print(f"  torchrun: the command {described(theirs)}, its loop {described(their_loops)}")
    print(f"  the loop under nbspawn takes {ratio(loops, their_loops)} x as long")


def push(kernel: Kernel, hosts: Cluster, rounds: int) -> None:
    """A large array from the kernel to three nodes."""
    ok(kernel.execute(f"import numpy\nlarge = numpy.ones({MEGABYTES} * 125_000)"))
    on = f"%%spawn 3 --on ray:{hosts.address} --nnodes 3\n"
    ok(kernel.execute(on + "rank", 120))
    through_ray = """
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def last(array): return float(array[-1])
held = ray.put(large)
ray.get([last.remote(held) for _ in range(3)])
del held"""
    receivers = [
        subprocess.Popen(
            [*hosts.inside(host), sys.executable, "-c", RECEIVE, hosts.address_of(host), str(MEGABYTES * 1_000_000)],
            stdout=subprocess.PIPE,
        )
        for host in (1, 2, 3)
    ]
    data = memoryview(bytearray(b"1") * (MEGABYTES * 1_000_000))

    def send(host: int) -> None:
        with socket.create_connection((hosts.address_of(host), 7000)) as plain:
            plain.sendall(data)
            assert plain.recv(1) == b"!"

    try:
        for receiver in receivers:
            assert receiver.stdout is not None and receiver.stdout.readline()
        plain, ours, rays = [], [], []
        for _ in range(rounds):
            began = time.monotonic()
            threads = [threading.Thread(target=send, args=(host,)) for host in (1, 2, 3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            plain.append(time.monotonic() - began)
            empty = ok(kernel.execute(on + "rank")).seconds
            ours.append(ok(kernel.execute(on + "float(large[-1])", 120)).seconds - empty)
            rays.append(ok(kernel.execute(through_ray, 120)).seconds)
    finally:
        for receiver in receivers:
            receiver.kill()
            receiver.wait()
    print(f"{MEGABYTES} MB to each of 3 nodes")
    print(f"  plain TCP:           {described(plain)}")
    print(f"  nbspawn, more than a cell without it: {described(ours)}; {ratio(ours, plain)} x plain TCP")
    print(f"  ray.put, and a task on each: {described(rays)}; {ratio(rays, plain)} x")


def kept(kernel: Kernel, hosts: Cluster) -> None:
    """Cells in ranks that stay."""
    ok(kernel.execute(f"%%spawn 4 --on ray:{hosts.address} --nnodes 2 -b gloo --keep\nrank"))
    cells = [ok(kernel.execute("%%ranks\npass")).seconds for _ in range(60)]
    print(f"A cell in 4 kept ranks on 2 nodes: {statistics.median(cells) * 1000:.1f} ms")
    idle = "import psutil, time\nkernel = psutil.Process()\nbefore = sum(kernel.cpu_times()[:2])\ntime.sleep(10)"
    ok(kernel.execute(idle))
    print(f"The kernel then uses {kernel.value('sum(kernel.cpu_times()[:2]) - before') * 100:.1f} ms of CPU a second")
    ok(kernel.execute("%ranks stop"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with Cluster(3) as hosts, tempfile.TemporaryDirectory() as folder, Kernel(Path(folder)) as kernel:
        ok(kernel.execute("%load_ext nbspawn\nimport torch"))
        start(kernel, hosts, rounds)
        kept(kernel, hosts)
        train(kernel, hosts, Path(folder))
        push(kernel, hosts, min(rounds, 5))
        ok(kernel.execute("ray.shutdown()"))


if __name__ == "__main__":
    main()
