"""``--on ray``: cells over two hosts, namespaces of this machine with a Ray cluster over them (support/cluster.py)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import answered
import cluster
import nbformat
import psutil
import pytest
from cluster import Cluster
from kernels import Kernel, ok, plain, wait_until, who_said
from users import UNTIL_TOLD, User

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "many_hosts.ipynb"
TRAINING = Path(__file__).parents[1] / "programs" / "digits.py"

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(300),  # Ray takes half a minute to start
]


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Where there can be no hosts these tests are skipped, but not by root on CI, where that would go unnoticed."""
    reason = cluster.missing()
    if reason and "CI" in os.environ and os.geteuid() == 0:
        pytest.fail(reason)
    elif reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(module_kernel: Kernel) -> Iterator[Cluster]:
    with Cluster(2) as hosts:
        yield hosts
        # In a kernel that other modules use, Ray would look for a cluster that has ended for ever, with a whole CPU.
        ok(module_kernel.execute("import ray\nray.shutdown()"))


@pytest.fixture(scope="module")
def on(hosts: Cluster) -> str:
    return f"--on ray:{hosts.address} --nnodes 2"


@pytest.fixture(scope="module")
def third(hosts: Cluster) -> int:
    """One more host, with two GPUs according to Ray, and a DNS server that never answers."""
    hosts.add(3, gpus=2, silent_dns=True)
    return 3


@pytest.fixture
def session(kernel: Kernel, on: str) -> Iterator[Kernel]:
    """Four kept ranks with a group, on two hosts."""
    ok(kernel.execute(f"%%spawn 4 {on} --keep -b gloo\nimport time, torch, torch.distributed as dist\nx = rank"))
    yield kernel
    kernel.execute("%ranks stop")


# A test that has Ray nodes started runs alone: Ray gives up after 30 seconds.
@pytest.mark.timing
def test_a_cell_over_two_hosts(kernel: Kernel, on: str) -> None:
    body = """import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * rank
dist.all_reduce(total)
print("on", socket.gethostname())
where = int(os.environ["GROUP_RANK"]), local_rank, world_size
socket.gethostname(), *where, torch.get_num_threads(), total.item()"""
    reply = ok(kernel.execute(f"%%spawn --nproc-per-node 2 {on} -o found\n{body}"))
    found = kernel.value("list(found)")
    assert {host for host, *_ in found} == {"host1", "host2"}
    places = [[0, 0, 4], [0, 1, 4], [1, 0, 4], [1, 1, 4]]
    assert [rest for _, *rest in found] == [[*place, 1, 6.0] for place in places]
    table = next(output["data"] for output in reply.outputs if "data" in output)
    lines = table["text/plain"].splitlines()
    assert "2 nodes: host" in lines[0] and lines[2] == found[0][0] and lines[5] == found[2][0]
    assert "on host1" in reply.text() and "on host2" in reply.text()


def test_the_same_losses_as_under_torchrun(kernel: Kernel, hosts: Cluster, on: str) -> None:
    """To the last digit, on as many hosts."""
    training = TRAINING.read_text()
    lines = hosts.torchrun(training)
    reply = ok(kernel.execute(f"%%spawn 4 {on} --threads 1\n{training}"))
    ours = [line for rank in range(4) for line in reply.of(rank) if line.startswith("rank ")]
    assert len(lines) == 28 and sorted(ours) == sorted(lines)


def test_the_error_names_the_host(kernel: Kernel, on: str) -> None:
    reply = kernel.execute(f"%%spawn 4 {on}\nimport time\nif rank == 3: {{}}['hieght']\ntime.sleep(60)")
    assert reply.evalue in [f"rank 3 of 4 ({host}): KeyError: 'hieght' (line 3)" for host in ("host1", "host2")]
    assert "Ranks 0-2 were at line 4 and were stopped." in reply.traceback


def test_a_session_survives_an_error_while_the_other_host_waits(session: Kernel) -> None:
    reply = session.execute("%%ranks -g 60\nif rank == 1: raise ValueError('the real one')\ndist.barrier()")
    assert reply.evalue.startswith("rank 1 of 4 (") and "the real one" in reply.evalue, reply
    assert ok(session.execute("%%ranks\ndist.barrier()\nx")).result == "[0] 0\n[1] 1\n[2] 2\n[3] 3"


def test_stop_reaches_ranks_that_wait_for_another_host(session: Kernel) -> None:
    cell = session.submit("%%ranks -g 60\nprint('begins')\ntime.sleep(600) if rank == 0 else dist.barrier()").until(
        "begins"
    )
    session.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", reply
    assert ok(session.execute("%%ranks\nx")).result == "[0] 0\n[1] 1\n[2] 2\n[3] 3"


