"""A rank is a new process in the notebook's place: its directory, path and environment, its settings, fresh seeds.

Every example runs under each start method, in the first second of a kernel, when the fork server is not ready, and
later; it must behave alike.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels import ExecutedKernel, Kernel, Reply, ok, plain, wait_gone
from methods import EVERY_METHOD

import nbspawn
from nbspawn._carried import loggers, settings
from nbspawn._engine.start import fork_safety, reachable

NOTEBOOK = """
import logging, os, random, sys, threading, warnings
import numpy as np
import torch
os.makedirs("project", exist_ok=True)
with open("project/netmod.py", "w") as _file:
    _file.write("import torch\\nclass Net(torch.nn.Linear):\\n    pass\\n")
os.makedirs("library", exist_ok=True)
with open("library/helper_of_mine.py", "w") as _file:
    _file.write("answer = 42\\n")
sys.path.append(os.path.abspath("library"))
%cd project
from netmod import Net
os.environ["SET_IN_A_CELL"] = "yes"
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("medium")
torch.set_printoptions(precision=2)
np.set_printoptions(precision=3)
warnings.filterwarnings("ignore", message="hush")
logging.basicConfig(level=logging.INFO, format="%(levelname)s of %(name)s: %(message)s", stream=sys.stdout, force=True)
logging.getLogger("chatty").setLevel(logging.DEBUG)
weights, nothing = torch.arange(3.0, device="cpu"), torch.empty(0, device="cpu")
class Shout(logging.Formatter):
    def format(self, record):
        return record.getMessage().upper()
_own = logging.StreamHandler()
_own.setFormatter(Shout())
logging.getLogger("loud").addHandler(_own)
logging.getLogger("loud").propagate = False
import functools, matplotlib.pyplot as plt, netmod
%matplotlib inline
%config InlineBackend.figure_formats = ["svg"]
plt.rcParams["figure.figsize"] = (2, 1)
np.seterr(divide="raise")
sys.setrecursionlimit(4321)
calls, mean, scale = [], np.mean, 2
def scaled_mean(x):
    calls.append(1)
    return scale * mean(x)
np.mean = scaled_mean
torch.load = functools.partial(torch.load, mmap=True)
if True: netmod.Net.size = property(lambda self: self.weight.numel())
setattr(netmod, "lock", threading.Lock())
"""

CELL = """
import logging, os, random, sys, warnings
import numpy as np
import torch
import helper_of_mine
print("directory", os.path.basename(os.getcwd()), helper_of_mine.answer, os.environ["SET_IN_A_CELL"])
print("interactive", hasattr(sys, "ps1"))
net = Net(2, 2)
print("net", net.weight.dtype, net.weight.device, torch.is_grad_enabled())
print("sent", weights.sum().item(), nothing.shape[0])
print("modes", torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision())
print("shown", torch.tensor(1 / 3, device="cpu"), np.array([1 / 3]))
logging.info("to all")
logging.getLogger("chatty").debug("details")
logging.getLogger("quiet").debug("not this")
logging.getLogger("loud").warning("hear")
warnings.warn("hush, this is not seen")
warnings.warn("this is")
import matplotlib.pyplot as plt
print("figures", plt.rcParams["figure.figsize"], np.geterr()["divide"], sys.getrecursionlimit())
plt.plot([1])
plt.show()
scale = 3
print("replaced", np.mean([1, 3]), len(calls), torch.load.keywords, net.size)
random.random(), np.random.rand(), torch.rand(1, device="cpu").item()
"""


@pytest.fixture(params=["first second", "later"], scope="module")
def prepared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kernel, Reply]]:
    """A kernel with the notebook's settings, and what its first cell on ranks said."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        ok(kernel.execute(NOTEBOOK))
        if request.param == "later":
            ok(kernel.execute("%load_ext nbspawn"))
            ok(kernel.execute("from nbspawn._engine.start.forkserver import server; _ = server.get()"))
            first = kernel.execute(f"%%spawn 2 -o drawn{CELL}")
        else:  # one cell, so that nothing comes between
            magic = f"get_ipython().run_cell_magic('spawn', '2 -o drawn', {CELL!r})"
            first = kernel.execute(f"%load_ext nbspawn\n{magic}")
            assert "fork server: waited" in ok(first).table["text/plain"]
        yield kernel, ok(first)


