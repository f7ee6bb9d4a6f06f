"""Fixtures for the tests that start real ranks."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path

import pytest

# Without it jupyter_core warns, and warnings are errors here; set before anything imports it.
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
# A fork server that goes on importing in the background would take a processor from each test; those that are about it
# switch it on (test_preload.py).
os.environ["NBSPAWN_PRELOAD_MB"] = "0"

from kernels import Kernel
from methods import METHODS
from widgets import PANEL_THREADS, Screen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--method", choices=METHODS, help="run under this start method only what is tested under several")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    wanted = config.getoption("--method")
    if wanted is None:
        return
    under = {item: next((name for name in METHODS if name in re.split("[][-]", item.name)), "") for item in items}
    several = {item.function for item in items if under[item] == wanted}
    left = [item for item in items if under[item] not in (wanted, "") and item.function in several]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Where several test sessions run at the same time (.ci/run), a test with a bound on time runs alone.

    Two locks: who waits to be alone holds the door meanwhile, so that it is let in. The wait is outside of the test's
    own time limit.
    """
    path = os.environ.get("NBSPAWN_TEST_LOCK")
    if path is None:
        return (yield)
    alone = item.get_closest_marker("timing") is not None
    with open(f"{path}-door", "w") as door, open(path, "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a process that the test has left may hold the file, too


@pytest.fixture(scope="session")
def workplace() -> Iterator[str]:
    """A temp directory of this test session (others may run on the machine), a warm fork server, orphans adopted."""
    import leftovers
    import rank_functions
    import torch

    import nbspawn
    from nbspawn._engine import forkserver

    shared = os.environ.get("TMPDIR"), tempfile.tempdir
    util.get_temp_dir()  # multiprocessing's own, once a process and until its end
    own = tempfile.mkdtemp(prefix="nbt-")
    os.environ["TMPDIR"] = tempfile.tempdir = own
    leftovers.adopt_orphans()
    resource_tracker.ensure_running()
    forkserver.server.get()
    torch.zeros(1).share_memory_()
    multiprocessing.Value("i")  # its heap stays for the life of the process
    # With join=False the store is served at once; its library keeps a pipe from then on, one for the whole process.
    nbspawn.start_processes(rank_functions.succeed, start_method="fork", join=False).join()
    gc.freeze()  # what is there now stays: each test's collection (leftovers.py) would go through torch for 0.3 s
    yield own
    forkserver.server.stop()
    tempfile.tempdir = shared[1]
    if shared[0] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = shared[0]
    shutil.rmtree(own, ignore_errors=True)


@pytest.fixture
def nothing_left(workplace: str) -> Iterator[None]:
    """The test must leave no process, descriptor, thread, directory or signal handler behind."""
    import leftovers

    before = leftovers.State.now()
    yield
    leftovers.assert_nothing_beyond(before)


# ---------------------------------------------------------------- kernels (kernels.py)

WARM = """\
import torch as _torch  # takes as long as the fork server's own import beside it
from nbspawn._engine.forkserver import server as _server
_server.get()
del _torch, _server
"""


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for a module's tests, the extension loaded and the fork server warm."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        assert kernel.execute("%load_ext nbspawn").status == "ok"
        assert kernel.execute(WARM).status == "ok"
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The module's kernel; no test may leave a rank in it."""
    failed = request.session.testsfailed
    yield module_kernel
    if request.session.testsfailed > failed:
        module_kernel.interrupt()  # a cell that the test has left, for which all later tests would wait in vain
    module_kernel.assert_no_rank()
    assert module_kernel.value("6 * 7") == 42


@pytest.fixture
def screen(kernel: Kernel) -> Iterator[Screen]:
    """A front end of the module's kernel; no rank, panel or widget is left when it leaves, no callback has failed."""
    screen = Screen(kernel)
    try:
        yield screen
    finally:
        kernel.interrupt()  # a cell that a failed test has left
        kernel.execute("import ipywidgets, nbspawn\nnbspawn._session.pool.end_all()")
        screen.until(lambda: kernel.value(PANEL_THREADS) == [], "the panels' threads end with the ranks")
        kernel.execute("ipywidgets.Widget.close_all()")
        screen.leave()
    assert not screen.stray.saved, str(screen.stray)
    assert "Traceback" not in kernel.terminal


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test that ends it, or spoils it."""
    with Kernel(tmp_path) as kernel:
        assert kernel.execute("%load_ext nbspawn").status == "ok"
        assert kernel.execute(WARM).status == "ok"
        yield kernel


@pytest.fixture(params=["fork", "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    """The start methods under which a test must hold."""
    return request.param
