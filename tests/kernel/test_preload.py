"""What the fork server imports for its ranks: learned from them, tried first, remembered for the next kernel."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels import ExecutedKernel, Kernel, ok, wait_until
from leftovers import State, assert_nothing_beyond, gone, until

import nbspawn
from nbspawn._engine.start import forkserver, learned
from nbspawn._process import imports
from nbspawn._protocol.preload import ImportReport

# ---------------------------------------------------------------- the trial

MODULES = {
    "harmless": "import json, os\nos.environ['SET_BY_IMPORT'] = '1'",
    "starts_thread": "from threading import *\nThread(target=Event().wait, name='mine', daemon=True).start()",
    "opens_file": "import os\nkept = open(os.devnull)",
    "opens_socket": "import socket\nkept = socket.socket()",
    "starts_process": "import subprocess\nkept = subprocess.Popen(['sleep', '60'])",
    "changes_environment": "import os\nos.environ['HOME'] = '/elsewhere'",
    "sets_rank": "import os\nos.environ['MASTER_PORT'] = '29500'",
    "handles_signal": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "changes_directory": "import os\nos.chdir('/')",
    "settles_start_method": "import multiprocessing\nmultiprocessing.set_start_method('spawn')",
    "imports_users_code": "import users_own",
    "exits": "raise SystemExit('no')",
    "fails": "import this_is_not_there",
    "crashes": "import os\nos.abort()",
    "after_all": "harmless = True",
}

TRIAL = """
import json, os, sys, sysconfig
folder, users, modules = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
sys.path += [folder, users]
usual = sysconfig.get_path
sysconfig.get_path = lambda name: folder if name == "platlib" else usual(name)
import numpy  # whose OpenBLAS has threads, which it ends before a fork
numpy.ones((300, 300)) @ numpy.ones((300, 300))
from nbspawn._server import trial
found = {}
while modules:
    first = trial.first_refused(modules)
    if first is None:
        break
    found[first[0]] = first[1]
    modules = modules[modules.index(first[0]) + 1 :]