def check(reply: Reply, rank: int) -> None:
    said = reply.of(rank)
    assert "directory project 42 yes" in said
    assert "interactive False" in said
    assert "net torch.float64 meta False" in said
    assert "sent 3.0 0" in said
    assert "modes 1 medium" in said
    assert "shown tensor(0.33) [0.333]" in said
    assert "INFO of root: to all" in said
    assert "DEBUG of chatty: details" in said
    assert "HEAR" in said
    assert "figures [2.0, 1.0] raise 4321" in said
    assert "replaced 6.0 1 {'mmap': True} 4" in said
    # Of kept ranks the table comes when a cell is not over at once, perhaps below the first picture.
    bundles = [set(output["data"]) for output in reply.outputs if "data" in output]
    assert [kinds for kinds in bundles if kinds & {"image/png", "image/svg+xml"}] == [
        {"image/svg+xml", "text/plain"}
    ] * 2
    assert any("UserWarning: this is" in line for line in said), said
    assert not [line for line in said if "not this" in line or "UserWarning: hush" in line], said
    assert "LOUD" not in " ".join(said)


def test_auto_in_the_first_second_and_later(prepared: tuple[Kernel, Reply]) -> None:
    kernel, first = prepared
    drawn = []
    for number in range(2):
        reply = first if number == 0 else ok(kernel.execute(f"%%spawn 2 -o drawn{CELL}"))
        assert reply.table["text/plain"].splitlines()[0].startswith("2 ranks · fork server")
        assert "netmod.lock cannot be sent as the notebook has set it" in reply.table["text/plain"]
        for rank in range(2):
            check(reply, rank)
        drawn += kernel.value("list(drawn)")
    assert_all_different(drawn)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.extended)])
def test_other_start_methods(prepared: tuple[Kernel, Reply], method: str) -> None:
    kernel, _ = prepared
    drawn = []
    for _ in range(2 if method == "fork" else 1):
        reply = ok(kernel.execute(f"%%spawn 2 -m {method} -o drawn{CELL}"))
        for rank in range(2):
            check(reply, rank)
        drawn += kernel.value("list(drawn)")
    assert_all_different(drawn)


def test_kept_ranks(prepared: tuple[Kernel, Reply], method: str) -> None:
    """They have the settings of when they were started."""
    kernel, _ = prepared
    ok(kernel.execute(f"%%spawn 2 --keep -m {method}\npass"))
    try:
        ok(kernel.execute("torch.set_default_dtype(torch.float32)"))
        reply = ok(kernel.execute(f"%%ranks --push weights,nothing,calls\nfrom netmod import Net{CELL}"))
        for rank in range(2):
            check(reply, rank)
    finally:
        ok(kernel.execute("torch.set_default_dtype(torch.float64)\n%ranks stop"))


def assert_all_different(drawn: list[tuple[float, ...]]) -> None:
    """In every rank and every run, by each of the three generators."""
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn), drawn


TUTORIAL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def train():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.randn(3, 4)).sum().backward()
    dist.destroy_process_group()
for _ in range(8):
    train()
print("has trained")
"""


def test_a_function_that_trains_and_destroys_its_group_returns(kernel: Kernel, method: str) -> None:
    """As torch's tutorials have it. In bare processes the loop hangs in its first rounds: the model is the last to hold
    the group, whose destructor waits for a thread that waits for Python's lock."""
    try:
        ok(kernel.execute(f"%%spawn 4 --keep -m {method} -t 50\n{TUTORIAL}", 120))
        reply = ok(kernel.execute(f"%%ranks -t 50\n{TUTORIAL}", 120))
    finally:
        kernel.execute("%ranks stop")
    assert [reply.of(rank)[-1] for rank in range(4)] == ["has trained"] * 4  # before it torch 2.8's gloo may speak


# ---------------------------------------------------------------- seeds

DRAW = "import random, numpy, torch\nrandom.random(), numpy.random.rand(), torch.rand(1).item()"


def test_a_seed_repeats_a_run_and_its_ranks_differ(kernel: Kernel) -> None:
    drawn = []
    for method in ("forkserver", "forkserver", "fork"):
        ok(kernel.execute(f"%%spawn 2 --seed 7 -m {method} -o drawn\n{DRAW}"))
        drawn.append(kernel.value("list(drawn)"))
    assert drawn[0] == drawn[1] == drawn[2]
    assert_all_different(drawn[0])
    torch.manual_seed(8)  # rank 1's, as documented: seed + rank
    assert drawn[0][1][2] == torch.rand(1).item()


@pytest.mark.parametrize("seed", ["-1", "x", str(2**32)])
def test_a_seed_that_is_none(kernel: Kernel, seed: str) -> None:
    reply = kernel.execute(f"%%spawn 2 --seed {seed}\npass")
    assert reply.ename == "UsageError"
    assert "seed must be between 0 and 4294967295" in reply.evalue or "argument --seed: " in reply.evalue


def draw(rank: int) -> float:
    return torch.rand(1).item()


