"""A rank ends as a program does: what it has left open is written, its threads and ``atexit`` handlers run; and what
the kernel has registered for its own end is left to the kernel."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel, ok, once, wait_until
from methods import EVERY_METHOD

METHODS = pytest.mark.parametrize("method", EVERY_METHOD)

LEAVES_OPEN = """
import atexit, gzip, logging, logging.handlers, tempfile, threading, time, zipfile
from pathlib import Path
def begin(name):
    def put(kind, text):
        Path(f"{name}-{kind}").write_text(text)
    text = open(f"{name}-text", "w"); text.write("text")
    data = open(f"{name}-data", "wb"); data.write(b"data")
    packed = gzip.open(f"{name}-packed", "wt"); packed.write("packed")
    archive = zipfile.ZipFile(f"{name}-archive", "w"); archive.writestr("part", "archive")
    atexit.register(put, "atexit", "atexit")
    log = logging.FileHandler(f"{name}-log")
    memory = logging.handlers.MemoryHandler(100, target=log)
    logger = logging.getLogger(name); logger.addHandler(memory); logger.propagate = False
    logger.error("logged")
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-temporary", dir=".")
    file = tempfile.NamedTemporaryFile(prefix=f"{name}-temporary", dir=".")
    threading.Thread(target=lambda: (time.sleep(0.2), put("thread", "thread"))).start()
    return text, data, packed, archive, memory, folder, file