print(json.dumps([found, sorted(set(sys.modules) & set(sys.argv[3].split(",")))]))
"""


def test_what_a_rank_must_not_inherit_is_found_in_a_throw_away_child(tmp_path: Path) -> None:
    """Each on its own, with the reason; what comes after it is tried all the same, and nothing is imported here."""
    installed, users = tmp_path / "site", tmp_path / "users"
    for folder in (installed, users):
        folder.mkdir()
    for name, source in MODULES.items():
        (installed / f"{name}.py").write_text(source)
    (users / "users_own.py").write_text("")
    command = [sys.executable, "-c", TRIAL, installed, users, ",".join(MODULES)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found, imported = json.loads(ran.stdout)
    assert imported == []
    assert found == {
        "starts_thread": "it starts a thread (mine)",
        "opens_file": "it leaves a file or socket open (/dev/null)",
        "opens_socket": found["opens_socket"],
        "starts_process": "it starts a process",
        "changes_environment": "it changes the environment variable HOME",
        "sets_rank": "it sets the environment variable MASTER_PORT",
        "handles_signal": "it changes a signal handler",
        "changes_directory": "it changes the working directory",
        "settles_start_method": "it sets multiprocessing's start method",
        "imports_users_code": f"it imports users_own, which is not an installed module, but in {users}",
        "exits": "its import fails here: SystemExit: no",
        "fails": "its import fails here: ModuleNotFoundError: No module named 'this_is_not_there'",
        "crashes": "its import ends the process",
    }
    assert found["opens_socket"].startswith("it leaves a file or socket open (socket:")


# ---------------------------------------------------------------- what is remembered


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in a cache directory of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return learned.path()


def recalled() -> learned.Learned:
    found = learned.Learned()
    found.load()
    return found


def test_what_one_kernel_has_tried_the_next_one_knows(cache: Path) -> None:
    assert recalled().tried == {}
    first = learned.Learned()
    first.tried = {"torch._dynamo": 1.5, "rich.progress": 0.1}
    first.refused = {"starts.thread": "it starts a thread (x)"}
    first.use(["rich", "pandas"])
    first.save()
    found = recalled()
    assert found.tried == first.tried and found.refused == first.refused
    assert found.uses == {"rich": 1}
    assert cache.stat().st_mode & 0o777 == 0o600
    assert os.listdir(cache.parent) == [cache.name]


def test_what_was_tried_with_other_packages_is_not_believed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = learned.Learned()
    first.tried = {"rich.progress": 0.1}
    first.save()
    monkeypatch.setattr(learned, "environment", lambda: "after an upgrade")
    assert recalled().tried == {}


def _valid() -> dict[str, object]:
    return {"environment": learned.environment(), "modules": {"rich.progress": 0.1}, "refused": {}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95 no JSON",
        b"[" * 100_000,
        b"[1, 2]",
        json.dumps({**_valid(), "modules": ["rich"]}).encode(),
        json.dumps(
            {**_valid(), "modules": {"os; import x": 0.1, "../rich": 0.1, "rich": "0.1", "rich.": 0.1}}
        ).encode(),
        json.dumps({**_valid(), "modules": {f"rich.part{n}": 0.1 for n in range(100_000)}}).encode(),
    ],
    ids=["empty", "binary", "deep", "list", "names only", "names", "large"],
)
def test_a_damaged_file_is_as_none(cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert recalled().tried == {}
    assert recalled().stages(()) == [learned.TRAINING[:1], learned.TRAINING[1:]]
    recalled().save()  # and is written anew
    assert json.loads(cache.read_text())["environment"] == learned.environment()


def test_a_file_that_others_could_have_written_is_as_none(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps(_valid()))
    assert list(recalled().tried) == ["rich.progress"]
    cache.chmod(0o666)
    assert recalled().tried == {}
    cache.chmod(0o600)
    elsewhere = cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(elsewhere)
    assert recalled().tried == {}
    cache.unlink()
    os.mkfifo(cache)
    assert recalled().tried == {}  # and nobody waits for a writer


def test_a_cache_directory_that_cannot_be_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    recalled().save()


def test_what_runs_in_threads_is_never_wanted() -> None:
    found = learned.Learned()
    found.learn(["jax", "jax.numpy", "rich.progress"])
    assert list(found.modules) == ["rich.progress"]
    assert "jax" in found.refused


def test_the_order_of_imports() -> None:
    """Torch's own, then packages by use a second, at least a second in each stage; last what is still to be tried."""
    found = learned.Learned()
    found.tried = {"slow": 4.0, "quick": 0.1, "slow.part": 1.0, "never": 0.1, "often": 0.8}
    found.learn(["fresh", "often.new"])
    found.refused = {"torch.distributed.pipelining": "it fails"}
    for package, uses in {"slow": 2, "quick": 1, "often": 30}.items():
        found.uses[package] = uses
    training = tuple(name for name in learned.TRAINING[1:] if name not in found.refused)
    stages = found.stages(())
    assert stages == [
        ("torch._dynamo",),
        training,
        ("often", "quick", "slow", "slow.part"),
        ("never",),
        ("fresh", "often.new"),
    ]
    assert found.stages({"torch._dynamo", "often", *training})[0] == ("quick", "slow", "slow.part")
    assert [learned.is_for(stage, {"slow.other", "torch.nn"}) for stage in stages] == [False, False, True, False, False]
    assert [learned.is_for(stage, {"torch._dynamo"}) for stage in stages] == [True, False, False, False, False]


def test_what_has_ended_the_importer_is_tried_again(cache: Path) -> None:
    found = learned.Learned()
    found.tried = {"good": 0.1, "bad": 0.1}
    found.doubt(["bad", "torch._dynamo"])
    assert {"bad", "torch._dynamo"}.isdisjoint(found.trusted) and "good" in found.trusted
    assert found.stages(())[-1] == ("bad",)
    found.save()
    assert json.loads(cache.read_text())["modules"].keys() == {"good"}
    found.note(ImportReport(imported={"bad": 0.1, "torch._dynamo": 0.1}))
    assert {"bad", "torch._dynamo"} <= set(found.trusted)


# ---------------------------------------------------------------- the server