def test_seeds_of_functions(nothing_left: None) -> None:
    first, second = (list(nbspawn.spawn(draw, nprocs=2, seed=3)) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    with nbspawn.Session(2, seed=3) as session:
        assert list(session.run(draw)) == first
        assert list(session.run(draw)) != first, "a kept rank goes on"
    for bad in (-1, 2**32, "3"):
        with pytest.raises(nbspawn.UsageError, match="seed must be between 0 and 4294967295"):
            nbspawn.spawn(draw, nprocs=1, seed=bad)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the list of settings


def test_the_guide_names_every_setting() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "what_a_rank_finds.md"
    text = " ".join(page.read_text().split())
    for name in (*settings._torch(), "numpy", "pandas", "rcParams", "warning filters", "logging"):
        assert name in text, name


def test_reading_the_default_device_makes_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.get_default_device() would, and so initialise CUDA in the kernel."""
    torch.set_default_device("cuda:1")
    try:
        assert settings.read().torch["default device"] == "cuda", "each rank's own"
        assert not torch.cuda.is_initialized()
    finally:
        torch.set_default_device(None)


def test_settings_of_a_library_that_comes_later(kernel: Kernel) -> None:
    """pandas is imported in the cell, after the settings were put."""
    ok(kernel.execute("import pandas\npandas.set_option('display.max_rows', 7)"))
    reply = ok(kernel.execute("%%spawn 1 -m spawn -o found\nimport pandas as pd\npd.get_option('display.max_rows')"))
    assert reply.status == "ok"
    assert kernel.value("list(found)") == [7]
    ok(kernel.execute("pandas.reset_option('display.max_rows')"))


def test_rich_logging(kernel: Kernel) -> None:
    """Its handler has a console, which cannot travel, in place of a stream."""
    pytest.importorskip("rich")
    setup = "import logging\nfrom rich.logging import RichHandler\n_log = logging.getLogger('rich of mine')\n"
    ok(kernel.execute(f"{setup}_log.addHandler(RichHandler(show_path=False))\n_log.setLevel('INFO')"))
    for method in ("forkserver", "fork"):
        reply = ok(
            kernel.execute(f"%%spawn 2 -m {method}\nimport logging\nlogging.getLogger('rich of mine').info('seen')")
        )
        assert [len([line for line in reply.of(rank) if re.search(r"INFO +seen", plain(line))]) for rank in (0, 1)] == [
            1,
            1,
        ], str(reply)


def test_a_handler_that_writes_elsewhere_stays_the_kernels(tmp_path: Path) -> None:
    import logging

    logger = logging.getLogger("to a file")
    handler = logging.FileHandler(tmp_path / "log")
    logger.addHandler(handler)
    try:
        found = {one.name: one for one in loggers.read().loggers}
        assert found["to a file"].handlers == ()
    finally:
        logger.removeHandler(handler)
        handler.close()


METHODS = pytest.mark.parametrize("method", EVERY_METHOD)

NEWER_PRECISIONS = (
    ("torch.backends.cuda.matmul.fp32_precision", "tf32"),
    ("torch.backends.mkldnn.matmul.fp32_precision", "bf16"),
    ("torch.backends.cudnn.allow_tf32", False),
)


@METHODS
def test_precisions_by_their_newer_names(kernel: Kernel, method: str) -> None:
    """What they can say has no older name: torch refuses to tell the matmul precision by that then."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        pytest.skip("this torch has none")
    for name, value in NEWER_PRECISIONS:
        before = kernel.value(f"import torch\n{name}")
        try:
            ok(kernel.execute(f"{name} = {value!r}"))
            state = kernel.value("from nbspawn._carried import settings as _s\nstr(_s.read().torch)")
            cell = f"from nbspawn._carried import settings\n{name}, str(settings.read().torch)"
            ok(kernel.execute(f"%%spawn 1 -m {method} -o found\n{cell}"))
            assert kernel.value("list(found)") == [(value, state)]
        finally:
            ok(kernel.execute(f"{name} = {before!r}"))


DEFINED_HERE = """
import logging, warnings
import numpy as np, pandas as pd
class Mine(UserWarning):
    pass
warnings.filterwarnings("ignore", category=Mine)
pd.set_option("display.float_format", lambda number: f"<{number:.1f}>")
np.set_printoptions(formatter={"float": lambda number: f"({number:.1f})"})
logging.addLevelName(35, "NOTICE")
class NoSecrets(logging.Filter):
    def filter(self, record):
        return "secret" not in record.getMessage()
class Printing(logging.Handler):
    def emit(self, record):
        print("printed:", record.levelname, record.getMessage())
class Writing(Printing):
    def __init__(self):
        super().__init__()
        self.file = open("written", "a")
    def emit(self, record):
        self.file.write(record.getMessage())
def prepare(name, handler, *filters):
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.filters[:] = filters
    logger.propagate = False
    return handler
prepare("printing", Printing()).addFilter(NoSecrets())
prepare("filtered", Printing(), NoSecrets(), lambda record: "hush" not in record.getMessage())
writing = prepare("writing", Writing())
"""

USES_THEM = """
print(pd.DataFrame({"a": [1.25]}), np.array([1.25]))
warnings.warn("not this", Mine)
warnings.warn("but this", UserWarning)
for name in ("printing", "filtered"):
    logging.getLogger(name).warning(f"a secret of {name}")
    logging.getLogger(name).log(35, f"seen of {name}")
logging.getLogger("filtered").warning("hush")
logging.getLogger("writing").warning("to no file")
"""


@METHODS
def test_settings_that_the_notebook_has_defined(kernel: Kernel, method: str) -> None:
    """Functions, and classes that no rank can import; what the cell uses of them is the same class there."""
    pytest.importorskip("pandas")
    ok(kernel.execute(DEFINED_HERE))
    try:
        reply = ok(kernel.execute(f"%%spawn 1 -m {method} -o found\n{USES_THEM}\nMine('value')"))
    finally:
        ok(
            kernel.execute(
                "pd.reset_option('display.float_format')\nnp.set_printoptions(formatter=None)\n"
                "for _name in ('printing', 'filtered', 'writing'): logging.getLogger(_name).handlers.clear()\n"
                "del _name"
            )
        )
    said = reply.of(0)
    assert "0 <1.2> [(1.2)]" in " ".join(said) or "0 <1.3> [(1.3)]" in " ".join(said)
    assert [line for line in said if line.startswith("printed")] == [
        "printed: NOTICE seen of printing",
        "printed: NOTICE seen of filtered",
    ]
    assert not [line for line in said if "not this" in line or "secret" in line or "hush" in line]
    assert any("but this" in line for line in said)
    assert (kernel.folder / "written").read_text() == "", "its handler holds a file, and is not sent"
    assert kernel.value("found[0].__class__ is Mine") is True


@METHODS
def test_handlers_that_write_elsewhere_stay_the_kernels(kernel: Kernel, method: str) -> None:
    """Under fork, too: several ranks would write to one file, and nobody reads their queue."""
    ok(
        kernel.execute(
            "import logging, logging.handlers, queue\nlines = queue.Queue()\n"
            "logging.root.addHandler(logging.FileHandler('root.log', 'w'))\n"
            "logging.getLogger('queued').addHandler(logging.handlers.QueueHandler(lines))"
        )
    )
    try:
        cell = "import logging\nlogging.warning('from the root')\nlogging.getLogger('queued').warning('queued')"
        reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n{cell}"))
        assert reply.of(0) == reply.of(1) == ["WARNING:root:from the root", "WARNING:queued:queued"]
        assert (kernel.folder / "root.log").read_text() == ""
        ok(kernel.execute("logging.warning('of the notebook')"))
        assert (kernel.folder / "root.log").read_text() == "of the notebook\n", "the kernel has it still"
    finally:
        ok(kernel.execute("logging.root.handlers.pop()\nlogging.getLogger('queued').handlers.clear()"))


def test_a_forked_rank_takes_its_own_gpu_for_the_default_device(kernel: Kernel) -> None:
    """Without a GPU torch takes the name, and uses it for nothing."""
    ok(kernel.execute("import torch\ntorch.set_default_device('cuda:0')"))
    try:
        cell = "import torch\nstr(torch._GLOBAL_DEVICE_CONTEXT.device_context.device)"
        assert ok(kernel.execute(f"%%spawn 2 -m fork\n{cell}")).result == "[0-1] 'cuda'"
    finally:
        ok(kernel.execute("torch.set_default_device(None)"))


@METHODS
def test_what_processes_inherit(own_kernel: Kernel, method: str) -> None:
    """Limits, umask, niceness, processors: of the kernel as it is now, not as it was when the fork server began."""
    ok(own_kernel.execute("from nbspawn._engine.start.forkserver import server; _ = server.get()"))
    ok(
        own_kernel.execute(
            "import os, resource\nos.umask(0o027), os.nice(1), os.sched_setaffinity(0, {0})\n"
            "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 5000))"
        )
    )
    cell = "from nbspawn._carried import process_state\nopen(f'made-{rank}', 'w').close()\ntuple(process_state.read())"
    ok(own_kernel.execute(f"%%spawn 2 -m {method} -o found\n{cell}"))
    assert own_kernel.value("list(found)") == [own_kernel.value(cell.replace("{rank}", "kernel"))] * 2
    assert (own_kernel.folder / "made-1").stat().st_mode & 0o777 == 0o640


@METHODS
def test_multiprocessing_is_as_in_a_program(kernel: Kernel, method: str) -> None:
    cell = """
import multiprocessing as mp
before = mp.current_process().name, mp.parent_process(), mp.get_start_method(allow_none=True)
mp.set_start_method("spawn")
try:
    mp.set_start_method("fork")
except RuntimeError as error:
    after = *before, str(error), mp.get_context().Process().name
after
"""
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}{cell}"))
    assert reply.result == "[0-1] ('MainProcess', None, None, 'context has already been set', 'SpawnProcess-1')"