"""


def check(folder: Path, name: str) -> None:
    for kind in ("text", "data", "atexit", "thread"):
        assert (folder / f"{name}-{kind}").read_text() == kind
    assert (folder / f"{name}-log").read_text() == "logged\n"
    with gzip.open(folder / f"{name}-packed", "rt") as packed:
        assert packed.read() == "packed"
    with zipfile.ZipFile(folder / f"{name}-archive") as archive:
        assert archive.read("part") == b"archive"
    assert not list(folder.glob(f"{name}-temporary*"))


@METHODS
def test_what_a_cell_leaves_open_is_written(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(f"%%spawn 2 -m {method}\n{LEAVES_OPEN}\nopened = begin(f'{method}-{{rank}}')"))
    for rank in range(2):
        check(kernel.folder, f"{method}-{rank}")


def test_what_a_function_leaves_open_is_written(kernel: Kernel, method: str) -> None:
    """Though nothing but a module of the standard library holds on to it."""
    kernel.execute(LEAVES_OPEN)
    held = "import sys\ndef job(rank, name):\n    sys.left_open = begin(f'{name}-{rank}')\n"
    ok(kernel.execute(f"{held}import nbspawn\nnbspawn.spawn(job, ('of-{method}',), 2, start_method='{method}')"))
    for rank in range(2):
        check(kernel.folder, f"of-{method}-{rank}")


def test_what_kept_ranks_leave_open_is_written_when_they_are_stopped(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(f"%%spawn 2 --keep -m {method}\n{LEAVES_OPEN}\nopened = begin(f'kept-{method}-{{rank}}')"))
    ok(kernel.execute("%%ranks\nlater = open(f'later-{rank}', 'w'); later.write('later')"))
    ok(kernel.execute("%ranks stop"))
    for rank in range(2):
        check(kernel.folder, f"kept-{method}-{rank}")
        assert (kernel.folder / f"later-{rank}").read_text() == "later"


@METHODS
def test_files_of_a_rank_that_fails_are_written(kernel: Kernel, method: str) -> None:
    """It leaves at once otherwise: an ``atexit`` handler that waits for a peer would hide the error."""
    cell = (
        "import atexit, time\natexit.register(time.sleep, 100)\n"
        f"file = open(f'failed-{method}-{{rank}}', 'w')\nfile.write('text')\n{{}}['key']"
    )
    reply = kernel.execute(f"%%spawn 2 -m {method}\n{cell}")
    assert reply.ename == "RankRaisedError" and "KeyError" in reply.evalue
    written = [kernel.folder / f"failed-{method}-{rank}" for rank in range(2)]
    assert "text" in [file.read_text() for file in written if file.exists()], "of the one that failed first at least"


def test_a_file_that_cannot_be_written_hides_no_error(kernel: Kernel, method: str) -> None:
    """A pipe that is full, whose reader does not read. The rank has told of its error, and goes."""
    cell = (
        "import os\nread, write = os.pipe()\nos.set_blocking(write, False)\n"
        "try:\n    while True: os.write(write, bytes(4096))\n"
        "except BlockingIOError: os.set_blocking(write, True)\n"
        "file = open(write, 'wb')\nfile.write(b'more')\n1 / 0"
    )
    reply = kernel.execute(f"%%spawn 1 -m {method} -g 600\n{cell}")
    assert reply.ename == "RankRaisedError" and "ZeroDivisionError" in reply.evalue


# ---------------------------------------------------------------- what does not return


@pytest.mark.parametrize(
    "begin",
    ["import threading\nthreading.Thread(target=wait).start()", "import atexit\natexit.register(wait)"],
    ids=["a thread", "atexit"],
)
def test_what_does_not_return_at_the_end_is_stopped_as_a_cell_is(kernel: Kernel, method: str, begin: str) -> None:
    wait = "def wait():\n    time.sleep(0.3)\n    print('waits')\n    time.sleep(1000)"
    code = f"import time\n{wait}\n{begin}"
    cell = kernel.submit(f"%%spawn 2 -m {method} -g 0.5\n{code}").until_ranks("waits", range(2))
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    kernel.assert_no_rank()
    assert kernel.execute(f"%%spawn 2 -m {method} -t 1 -g 0.5\n{code}").ename == "RunTimeoutError"


def test_a_handler_that_raises_keeps_no_other_from_running(kernel: Kernel, method: str) -> None:
    cell = (
        "import atexit\nfrom pathlib import Path\n"
        f"atexit.register(Path(f'second-{method}-{{rank}}').touch)\n"
        "atexit.register(lambda: 1 / 0)"
    )
    reply = ok(kernel.execute(f"%%spawn 1 -m {method}\n{cell}"))
    assert "ZeroDivisionError" in reply.text() and (kernel.folder / f"second-{method}-0").exists()


LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char name[200], what[200];
static int alive = 1;
int is_alive(void) { return alive; }
static void put(const char *kind) {
    char path[300];
    snprintf(path, sizeof path, "%s-%s", name, kind);
    FILE *file = fopen(path, "w");
    fputs(what, file);
    fclose(file);
}
static void at_exit(void) { put("atexit"); }
static void __attribute__((destructor)) destroy(void) {
    alive = 0;
    if (!*name) return;
    put("destructor");
    if (!strcmp(what, "crash")) abort();
    while (!strcmp(what, "hang"));
}
void begin(const char *new_name, const char *new_what) {
    strcpy(name, new_name);
    strcpy(what, new_what);
    atexit(at_exit);
}
"""
OUTER = """
#include <stdio.h>
int is_alive(void);
static void __attribute__((destructor)) destroy(void) {
    FILE *file = fopen("order", "w");
    fputs(is_alive() ? "before what it needs" : "after it", file);
    fclose(file);
}
"""
USES_LIBRARY = """
def leave(name, what="text"):
    import ctypes, h5py
    file = h5py.File(f"{name}.h5", "w", libver="latest")
    file["data"] = [1, 2]
    leave.kept = file, file.create_group("group")
    ctypes.CDLL("./libown.so").begin(name.encode(), what.encode())
"""


FAILING = """
import os, time
open(f'{name}-{{rank}}.left', 'w').close()
while not all(os.path.exists(f'{name}-{{each}}.left') for each in range(2)): time.sleep(0.01)
{{}}['key']"""