IMPORTS = """
import signal, socket, sys
from nbspawn._rank.program import process
kernel = socket.socket(fileno=int(sys.argv[1]))
with process.killed_at_its_end(int(sys.argv[2])):
    if sys.argv[3] == "forever":
        kernel.send(b"imports")
        signal.pause()
kernel.send(b"is done")
kernel.recv(1)
print("has ended by itself")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system has no such signal")
@pytest.mark.parametrize(("import_", "code", "said"), [("forever", -signal.SIGKILL, b""), ("short", 0, b"has ended")])
def test_an_import_that_hangs_ends_with_the_kernel(import_: str, code: int, said: bytes) -> None:
    ours, theirs = socket.socketpair()
    life, lifeline = os.pipe()
    with ours, theirs:
        importer = subprocess.Popen(
            [sys.executable, "-c", IMPORTS, str(theirs.fileno()), str(life), import_],
            pass_fds=[theirs.fileno(), life],
            stdout=subprocess.PIPE,
        )
        theirs.close()
        os.close(life)
        assert ours.recv(10)
        os.close(lifeline)
        if import_ == "short":
            ours.send(b"1")
    assert importer.communicate(timeout=60)[0].startswith(said) and importer.returncode == code


def modules_of_rank(rank: int) -> list[str]:
    return sorted({"torch._dynamo", "rich.progress"} & set(sys.modules))


def import_rich(rank: int) -> None:
    import rich.progress  # noqa: F401


def of_environment(rank: int) -> object:
    import torch._logging._internal as logs

    return logs.log_state.log_qname_to_level.get("torch._dynamo")


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch, workplace: str) -> Iterator[forkserver.PrivateServer]:
    """The process's own, which preloads; it is ended with all that belongs to it. Afterwards it has torch alone, as
    before."""
    monkeypatch.setenv("NBSPAWN_PRELOAD_MB", "1024")
    monkeypatch.setattr(forkserver.server, "learned", learned.Learned())
    forkserver.server.stop()
    before = State.now()
    yield forkserver.server
    monkeypatch.undo()
    forkserver.server.stop()
    assert_nothing_beyond(before)
    forkserver.server.get()


def brought_up(server: forkserver.PrivateServer) -> None:
    server.warm_up()
    assert until(lambda: not server.bringing_up, 120)


def import_figures(rank: int) -> None:
    import matplotlib.pyplot  # noqa: F401


def has_figures(rank: int, closed: Path) -> bool:
    """Has matplotlib been there before? It closes a figure of ours at the end."""
    before = "matplotlib.pyplot" in sys.modules
    from matplotlib._pylab_helpers import Gcf

    canvas = types.SimpleNamespace(mpl_disconnect=print)
    Gcf.figs[1] = types.SimpleNamespace(canvas=canvas, _cidgcf=0, destroy=closed.touch)
    return before


@pytest.mark.extended
def test_what_a_library_registers_for_the_end_is_every_ranks(server: forkserver.PrivateServer, tmp_path: Path) -> None:
    """Though the server has imported it."""
    assert nbspawn.spawn(has_figures, (tmp_path / "first",)) == [False]
    nbspawn.spawn(import_figures)
    brought_up(server)
    assert nbspawn.spawn(has_figures, (tmp_path / "second",)) == [True]
    assert (tmp_path / "first").exists() and (tmp_path / "second").exists()


@pytest.mark.extended
def test_a_rank_has_what_an_earlier_one_imported(server: forkserver.PrivateServer, cache: Path) -> None:
    assert list(nbspawn.spawn(modules_of_rank, nprocs=2)) == [[], []]
    nbspawn.spawn(import_rich, nprocs=2)
    assert "rich.progress" in server.learned.modules
    brought_up(server)
    assert not server.out_of_date(os.environ)
    assert list(nbspawn.spawn(modules_of_rank, nprocs=2)) == [["rich.progress", "torch._dynamo"]] * 2
    assert server.report.refused == {}
    assert {"rich.progress", "torch._dynamo"} <= json.loads(cache.read_text())["modules"].keys()


@pytest.mark.extended
def test_a_small_package_is_not_waited_for_with_the_large_ones_of_its_stage(server: forkserver.PrivateServer) -> None:
    server.learned.tried = {"pandas": 0.01, "rich.progress": 30.0}
    server.get()
    server.warm_up()
    assert server.wait_for(["pandas"], nprocs=8 * (os.cpu_count() or 1)) == ""


@pytest.mark.extended
def test_what_ranks_will_import_comes_first(server: forkserver.PrivateServer, cache: Path) -> None:
    """They wait for it, unless that takes longer than importing it themselves."""
    server.learned.tried = {"pandas": 30.0, "rich.progress": 0.2}
    server.learned.uses = {"pandas": 100_000}
    server.get()
    server.warm_up()
    assert server.wait_for(["torch._dynamo", "json"], nprocs=2) == "torch._dynamo"
    assert "torch._dynamo" in server.report.modules and "rich.progress" not in server.report.modules
    assert server.wait_for(["rich.other"], nprocs=64) == "rich"
    assert "rich.progress" in server.report.modules
    server.warm_up(["pygments.lexers"])
    assert server.wait_for(["pygments"], nprocs=64) == "", "a trial takes longer than the import"
    assert server.wait_for(["rich", "torch._dynamo", "numpy"], nprocs=2) == ""
    brought_up(server)
    assert server.learned.uses["rich"] == 1


@pytest.mark.extended
def test_memory_is_bounded(server: forkserver.PrivateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSPAWN_PRELOAD_MB", "1")
    brought_up(server)
    assert set(learned.TRAINING) - set(server.report.skipped) <= server.report.modules | set(learned.TRAINING)
    assert "torch._dynamo" in server.report.skipped
    assert list(nbspawn.spawn(modules_of_rank, nprocs=1)) == [[]]


@pytest.mark.extended
def test_imports_that_saw_another_environment_are_made_again(
    server: forkserver.PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads TORCH_LOGS when it is imported, as a new process would do."""
    assert list(nbspawn.spawn(of_environment, nprocs=1)) == [None]
    first = server.get()
    assert list(nbspawn.spawn(of_environment, nprocs=1, env={"TORCH_LOGS": "+dynamo"})) == [10]
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    second = server.get()
    assert second is not first
    assert list(nbspawn.spawn(of_environment, nprocs=1)) == [10]
    assert server.get() is second, "the notebook has now what that run had"
    monkeypatch.setenv("NOBODY_LOOKS_AT_THIS", "1")
    nbspawn.spawn(of_environment, nprocs=1, env={"NEITHER_AT_THIS": "1"})
    assert server.get() is second
    monkeypatch.delenv("TORCH_LOGS")
    assert list(nbspawn.spawn(of_environment, nprocs=1)) == [None]