@METHODS
def test_a_start_method_that_the_notebook_has_set(own_kernel: Kernel, method: str) -> None:
    ok(own_kernel.execute("import multiprocessing as mp\nmp.set_start_method('forkserver')"))
    cell = "before = mp.get_start_method()\nmp.set_start_method('fork', force=True)\nbefore"
    assert ok(own_kernel.execute(f"%%spawn 2 -m {method}\n{cell}")).result == "[0-1] 'forkserver'"
    assert own_kernel.value("mp.get_start_method()") == "forkserver"


@METHODS
@pytest.mark.parametrize("how", ["", "--env "])
def test_environment_that_native_code_reads(own_kernel: Kernel, method: str, how: str) -> None:
    """torch's debug level, the time zone."""
    ok(own_kernel.execute("%%spawn 1\n1"))
    given = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TZ": "Asia/Tokyo"}
    if not how:
        ok(own_kernel.execute("\n".join(f"%env {name}={value}" for name, value in given.items())))
    options = " ".join(f"--env {name}={value}" for name, value in given.items()) if how else ""
    cell = "import time, torch.distributed as dist\ndist.get_debug_level().name, time.localtime(0).tm_hour"
    assert ok(own_kernel.execute(f"%%spawn 2 -m {method} {options}\n{cell}")).result == "[0-1] ('DETAIL', 9)"