def test_the_debugger_and_questions_over_hosts(session: Kernel) -> None:
    user = User(session, "%%ranks\ny = x * 2\nbreakpoint()\ny")
    wait_until(lambda: user.say("ranks").count("debugging") >= 4, "all have stopped")
    user.say("p y", "all c")
    reply = ok(user.cell.wait())
    assert reply.result == "[0] 0\n[1] 2\n[2] 4\n[3] 6" and "Ranks " in reply.text()
    reply = ok(session.submit("%%ranks\ninput('who? ') * 0 + str(rank)", answers=list("abcd")).wait())
    assert reply.result == "[0] '0'\n[1] '1'\n[2] '2'\n[3] '3'"


def test_what_cells_use_besides(kernel: Kernel, on: str) -> None:
    """Displays, progress bars, seeds, timings, the profile, the time limit, variables of a line that raised."""
    body = """from IPython.display import HTML, display
import random, time
from tqdm.auto import tqdm
for _ in tqdm(range(5), desc="steps"): time.sleep(0.4)
display(HTML(f"<b>shown by {rank}</b>"))
random.random()"""
    first = ok(kernel.execute(f"%%spawn 4 {on} --seed 7 --timings --profile -o r\n{body}"))
    assert {data["text/html"] for data in first.shown if "shown by" in data.get("text/html", "")} == {
        f"<b>shown by {rank}</b>" for rank in range(4)
    }
    assert "5/5" in first.text() + first.text("stderr")
    table = next(output["data"]["text/plain"] for output in first.outputs if "data" in output)
    assert re.search(r"Time: payload .* rendezvous .* run .*", table) and "time.sleep(0.4)" in table
    steps = [row for row in kernel.value("r.timeline") if "time.sleep(0.4)" in row["source"]]
    assert {row["rank"] for row in steps} == {0, 1, 2, 3}
    assert all(0 <= row["start"] < row["end"] < first.seconds + 1 for row in steps), "of the kernel's clock"
    ok(kernel.execute(f"%%spawn 4 {on} --seed 7 -o again\n{body}"))
    assert kernel.value("list(again) == list(r)") and kernel.value("len(set(r))") == 4
    reply = kernel.execute(f"%%spawn 4 {on} -t 1 -g 1\nimport time\ntime.sleep(60 + rank)")
    assert reply.ename == "RunTimeoutError" and "line 3" in reply.traceback, reply
    reply = kernel.execute(f"%%spawn 4 {on} --locals\nhalf = rank / 2\nif rank == 3: raise ValueError(half)")
    assert "half = 1.5" in reply.traceback, reply


def test_variables_go_to_kept_ranks_and_come_back(session: Kernel) -> None:
    ok(session.execute("import torch\nsent = torch.arange(200_000)"))
    ok(session.execute("%%ranks --push sent --pull doubled\ndoubled = sent * 2 + rank"))
    assert session.value("[int(one[-1]) for one in doubled]") == [399_998 + rank for rank in range(4)]


def test_post_mortem_on_another_host(kernel: Kernel, on: str) -> None:
    cell = kernel.submit(f"%%spawn 4 {on} --pdb\nif rank == 3:\n    value = 42\n    raise KeyError(value)").asked()
    kernel.answer("p value * 1000 + rank")
    cell.asked(2)
    assert "42003" in cell.reply.text()
    kernel.answer("q")
    reply = cell.wait()
    assert re.match(r"rank 3 of 4 \(host\d\): KeyError: 42", reply.evalue), reply


def test_the_controls_show_the_output_of_a_rank_on_another_host(kernel: Kernel, on: str, tmp_path: Path) -> None:
    user = User(kernel, UNTIL_TOLD.replace("%%spawn 2", f"%%spawn 4 {on}").format(go=str(tmp_path / "go")))
    try:
        user.see_controls()
        user.until(lambda: "HTMLModel" in str(user.models), "the pane is there")
        user.choose(4)
        pane = user.find("HTMLModel")
        user.until(lambda: "only 3" in user.models[pane]["value"], "the pane shows rank 3")
        shown = user.models[pane]["value"]
        assert "only 0" not in shown and re.search(r"host[12]:\S+/rank-1\.log$", shown), shown
    finally:
        (tmp_path / "go").touch()
        ok(user.cell.wait())