@pytest.mark.extended
def test_a_server_that_is_still_importing_is_ended(server: forkserver.PrivateServer) -> None:
    server.get()
    server.warm_up()
    assert until(lambda: server._stage[0])
    importing = server._importer.pid
    server.stop()
    assert gone([importing])


@pytest.mark.extended
@pytest.mark.parametrize("when", ["idle", "importing"])
def test_an_importer_that_is_killed_is_replaced(server: forkserver.PrivateServer, when: str) -> None:
    """The fork server outlives it, and serves on."""
    first = server.get()
    server.warm_up()
    assert until(lambda: server._stage[0] if when == "importing" else not server.bringing_up, 120)
    os.kill(server._importer.pid, signal.SIGKILL)
    assert until(lambda: not server.bringing_up, 120)
    assert ("torch._dynamo" in server.learned.trusted) == (when == "idle"), "what it imported then is tried next time"
    assert (server.get() is first) == (when == "importing")
    assert list(nbspawn.spawn(modules_of_rank, nprocs=2)) == [[] if when == "importing" else ["torch._dynamo"]] * 2
    nbspawn.spawn(import_rich, nprocs=1)
    brought_up(server)
    assert list(nbspawn.spawn(modules_of_rank, nprocs=2)) == [["rich.progress", "torch._dynamo"]] * 2
    assert "torch._dynamo" in server.learned.trusted