def test_environment_that_is_read_once(own_kernel: Kernel) -> None:
    """By the interpreter: a new fork server has it."""
    ok(own_kernel.execute("%%spawn 1\n1\n"))
    ok(own_kernel.execute("%env PYTHONHASHSEED=5"))
    reply = ok(own_kernel.execute("%%spawn 2 -o found\nimport os, subprocess, sys\nhash('text')"))
    assert "start again, since PYTHO" in reply.table["text/plain"]
    fresh = "import subprocess, sys\nint(subprocess.check_output([sys.executable, '-c', 'print(hash(\"text\"))']))"
    assert own_kernel.value("list(found)") == [own_kernel.value(fresh)] * 2
    ok(own_kernel.execute("%env PYTHONHASHSEED=0"))


@METHODS
@pytest.mark.parametrize(
    "send", ["_thread.interrupt_main()", "signal.raise_signal(signal.SIGINT)", "os.kill(os.getpid(), signal.SIGINT)"]
)
def test_a_rank_that_interrupts_itself(kernel: Kernel, method: str, send: str) -> None:
    """As in any program; a timer's thread does it, for one. A stranger's signal is not for a rank."""
    cell = f"""
import _thread, os, signal, subprocess, sys, threading, time
subprocess.run(["kill", "-INT", str(os.getpid())])
end = time.monotonic() + 50
try:
    threading.Timer(0.01, lambda: {send}).start()
    while time.monotonic() < end:
        time.sleep(0.01)  # from another thread none of these ends a longer one
except KeyboardInterrupt:
    interrupted = True
interrupted
"""
    assert ok(kernel.execute(f"%%spawn 2 -m {method}{cell}")).result == "[0-1] True"
    reply = kernel.execute(f"%%spawn 2 -m {method}\nimport _thread, os, signal\nif rank == 1: {send}\nrank")
    assert reply.ename == "RankRaisedError" and "rank 1 of 2: KeyboardInterrupt" in reply.traceback


def test_a_directory_that_has_been_deleted(kernel: Kernel) -> None:
    ok(kernel.execute("import os\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')"))
    try:
        reply = kernel.execute("%%spawn 2\nrank")
        assert reply.ename == "StartError"
        assert "the current directory has been deleted" in reply.evalue and "%cd" in reply.evalue
    finally:
        ok(kernel.execute(f"os.chdir({str(kernel.folder)!r})"))


@pytest.mark.extended
def test_a_deleted_directory_does_not_end_a_kernel_without_torch(tmp_path: Path) -> None:
    """An import of torch would: MKL exits there."""
    with ExecutedKernel(tmp_path) as kernel:
        ok(kernel.execute("%load_ext nbspawn\nimport os\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')"))
        reply = kernel.execute("%%spawn 2\nrank")
        assert reply.status == "error" and "the current directory has been deleted" in str(reply)
        ok(kernel.execute(f"os.chdir({str(tmp_path)!r})"))
        ok(kernel.execute("%%spawn 2 -o found\nrank"))
        assert kernel.value("list(found)") == [0, 1]