def test_a_cell_that_waits_for_nodes_says_so_and_can_be_stopped(session: Kernel, on: str) -> None:
    cell = session.submit(f"%%spawn 2 {on}\nrank").until("Waiting for 2 nodes with 1 CPU each of the Ray cluster.")
    session.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "nothing was started" in reply.traceback, reply
    assert ok(session.execute("%%ranks\nx")).result == "[0] 0\n[1] 1\n[2] 2\n[3] 3"


def test_nodes_are_given_back(kernel: Kernel, on: str) -> None:
    ok(kernel.execute(f"%%spawn 4 {on}\nrank"))
    left = "__import__('ray').available_resources().get('CPU', 0)"
    assert kernel.value(left) == 0
    assert ok(kernel.execute("%ranks release")).text() == "2 nodes given back.\n"
    kernel.execute(f"import time\nwhile {left} < 4: time.sleep(0.05)")
    assert kernel.value(left) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("6 {on}", "the Ray cluster cannot give 2 nodes with 3 CPUs each: it has "),
        ("4 --on ray://10.77.9.1:10001", "ray:// is Ray Client"),
        ("4 --on ray:10.77.9.1:1 --nnodes 2", "this kernel is connected to the Ray cluster at "),
        ("4 --on ray:here --nnodes 2", "this kernel is connected to the Ray cluster at "),
        ("4 {on} -m fork", "-m fork is for ranks on this machine"),
    ],
)
def test_what_the_cluster_cannot_do_is_one_sentence(kernel: Kernel, on: str, line: str, message: str) -> None:
    ok(kernel.execute(f"%%spawn 2 {on}\nrank"))
    reply = kernel.execute(f"%%spawn {line.format(on=on)}\nrank")
    assert reply.evalue.startswith(message), reply


def test_no_cluster_is_one_sentence(own_kernel: Kernel) -> None:
    reply = own_kernel.execute("%%spawn 4 --on ray:127.0.0.1:1 --nnodes 2\nrank")
    assert reply.evalue.startswith("no Ray cluster answers at 127.0.0.1:1"), reply
    reply = own_kernel.execute("%%spawn 4 --on ray:here --nnodes 2\nrank")
    assert reply.evalue.startswith("'here' is not the address of a Ray cluster"), reply


def test_a_connection_that_the_user_has_made_anew(kernel: Kernel, on: str, hosts: Cluster) -> None:
    ok(kernel.execute(f"%%spawn 2 {on}\nrank"))
    ok(kernel.execute(f"import ray\nray.shutdown()\nray.init('{hosts.address}', log_to_driver=False)"))
    reply = ok(kernel.execute(f"%%spawn 2 {on}\nrank"))
    assert reply.result == "[0] 0\n[1] 1"
    assert "Ray ends this kernel after a minute" in reply.text("stderr")
    ok(kernel.execute("%ranks release\nray.shutdown()"))


@pytest.mark.timing
def test_a_cluster_that_ends_takes_no_kernel_along(own_kernel: Kernel) -> None:
    """Ray itself ends a process that has not heard of its cluster's head for a minute."""
    with Cluster(1) as hosts:
        run = f"%%spawn 2 --on ray:{hosts.address}\nrank"
        ok(own_kernel.execute(f"{run.replace('2', '2 --keep', 1)}\nx = rank"))
        hosts.end_head()
        refused = own_kernel.execute(run)
        assert refused.evalue.startswith(f"the Ray cluster at {hosts.address} has ended"), refused
        assert ok(own_kernel.execute("%%ranks\nx")).result == "[0] 0\n[1] 1"
        ok(own_kernel.execute("mine = 1\nimport time; time.sleep(75)", timeout=100))
        ok(own_kernel.execute("%ranks stop"))
        ok(own_kernel.execute("%ranks release"))
        refused = own_kernel.execute(run)
        assert refused.evalue.startswith(f"no Ray cluster answers at {hosts.address}"), refused
    assert own_kernel.value("mine") == 1
    busy = "[time.process_time(), time.sleep(2), time.process_time()]"
    before, _, after = own_kernel.value(busy)
    assert after - before < 1, "and Ray does not look for it for ever"