@pytest.fixture(scope="module")
def with_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    pytest.importorskip("h5py")
    if shutil.which("gcc") is None:
        pytest.skip("there is no compiler")
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        for name, source, options in (("own", LIBRARY, []), ("outer", OUTER, ["-L.", "-lown", "-Wl,-rpath,$ORIGIN"])):
            command = ["gcc", "-shared", "-fPIC", "-o", f"lib{name}.so", "-x", "c", "-", "-x", "none", *options]
            subprocess.run(command, input=source, text=True, check=True, cwd=kernel.folder)
        ok(kernel.execute(f"%load_ext nbspawn\nimport nbspawn{USES_LIBRARY}"))
        yield kernel
        kernel.assert_no_rank()


def complete(folder: Path, name: str) -> bool:
    """Only what is closed can be read."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / f"{name}.h5", "r") as file:
        assert list(file["data"]) == [1, 2] and "group" in file
    return all((folder / f"{name}-{kind}").read_text() == "text" for kind in ("atexit", "destructor"))


@METHODS
@pytest.mark.parametrize(
    "how", ["cell", "error", *(pytest.param(how, marks=pytest.mark.extended) for how in ("kept", "function"))]
)
def test_what_libraries_write_at_exit(with_library: Kernel, method: str, how: str) -> None:
    """h5py's files, and what a library of the user's own has for C's exit(3)."""
    name, kernel = f"{how}-{method}", with_library
    if how == "function":
        ok(kernel.execute(f"nbspawn.spawn(lambda rank: leave(f'{name}-{{rank}}'), nprocs=2, start_method='{method}')"))
    else:
        keep = "--keep" if how == "kept" else ""
        cell = f"%%spawn 2 -m {method} {keep}\nleave(f'{name}-{{rank}}')"
        reply = kernel.execute(cell + FAILING.format(name=name) * (how == "error"))
        assert (reply.ename == "RankRaisedError") == (how == "error"), str(reply)
        if keep:
            ok(kernel.execute("%ranks stop"))
    assert all(complete(kernel.folder, f"{name}-{rank}") for rank in range(2))


def test_libraries_that_need_others(with_library: Kernel) -> None:
    ok(with_library.execute("%%spawn 1\nimport ctypes\nctypes.CDLL('./libouter.so')"))
    assert (with_library.folder / "order").read_text() == "before what it needs"


def test_a_library_that_hangs_or_crashes_at_exit(with_library: Kernel) -> None:
    """The cell ends, and what has crashed is named."""
    ok(with_library.execute("%%spawn 1\nleave('hangs', 'hang')"))
    reply = with_library.execute("%%spawn 1\nleave('crashes', 'crash')")
    assert reply.ename == "RankExitedError" and "SIGABRT" in reply.evalue
    assert (with_library.folder / "hangs-destructor").exists()


def test_the_notebooks_hdf5_file(with_library: Kernel) -> None:
    """Forked ranks close theirs; the notebook's stays open, and nothing else keeps it locked."""
    ok(with_library.execute("import h5py\nfile = h5py.File('notebook.h5', 'w', libver='latest')\nfile['before'] = 1"))
    ok(with_library.execute("%%spawn 2 -m fork\nleave(f'beside-{rank}')"))
    ok(with_library.execute("%%spawn 2\npass"))
    ok(with_library.execute("file['after'] = 2\nfile.close()"))
    assert with_library.value("sorted(h5py.File('notebook.h5', 'r'))") == ["after", "before"]
    assert all(complete(with_library.folder, f"beside-{rank}") for rank in range(2))


# ---------------------------------------------------------------- what is the kernel's


def test_no_process_beside_the_kernel_keeps_its_files_open(own_kernel: Kernel) -> None:
    """Those of C code (HDF5) are for children, too, and stay locked as long as one has them."""
    lock = "import fcntl, os\nfd = os.open('locked', os.O_CREAT | os.O_RDWR)\n"
    ok(own_kernel.execute(f"{lock}os.set_inheritable(fd, True)\nfcntl.flock(fd, fcntl.LOCK_EX)\n%load_ext nbspawn"))
    ok(own_kernel.execute("%%spawn 2 -m fork\n1"))
    ok(own_kernel.execute("%%spawn 2\n1"))
    ok(own_kernel.execute(f"os.close(fd)\n{lock}fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)"))