# ---------------------------------------------------------------- fork's hazards (R10, R11)


def test_a_thread_that_an_object_needs_forbids_fork(kernel: Kernel) -> None:
    """A fork copies no thread: who puts something into the queue would wait for ever."""
    ok(
        kernel.execute(
            "import queue, threading\n"
            "class Writer:\n"
            "    def __init__(self):\n"
            "        self.queue = queue.Queue(1)\n"
            "        self.thread = threading.Thread(target=self.work, daemon=True)\n"
            "        self.thread.start()\n"
            "    def work(self):\n"
            "        while self.queue.get() is not None: pass\n"
            "writer = Writer()\n"
        )
    )
    asked = kernel.execute("%%spawn 2 -m fork\nwriter.queue.put(1)")
    assert asked.ename == "StartError", str(asked)
    assert "writer.thread is a thread that runs in this kernel" in asked.traceback
    auto = kernel.execute("%%spawn 2\nwriter.queue.put(1)")
    assert auto.ename == "PayloadError", str(auto)
    assert "writer.thread" in auto.traceback
    ok(kernel.execute("writer.queue.put(None)\nwriter.thread.join()"))
    assert ok(kernel.execute("%%spawn 2 -m fork\nwriter.queue.qsize()")).status == "ok"


WRITER = """
from torch.utils.tensorboard import SummaryWriter
from torch.utils.data import DataLoader
writer = SummaryWriter("runs")
def note(value):
    writer.add_scalar("value", value, value)
def note_all(values):
    for value in values:
        note(value)
class Holder:
    pass
holder = Holder()
holder.writer = {"inside": [writer]}
batches = iter(DataLoader(list(range(64)), num_workers=1))
loader = DataLoader(list(range(64)), num_workers=1, persistent_workers=True)
first = next(iter(loader))
"""


def test_what_a_thread_or_a_process_of_the_kernel_works_for_forbids_fork(own_kernel: Kernel) -> None:
    """A SummaryWriter puts what it is given into a queue, for a thread that no rank has; two ranks that ask one worker
    of a DataLoader get each other's batches. Also where they are parts of something, and nothing else of torch's is
    looked into."""
    pytest.importorskip("tensorboard")
    ok(own_kernel.execute(WRITER))
    for cell, path in (
        ("writer.add_scalar('value', 1, 1)", "writer.file_writer"),
        ("note_all(range(50))", "note_all -> note -> writer.file_writer"),
        ("holder.writer", "holder.writer['inside'][0].file_writer"),
        ("next(batches)", "batches._workers[0] is a process"),
        ("next(iter(loader))", "loader._iterator._workers[0] is a process"),
    ):
        for method, name in (("fork", "StartError"), ("auto", "PayloadError")):
            reply = own_kernel.execute(f"%%spawn 2 -m {method} -t 5\n{cell}")
            if (cell, method) != ("next(iter(loader))", "auto"):  # a rank starts workers of its own
                assert (reply.ename, path in reply.evalue) == (name, True), str(reply)
                assert reply.evalue.count("-m fork") == 0, "it would contradict itself"
            else:
                assert ok(reply).result == "[0-1] tensor([0])"
    ok(own_kernel.execute("writer.close()"))
    assert ok(own_kernel.execute("%%spawn 2 -m fork\nholder.writer['inside'][0].log_dir")).status == "ok"


def test_a_manager_serves_forked_ranks_as_well(kernel: Kernel) -> None:
    """Its process works for all; the manager itself cannot travel, and so the ranks of `auto` are forked."""
    ok(kernel.execute("import multiprocessing\n_manager = multiprocessing.Manager()\nshared = _manager.dict()"))
    for method in ("fork", "forkserver", "auto"):
        use = "_manager.dict()" if method == "auto" else "pass"
        reply = ok(kernel.execute(f"%%spawn 2 -m {method} -t 20\nshared[{method!r}, rank] = 1\n{use};"))
        assert ("fork: _manager cannot travel" in reply.table["text/plain"]) is (method == "auto")
    assert kernel.value("len(shared)") == 6
    ok(kernel.execute("_manager.shutdown()"))


POOLED = """
from concurrent.futures import ThreadPoolExecutor
threads = ThreadPoolExecutor(2)
def squares(n): return list(threads.map(lambda x: x * x, range(n)))
"""


