"""Fixtures for the tests that start real ranks."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import pytest

# Without it jupyter_core warns, and warnings are errors here; set before anything imports it.
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
# A fork server that goes on importing in the background would take a processor from each test; those that are about it
# switch it on (test_preload.py).
os.environ["NBSPAWN_PRELOAD_MB"] = "0"

import evidence
from costs import FOLDERS, Costs, folder
from kernels import Kernel, ok, prepare
from methods import METHODS, PATIENCE
from widgets import PANEL_THREADS, Screen

LOCK = "NBSPAWN_TEST_LOCK"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--method", choices=METHODS, help="run under this start method only what is tested under several")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
    if LOCK not in os.environ:  # workers inherit it
        place = tempfile.mkdtemp(prefix="nbt-lock-")
        os.environ[LOCK] = f"{place}/tests"
        config.add_cleanup(lambda: shutil.rmtree(place))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker for each processor; none for a single file, which is for looking at it."""
    if len(config.args) == 1 and not os.path.isdir(config.args[0]):
        return 0
    return len(os.sched_getaffinity(0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    sizes = Counter(item.path for item in items)  # a worker takes a whole file
    items.sort(key=lambda item: (FOLDERS.index(folder(item.nodeid)), -sizes[item.path], item.path))
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
    """A test with a bound on time runs alone, whatever workers and other test sessions (.ci/full) there are.

    Two locks: who waits to be alone holds the door meanwhile, so that it is let in. The wait is outside of the test's
    own time limit.
    """
    path = os.environ[LOCK]
    alone = item.get_closest_marker("timing") is not None
    with open(f"{path}-door", "w") as door, open(path, "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a process that the test has left may hold the file, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    report = yield
    if report.failed:
        report.sections.append(("evidence", evidence.of(item, call.start)))
    return report


@pytest.fixture(scope="session", autouse=True)
def temp() -> Iterator[str]:
    """A temp directory of this process's tests, and in it IPython's profile: other tests run on the machine."""
    util.get_temp_dir()  # multiprocessing's own, once a process and until its end
    own = tempfile.mkdtemp(prefix="nbt-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", own)
        patch.setenv("IPYTHONDIR", f"{own}/ipython")
        patch.setattr(tempfile, "tempdir", own)
        yield own
    shutil.rmtree(own, ignore_errors=True)


@pytest.fixture(scope="session")
def workplace(temp: str) -> Iterator[str]:
    """The temp directory, with a warm fork server, and orphans adopted."""
    import leftovers
    import rank_functions
    import torch

    import nbspawn
    from nbspawn._engine.start import forkserver

    leftovers.adopt_orphans()
    resource_tracker.ensure_running()
    forkserver.server.get()
    torch.zeros(1).share_memory_()
    multiprocessing.Value("i")  # its heap stays for the life of the process
    # With join=False the store is served at once; its library keeps a pipe from then on, one for the whole process.
    nbspawn.start_processes(rank_functions.succeed, start_method="fork", join=False).join()
    gc.freeze()  # what is there now stays: each test's collection (leftovers.py) would go through torch for 0.3 s
    yield temp
    forkserver.server.stop()


@pytest.fixture
def nothing_left(workplace: str) -> Iterator[None]:
    """The test must leave no process, descriptor, thread, directory or signal handler behind."""
    import leftovers

    before = leftovers.State.now()
    yield
    leftovers.assert_nothing_beyond(before)


# ---------------------------------------------------------------- kernels (kernels.py)


@pytest.fixture(scope="session")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for this process's tests."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def module_kernel(shared_kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """It as a new one for a module: an empty notebook in a folder of its own."""
    shared_kernel.folder = tmp_path_factory.mktemp("notebook")
    # A test of the module before may have ended the fork server.
    prepare(shared_kernel, "torch._dynamo")  # which an optimizer imports, in each rank (kernel_parent.py)
    ok(shared_kernel.execute("%reset_selective -f ."))
    return shared_kernel


@pytest.fixture
def kernel(module_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The module's kernel; no test may leave a rank in it. One that fails, or does, costs the others nothing: the
    kernel is restarted."""
    failed = request.session.testsfailed
    yield module_kernel
    spoiled = True
    try:
        if request.session.testsfailed == failed:
            module_kernel.assert_no_rank()
            assert module_kernel.value("6 * 7") == 42
            spoiled = False
    finally:
        if spoiled:
            module_kernel.restart(now=True)
            prepare(module_kernel)


@pytest.fixture
def patient(kernel: Kernel) -> Iterator[None]:
    """Errors that ranks raise at the same time, each by itself, are collected on a busy machine, too: a run does not
    interrupt its other ranks 0.25 s after the first error, but when the test's patience has an end."""
    ok(kernel.execute("from nbspawn._session import stop_policy as nbspawn_policy"))
    usual = kernel.value("nbspawn_policy._COLLECT")
    ok(kernel.execute(f"nbspawn_policy._COLLECT = {PATIENCE}"))
    yield
    ok(kernel.execute(f"nbspawn_policy._COLLECT = {usual}"))


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
def unloaded(kernel: Kernel) -> Iterator[Kernel]:
    """The module's kernel for a test that unloads the extension: afterwards it is loaded again."""
    yield kernel
    prepare(kernel, "torch._dynamo")


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test that ends it, or spoils it."""
    with Kernel(tmp_path) as kernel:
        prepare(kernel)
        yield kernel


@pytest.fixture(params=["fork", "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    """The start methods under which a test must hold."""
    return request.param