def test_what_the_kernel_has_registered_for_its_own_end_is_not_the_ranks(own_kernel: Kernel) -> None:
    """Under fork a rank inherits it all. The notebook's files are not written a second time, either."""
    ok(
        own_kernel.execute(
            "import atexit, logging, logging.handlers, tempfile\nfrom pathlib import Path\n"
            "atexit.register(lambda: Path('atexit').open('a').write('one '))\n"
            "folder = tempfile.TemporaryDirectory(prefix='temporary', dir='.')\n"
            "memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler('log'))\n"
            "logging.getLogger('mine').addHandler(memory)\nlogging.getLogger('mine').warning('of the notebook')\n"
            "file = open('file', 'w', 1 << 16)\nhidden = [open('hidden', 'w')]\n"
            "_ = file.write('notebook '), hidden[0].write('notebook ')"
        )
    )
    ok(own_kernel.execute("%%spawn 2 -m fork\nfile.write('rank ')"))
    folder = own_kernel.folder
    assert (folder / "file").read_text() == "notebook rank rank "
    assert not (folder / "atexit").exists()
    assert (folder / "log").read_text() == "" and (folder / "hidden").read_text() == ""
    assert own_kernel.value("import os; os.path.isdir(folder.name)") is True
    ok(own_kernel.execute("_ = file.close(), hidden[0].close(), memory.flush()"))
    assert (folder / "file").read_text() == "notebook rank rank "
    assert (folder / "hidden").read_text() == "notebook "
    own_kernel.shutdown()
    wait_until(lambda: (folder / "atexit").exists(), "the kernel's own handler runs")
    assert (folder / "atexit").read_text() == "one "


@once
def test_files_of_the_notebook_stay_as_they_are_whatever_forked_ranks_look_at(
    kernel: Kernel, method: str, tmp_path: Path
) -> None:
    """To look at memory, or to follow a class that is defined anew, they look at all that they have inherited."""
    setup = f"""import tempfile
class Record:
    made = 1
record = Record()
log = open({str(tmp_path / "log")!r}, 'w')
log.write('a line\\n')
temporary = tempfile.NamedTemporaryFile()"""
    ok(kernel.execute(setup))
    ok(kernel.execute("%%spawn 2 --keep -m fork\nkept = record.made"))
    ok(kernel.execute("log.write('another\\n')"))
    ok(kernel.execute("%ranks memory"))
    ok(kernel.execute("class Record:\n    made = 2"))
    assert ok(kernel.execute("%%ranks --push Record\nrecord.made")).result == "[0-1] 2"
    ok(kernel.execute("%ranks stop"))
    assert kernel.value("__import__('os').path.exists(temporary.name)")
    ok(kernel.execute("log.close(); temporary.close()"))
    assert (tmp_path / "log").read_text() == "a line\nanother\n"


@pytest.mark.parametrize("end", ["shutdown", "restart", "reload"])
def test_kept_ranks_end_as_programs_do_when_their_kernel_ends(own_kernel: Kernel, tmp_path: Path, end: str) -> None:
    cell = f"""%%spawn 2 --keep
import atexit
kept = open({str(tmp_path)!r} + f'/file-{{rank}}', 'w')
kept.write('all of it')
atexit.register(lambda: open({str(tmp_path)!r} + f'/exit-{{rank}}', 'w').write('ran'));"""
    ok(own_kernel.execute(cell))
    if end == "reload":
        ok(own_kernel.execute("%reload_ext nbspawn"))
    elif end == "restart":
        own_kernel.restart()
    else:
        own_kernel.shutdown()
    assert [(tmp_path / f"file-{rank}").read_text() for rank in range(2)] == ["all of it"] * 2
    assert [(tmp_path / f"exit-{rank}").read_text() for rank in range(2)] == ["ran"] * 2