@pytest.mark.parametrize("keep", ["", "--keep"])
def test_executors_work_in_forked_ranks(own_kernel: Kernel, keep: str) -> None:
    """A library's, joblib's and the notebook's: their workers are the kernel's, and go on there. `auto` forks for
    the lock."""
    pytest.importorskip("joblib")
    (own_kernel.folder / "pooled.py").write_text(POOLED)
    ok(own_kernel.execute("%load_ext nbspawn\nimport threading, pooled\nfrom joblib import Parallel, delayed"))
    use = "[pooled.squares(3), mine.submit(abs, -3).result(), Parallel(2)([delayed(abs)(-1)] * 3)]"
    used = "[[0, 1, 4], 3, [1, 1, 1]]"
    ok(own_kernel.execute(f"lock, mine = threading.Lock(), pooled.ThreadPoolExecutor(1)\nassert {use} == {used}"))
    of_joblib = set(own_kernel.ranks())
    reply = ok(own_kernel.execute(f"%%spawn 2 {keep} -t 60\nlock\n{use}"))
    assert reply.result == f"[0-1] {used}"
    assert "and fork is safe here" in reply.table["text/plain"]
    if keep:
        assert ok(own_kernel.execute(f"%%ranks\n{use}")).result == f"[0-1] {used}"
        ok(own_kernel.execute("%ranks stop"))
    assert own_kernel.execute(use).result == used
    wait_gone([process.pid for process in own_kernel.ranks() if process not in of_joblib])


def test_a_generator_without_a_seed_is_named(kernel: Kernel, method: str) -> None:
    ok(
        kernel.execute(
            "import numpy as np\nrng, seeded = np.random.default_rng(), np.random.default_rng(1)\n"
            "def noise(): return rng.random()"
        )
    )
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nnoise(), seeded.random()"))
    said = reply.table["text/plain"]
    assert "noise -> rng was made in the notebook, without a seed: all ranks draw the same numbers." in said
    assert "seeded" not in said.partition("noise ->")[2]
    assert "without a seed" not in ok(kernel.execute("%%spawn 2\nseeded.random()")).table["text/plain"]


REPLACED = """
import functools, math, sys, numpy as np, torch, netmod
square_root = math.sqrt
math.sqrt = lambda x: 10 + square_root(x)
class Net(torch.nn.Linear): pass
linear = torch.nn.Linear
torch.nn.Linear = Net
netmod.depth, netmod.Plan.width = 7, [1, 2]
netmod.settings = {"lr": 0.1}
for _each in (3, 4):
    netmod.Plan.steps = _each
median, helped = np.median, netmod.help
def wrapped(f):
    @functools.wraps(f)
    def wrapper(*args): return "wrapped", f(*args)
    return wrapper
np.median = wrapped(np.median)
netmod.help = functools.lru_cache(wrapped(netmod.help))
again = wrapped(median)
def _inside(): np.mean = None
text = "np.sum = None"
sys.of_the_notebook = 1
"""


def test_what_cells_have_set_in_modules(kernel: Kernel, method: str) -> None:
    """Of C functions and classes the original stays itself; a process's own module is left alone. Kept ranks have what
    was set when they were started, and keep what they set themselves."""
    library = "depth, settings = 1, {}\ndef help(): return 'help'\nclass Plan:\n    width = steps = rate = None\n"
    (kernel.folder / "netmod.py").write_text(library)
    ok(kernel.execute(REPLACED))
    ok(kernel.execute("%%time\nfor _each in [netmod.Plan]: _each.rate = 0.5"))
    ok(kernel.execute("it = netmod\nit.more = 5"))
    ok(kernel.execute("del it"))
    cell = """
import math, sys, torch, netmod
assert math.sqrt(4) == 12 and square_root(4) == 2 and math.sqrt(9) == 13
assert torch.nn.Linear is Net and type(linear(1, 1)) is Net.__mro__[1] is linear is not Net
assert (netmod.depth, netmod.Plan.width, netmod.Plan.steps, netmod.settings["lr"]) == (7, [1, 2], 4, 0.1)
assert (np.median([1, 3])[0], median([1, 3]), again([1, 3])[0]) == ("wrapped", 2, "wrapped")
assert (netmod.help(), helped()) == (("wrapped", "help"), "help") and netmod.help.cache_info().currsize == 1
netmod.depth, rate, more = 8, netmod.Plan.rate, netmod.more
hasattr(sys, "of_the_notebook"), (rate, more), [median, helped, again, lambda x: median(x) + 1]
"""
    try:
        ok(kernel.execute(f"%%spawn 2 -o found -m {method} --keep\n{cell}"))
        assert kernel.value("[(has, more) for has, more, came_back in found]") == [(method == "fork", (0.5, 5))] * 2
        came_back = "(lambda m, h, a, one: (m is median, h is helped, a([1, 3])[0], float(one([1, 3]))))(*found[1][2])"
        assert kernel.value(came_back) == (True, True, "wrapped", 3.0)
        reply = ok(kernel.execute("%%ranks --push square_root,median\nnetmod.depth, square_root(4), int(median([2]))"))
        assert reply.result == "[0-1] (8, 2.0, 2)"
        ok(kernel.execute("import nbspawn\ndef depth(rank): return netmod.depth, math.sqrt(4)"))
        assert kernel.value(f"list(nbspawn.spawn(depth, nprocs=2, start_method={method!r}))") == [(7, 12)] * 2
    finally:
        kernel.execute(
            "%ranks stop\nmath.sqrt, torch.nn.Linear, np.median = square_root, linear, median\nnetmod.help = helped"
        )