def jit(rank: int) -> tuple[str | None, bool]:
    import torch

    return os.environ.get("PYTORCH_JIT"), torch.jit._state._enabled.enabled


@pytest.mark.extended
@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_runs_at_once_that_need_servers_of_their_own(server: forkserver.PrivateServer, method: str) -> None:
    """torch reads PYTORCH_JIT when it is imported. No run takes the other's server, or ends it while it starts."""
    wanted = {"0": False, "1": True}

    def run(value: str) -> list[tuple[str | None, bool]]:
        return list(nbspawn.spawn(jit, nprocs=2, env={"PYTORCH_JIT": value}, start_method=method))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, "0101"))
    assert found == [[(value, wanted[value])] * 2 for value in "0101"]


@pytest.mark.extended
def test_an_environment_with_which_torch_cannot_be_imported(server: forkserver.PrivateServer) -> None:
    with pytest.raises(nbspawn.StartError, match=r"ended during its imports \(ValueError: .*PYTORCH_JIT"):
        nbspawn.spawn(jit, env={"PYTORCH_JIT": "perhaps"}, start_method="forkserver")
    assert list(nbspawn.spawn(jit)) == [(None, True)]


@pytest.mark.extended
def test_a_stage_that_may_never_be_there_is_not_waited_for(
    server: forkserver.PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is much later than it should be, or somebody has stopped the importer."""
    server.get()
    server.warm_up()
    assert until(lambda: "torch._dynamo" in server._stage[0])
    with monkeypatch.context() as patch:
        patch.setattr(server.learned, "estimate", lambda stage: 0.001)
        server.wait_for(["torch._dynamo"], nprocs=2)
    os.kill(server._importer.pid, signal.SIGSTOP)
    server.wait_for(["torch._dynamo"], nprocs=2)
    assert "torch._dynamo" not in server.report.modules
    assert list(nbspawn.spawn(modules_of_rank)) == [[]]
    brought_up(server)
    assert list(nbspawn.spawn(modules_of_rank)) == [["torch._dynamo"]]


# ---------------------------------------------------------------- what a rank says, and forgets


def test_only_installed_modules_are_told() -> None:
    news = imports.NewImports()
    assert news.take() == ()
    found = imports.installed(["torch", "json", "kernels", "no.such.module"])
    assert found == ["torch"]


SHADOWED = """
import sys
sys.path.remove("")
from nbspawn._process import imports
import rich.progress, tqdm
preloaded = imports.Preloaded(name for name in sys.modules if name.startswith(("rich", "tqdm")))
sys.path.insert(0, "")
preloaded.forget_shadowed()
import rich
print(rich.__file__, "rich.progress" in sys.modules, "tqdm" in sys.modules)
"""


def test_a_module_of_the_users_own_goes_before_an_installed_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("")
    (tmp_path / "tqdm").mkdir()  # no package: a folder of that name is found last
    ran = subprocess.run([sys.executable, "-c", SHADOWED], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert ran.stdout.split() == [str(tmp_path / "rich.py"), "False", "True"], ran.stderr


COLLAPSED = """
from nbspawn._server import huge_pages

def in_huge_pages():
    with open("/proc/self/smaps_rollup") as told:
        return sum(int(line.split()[1]) for line in told if line.startswith("AnonHugePages"))  # kB

memory = [bytes([n]) * 4000 for n in range(256)] * 64
memory = [bytes(bytearray(part)) for part in memory]  # 64 MB, in pieces
before = in_huge_pages()
huge_pages.collapse()
assert all(part == bytes([n % 256]) * 4000 for n, part in enumerate(memory))
print(in_huge_pages() - before)
"""


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="the system has no huge pages")
@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 1), reason="MADV_COLLAPSE is in Linux 6.1"
)
def test_memory_in_many_pieces_is_gathered_into_huge_pages() -> None:
    ran = subprocess.run([sys.executable, "-c", COLLAPSED], capture_output=True, text=True, timeout=150)
    assert int(ran.stdout) > 32_000, ran.stderr


# ---------------------------------------------------------------- in a notebook

STEP = textwrap.dedent(
    """
    %%spawn 2
    import sys
    before = set(sys.modules)
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    import rich.progress
    sorted(name for name in set(sys.modules) - before if name.startswith(("torch.", "rich.")))
    """
).strip()

BROUGHT_UP = """\
import time
from nbspawn._engine.start.forkserver import server as _s
while _s.bringing_up:
    time.sleep(0.05)"""


@pytest.mark.extended
def test_the_second_run_and_the_next_kernel_import_nothing(tmp_path: Path) -> None:
    """Of what the first training step needs. Kernel after kernel: the second one's first run has it."""
    preloading = {"NBSPAWN_PRELOAD_MB": "1024", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for number in range(2):
        folder = tmp_path / f"kernel-{number}"
        folder.mkdir()
        with ExecutedKernel(folder, **preloading) as kernel:
            ok(kernel.execute("%load_ext nbspawn"))
            if number == 0:
                ok(kernel.execute(STEP.replace("%%spawn 2", "%%spawn 2 -o found"), timeout=120))
                assert all("rich.progress" in names for names in kernel.value("list(found)"))
            for _ in range(2):  # what the run has taught comes second
                ok(kernel.execute(BROUGHT_UP, timeout=120))
            assert kernel.value("_s.report.skipped or sorted(_s.report.refused)") == []
            reply = ok(kernel.execute(STEP.replace("%%spawn 2", "%%spawn 2 -o found"), timeout=120))
            assert "fork server ·" in reply.table["text/plain"], "no wait for it is reported"
            assert kernel.value("list(found)") == [[], []]


@pytest.mark.extended
def test_a_kernel_that_is_killed_leaves_no_server_that_imports(tmp_path: Path) -> None:
    with ExecutedKernel(tmp_path, NBSPAWN_PRELOAD_MB="1024", XDG_CACHE_HOME=str(tmp_path)) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute("from nbspawn._engine.start.forkserver import server"))
        found = "server.warm and server._stage[0] and [server._importer.pid, server._current.pid]"
        pids = wait_until(lambda: kernel.value(found), "the second stage begins")
        kernel.kill()
        assert gone(pids)


@pytest.mark.extended
def test_the_first_training_cell_waits_for_what_it_needs(tmp_path: Path) -> None:
    """Instead of importing it in every rank, side by side. One that does not train waits for nothing."""
    with ExecutedKernel(tmp_path, NBSPAWN_PRELOAD_MB="1024", XDG_CACHE_HOME=str(tmp_path)) as kernel:
        ok(kernel.execute("%load_ext nbspawn\nimport torch\nfrom torch import optim"))
        ok(kernel.execute("from nbspawn._engine.start.forkserver import server; server.get();"))
        ok(kernel.execute("def step():\n    return optim.SGD([torch.ones(1)], 0.1)"))
        ok(kernel.execute("%%spawn 2 -o found\nimport sys\n'torch._dynamo' in sys.modules"))
        assert kernel.value("list(found)") == [False, False]
        reply = ok(kernel.execute("%%spawn 2 -o found\nimport sys\n'torch._dynamo' in sys.modules, step()"))
        assert kernel.value("[there for there, _ in found]") == [True, True]
        assert re.search(r"waited \d\.\d s while it imported torch\._dynamo for all ranks", reply.table["text/plain"])


def test_no_file_of_the_notebooks_folder_is_imported_by_a_helper(own_kernel: Kernel) -> None:
    """As ``python -c`` would: it has the folder first in its path."""
    names = ("queue", "calendar", "numbers", "cloudpickle", "random", "signal", "socket", "selectors")
    for name in names:
        (own_kernel.folder / f"{name}.py").write_text(
            f"open({str(own_kernel.folder)!r} + '/ran', 'a').write('{name} ')"
        )
    ok(
        own_kernel.execute(
            "%reload_ext nbspawn\nfrom nbspawn._engine.start import forkserver\nforkserver.server.get();"
        )
    )
    assert not (own_kernel.folder / "ran").exists(), (own_kernel.folder / "ran").read_text()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """``docker run --user 1234``: nothing is remembered."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    found = learned.Learned()
    found.load()
    found.save()
    assert learned.path() is None and not found.tried