def of_ranks(mark: str) -> list[psutil.Process]:
    """The ranks that were given this name, on all hosts, and their children with this argument."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and (process.name() == mark or mark in process.cmdline()):
                found.append(process)
    return found


def test_the_notebook(kernel: Kernel, hosts: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows what it shows when it is run again, but for times and paths."""
    ok(kernel.execute("%ranks release"))  # there are no other nodes
    monkeypatch.setenv("RAY_ADDRESS", hosts.address)
    again = "".join(str(reply.outputs) for reply in answered.run(NOTEBOOK))
    shown = "".join(str(cell.get("outputs", "")) for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    for whole in (plain(shown.replace("\\x1b", "\x1b")), plain(again.replace("\\x1b", "\x1b"))):
        assert who_said(whole, "sum of the ranks: 6") == {0, 1, 2, 3}
        assert re.search(r"rank 3 of 4 \(host\d\): KeyError: 3 \(line 6\)", whole)
        assert re.search(r"rank 1 of 4 \(host\d\): ValueError: too early \(line 3\)", whole)
        assert "The process group was broken, and is created again." in whole
        assert "Ranks 0-1 and 3 were at line 4, in barrier. Rank 2 was at line 3." in whole
        assert whole.count("debugging, line 7: dist.all_reduce(ones)") == 4
        assert "2 nodes given back." in whole


@pytest.mark.timing
def test_the_cluster_assigns_gpus(kernel: Kernel, hosts: Cluster, third: int) -> None:
    cell = f"%%spawn 2 --on ray:{hosts.address}\nimport os, socket\n"
    seen = "socket.gethostname(), os.environ['CUDA_VISIBLE_DEVICES']"
    assert ok(kernel.execute(cell + seen)).result == f"[0-1] ('host{third}', '0,1')"
    cell = cell.replace("\n", " -b auto\nimport torch.distributed as dist\n", 1)
    assert ok(kernel.execute(cell + f"{seen}, dist.get_backend()")).result == f"[0-1] ('host{third}', '0,1', 'gloo')"
    reply = kernel.execute(f"%%spawn 4 --on ray:{hosts.address} --nnodes 2\nrank")
    assert reply.evalue.startswith("the Ray cluster cannot give 2 nodes with 2 CPUs and 2 GPUs each: it has"), reply
    assert f"host{third} with 2 CPUs and 2 GPUs" in reply.evalue


@pytest.mark.timing
def test_a_dns_server_that_never_answers_costs_nothing(kernel: Kernel, hosts: Cluster, third: int) -> None:
    """Each process's first TCPStore would wait for it for ten seconds."""
    cell = f"%%spawn 3 --on ray:{hosts.address} --nnodes 3 -b gloo\nimport torch, torch.distributed as dist\n"
    cell += "ones = torch.ones(1)\ndist.all_reduce(ones)\nones.item()"
    ok(kernel.execute(cell))
    reply = ok(kernel.execute(cell))
    assert reply.result == "[0-2] 3.0"
    assert reply.seconds < 5
    assert "hostname of the client socket cannot be retrieved" in reply.text() + reply.text("stderr"), "it was silent"


def test_the_report_for_a_cluster(kernel: Kernel, hosts: Cluster, third: int) -> None:
    ok(kernel.execute("%ranks release\nfrom nbspawn.__main__ import cluster"))
    found = dict(kernel.value(f"cluster('ray:{hosts.address}')"))
    assert found["host1"] == "2 CPUs" and found[f"host{third}"] == "2 CPUs and 2 GPUs"
    assert found["a rank on each of 3 nodes"].startswith("works (")
    assert found["the same again"].startswith("works (")


def test_what_is_lost_is_named_and_nothing_is_left_on_any_host(kernel: Kernel, hosts: Cluster, third: int) -> None:
    """Ray's own process on one host, a whole host, the link to one. The last test: no host is left."""
    for host, lose in ((third, hosts.kill_raylet), (2, hosts.kill), (1, hosts.cut)):
        ok(kernel.execute("%ranks release"))
        mark = f"9{os.getpid():07}.{host}"  # seconds, and in the names of processes this run's own
        cell = f"""%%spawn {host} --on ray:{hosts.address} --nnodes {host} -b gloo --keep
import socket, subprocess, time
open('/proc/self/comm', 'w').write('{mark}')
child = subprocess.Popen(['sleep', '{mark}'], start_new_session=True)
socket.gethostname()"""
        assert f"host{host}" in ok(kernel.execute(cell, timeout=120)).result
        wait_until(lambda mark=mark, host=host: len(of_ranks(mark)) == 2 * host, "each rank has its child")
        running = kernel.submit("%%ranks\nprint('begun')\ntime.sleep(600)")
        running.until_ranks("begun", range(host))
        lose(host)
        assert f"its node host{host} was lost" in running.wait().evalue
        wait_until(lambda mark=mark: not of_ranks(mark), f"all ranks end when host{host} is lost", 30)
        known = "[node['NodeManagerHostname'] for node in ray.nodes() if node['Alive']]"
        ok(kernel.execute("import ray"))
        wait_until(lambda host=host, known=known: f"host{host}" not in kernel.value(known), "Ray knows it too")
    assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"