def test_what_was_set_and_cannot_be_loaded_is_named(own_kernel: Kernel, method: str) -> None:
    """Cells that have nothing to do with it run, by the method that was asked for. What was put back is not sent."""
    (own_kernel.folder / "library").mkdir()
    (own_kernel.folder / "library" / "gone.py").write_text("def own(): pass\n")
    setup = """
class Fragile:
    def __init__(self): self.x = 1
    def __setstate__(self, state): raise ValueError("it breaks")
import math, sys
%load_ext nbspawn
sys.path.append("library")
import gone
math.gone, math.also, gone.own, own = Fragile(), Fragile(), len, gone.own
math.pi = 3
sys.path.remove("library")"""
    ok(own_kernel.execute(setup))
    ok(own_kernel.execute("gone.own = own"))
    for keep in ("", "--keep"):
        reply = ok(own_kernel.execute(f"%%spawn 2 -m {method} {keep}\nimport math\nmath.pi, hasattr(math, 'gone')"))
        assert reply.result == f"[0-1] (3, {method == 'fork'})"
        said = "math.also, math.gone cannot be sent as the notebook has set it, and is the library's own in ranks"
        assert (said in reply.table["text/plain"]) is (method != "fork"), str(reply)
        assert reply.table["text/plain"].startswith(f"2 ranks · {'fork' if method == 'fork' else 'fork server'}")
    assert ok(own_kernel.execute("%%ranks\nrank")).result == "[0] 0\n[1] 1"
    ok(own_kernel.execute("%ranks stop"))


def test_the_search_for_hazards_is_short() -> None:
    """Torch's data, however much of it there is, does not use it up: what stands beside it is found."""
    lock = threading.Lock()
    many = {str(number): number for number in range(1000)}
    net = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(500)))
    tensors = [torch.zeros(1) for _ in range(1000)]
    looked_at = []
    with lock:
        variables = {"net": net, "some": {"tensors": tensors, "many": many, "lock": lock}}
        assert [path for path, _ in reachable.findings(variables, fork_safety._stranded)] == ["some['lock']"]
        nested = {"tensors": tensors, "nested": [[[i]] for i in range(1000)]}
        list(reachable.findings(nested, lambda one: looked_at.append(one) or ""))
    assert len(looked_at) == 200


def test_a_queue_of_multiprocessing_does_not_forbid_fork(kernel: Kernel) -> None:
    """It has a thread in the kernel, and makes itself anew in a forked process."""
    ok(kernel.execute("import torch.multiprocessing as mp\nqueue = mp.get_context('fork').Queue()\nqueue.put(1)"))
    assert ok(kernel.execute("%%spawn 1 -m fork -t 20\nqueue.put(2)\nqueue.get(), queue.get()")).result == "[0] (1, 2)"
    ok(kernel.execute("queue.close()\nqueue.join_thread()"))


def test_harmless_settings_do_not_forbid_fork() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    try:
        assert fork_safety.probe() == []
        with torch.inference_mode():
            assert fork_safety.probe() == []
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


STUCK = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.1)
os._exit(0)
"""

TELLS = """
import sys, os
import cloudpickle, nbspawn._session_api
os.environ["PYTHONPATH"] = {folder!r}
sys.path.insert(0, {folder!r})
%load_ext nbspawn
from nbspawn._engine.start.forkserver import server
_get = server.get
server.get = lambda *given: (print("it waits"), _get(*given))[1]
"""


def test_stop_while_the_fork_server_starts(tmp_path: Path) -> None:
    """Its imports take a second; here they take for ever."""
    folder = tmp_path / "stuck"
    folder.mkdir()
    (folder / "cloudpickle.py").write_text(STUCK)
    with Kernel(tmp_path) as kernel:
        ok(kernel.execute(TELLS.format(folder=str(folder))))
        cell = kernel.submit("%%spawn 2\npass").until("it waits")
        kernel.interrupt()
        reply = cell.wait()
        assert reply.ename == "KeyboardInterrupt"
        assert "no ranks have been started" in reply.traceback
        assert kernel.value("1 + 1") == 2
