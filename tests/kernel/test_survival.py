"""What the kernel's side survives: files, descriptors and helpers that are lost, foreign code that hangs or raises."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_functions as ranks
from kernels import IMPORTER, ExecutedKernel, Kernel, lives, ok, once, wait_gone, wait_until
from leftovers import marked_pids, until
from methods import SUPPORT

import nbspawn
from nbspawn._engine.kernel import descriptors, guardian
from nbspawn._engine.kernel.directories import OwnedDirectory, remove_stale
from nbspawn._engine.kernel.guardian_client import Guard, guard
from nbspawn._engine.run.channel import Hub
from nbspawn._engine.start import forkserver, start_contexts
from nbspawn._protocol.messages import Close, Event, Imported, Started
from nbspawn._rank.program.channel import Channel
from nbspawn._session.options import CommandOptions
from nbspawn._session.stop_policy import StopPolicy
from nbspawn._session.views import StreamView
from nbspawn._state.run import Run

both = pytest.mark.parametrize("method", ["fork", "forkserver"])
clean = pytest.mark.usefixtures("nothing_left")


DELETE = """\
import shutil as _shutil
from nbspawn._engine.kernel.directories import run_directories as _directories
_shutil.rmtree(_directories._root.path)
"""

# ---------------------------------------------------------------- directories that vanish


@both
def test_stop_reaches_kept_ranks_whose_directory_was_deleted(kernel: Kernel, method: str) -> None:
    """And what they were told to run is not taken for the next cell's."""
    ok(kernel.execute(f"%%spawn 2 -k -m {method} -b gloo\nimport time; x = 'kept'"))
    ok(kernel.execute(DELETE))
    cell = kernel.submit("%%ranks\nprint('begins')\ntime.sleep(60)\n'old'").until_ranks("begins", range(2))
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "time.sleep" not in reply.text(), reply
    assert "Something has deleted" in reply.table["text/plain"]
    assert ok(kernel.execute("%%ranks\nimport torch.distributed as dist; dist.barrier(); x")).result == "[0-1] 'kept'"
    ok(kernel.execute("%ranks stop"))


HOSTILE = """
class Nameless(type):
    @property
    def __name__(cls): raise RuntimeError("no name")
class A(Exception, metaclass=Nameless): pass
class B(Exception):
    @property
    def __traceback__(self): raise RuntimeError("no traceback")
"""


@once
def test_an_error_whose_class_raises_at_any_attribute_is_the_error(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(f"%%spawn 2 -k -m {method}{HOSTILE}"))
    for name in "AB":
        reply = kernel.execute(f"%%ranks\nif rank == 1: raise {name}('the real error')")
        assert reply.ename == "RankRaisedError" and "the real error" in reply.evalue and "(line 2)" in reply.evalue
    assert ok(kernel.execute("%%ranks\nrank")).result == "[0] 0\n[1] 1"
    ok(kernel.execute("%ranks stop"))


UNABLE = """\
def _unable(*args, _real=dist.FileStore):
    dist.FileStore = _real
    raise OSError("no room")
dist.FileStore = _unable
"""


@once
def test_a_group_that_cannot_be_made_anew_costs_no_variables(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(f"%%spawn 2 -k -m {method} -b gloo\nimport time, torch, torch.distributed as dist; x = 'kept'"))
    cell = kernel.submit(f"%%ranks\n{UNABLE}print('begins')\ntime.sleep(60)").until_ranks("begins", range(2))
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    reply = kernel.execute("%%ranks\nx")
    message = " of 2: RuntimeError: the process group could not be created again: OSError: no room"
    assert message in reply.traceback
    assert (
        ok(kernel.execute("%%ranks\nt = torch.ones(1); dist.all_reduce(t); x, t.item()")).result
        == "[0-1] ('kept', 2.0)"
    )
    ok(kernel.execute("%ranks stop"))


def test_a_run_whose_directory_was_deleted_ends_as_others_and_so_does_the_next(kernel: Kernel) -> None:
    shown = kernel.folder / "told"
    body = f"""%%spawn 2
import pathlib, time
try:
    print("begins"); time.sleep(60)
finally:
    pathlib.Path({str(shown)!r} + str(rank)).touch()"""
    cell = kernel.submit(body).until_ranks("begins", range(2))
    (lifeline,) = opened(kernel.pid, "/lifeline")
    shutil.rmtree(Path(lifeline).parent.parent)
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", reply
    assert Path(f"{shown}0").exists() and Path(f"{shown}1").exists()
    assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"


def opened(pid: int, ending: str) -> set[str]:
    """The files with such names that a process holds open."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {path for path in found if path.endswith(ending)}


@both
def test_a_ranks_own_error_is_told_though_its_directory_was_deleted(kernel: Kernel, method: str) -> None:
    begun = kernel.folder / f"begun-{method}"
    body = f"""%%spawn 2 -m {method}
import os, shutil, time
if rank == 0:
    while not os.path.exists({str(begun)!r}):
        time.sleep(0.01)
    shutil.rmtree(os.environ["NBSPAWN_RUN"])
    raise ValueError("the real one")
open({str(begun)!r}, "w").close()
time.sleep(60)"""
    reply = kernel.execute(body)
    assert reply.evalue.startswith("rank 0 of 2: ValueError: the real one"), reply
    assert "were deleted" in reply.traceback
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\nrank")).result == "[0] 0\n[1] 1"


@clean
def test_a_cleaner_of_old_files_finds_the_directory_locked() -> None:
    """systemd-tmpfiles spares a directory for that, however old it is."""
    owned = OwnedDirectory("runs")
    fd = os.open(owned.path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    owned.remove()


def test_a_deleted_directory_of_the_fork_server(kernel: Kernel) -> None:
    ok(
        kernel.execute(
            "from nbspawn._engine.start.forkserver import server\nimport shutil\nshutil.rmtree(server._directory.path)"
        )
    )
    reply = ok(kernel.execute("%%spawn 2 -m forkserver\nrank"))
    assert reply.result == "[0] 0\n[1] 1"
    assert "fork server ·" in reply.table["text/plain"], "the importer forks another one at once"


@clean
def test_only_what_nbspawn_has_made_is_swept(workplace: str) -> None:
    theirs = Path(workplace, "nbspawn-notes")
    theirs.mkdir()
    (theirs / "owner").write_text("me")
    (theirs / "thesis").write_text("text")
    text = "from nbspawn._engine.kernel import directories; import os; print(directories.OwnedDirectory('runs').path)\n"
    text += "os._exit(0)"
    left = Path(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.strip())
    copied = Path(shutil.copytree(left, f"{workplace}/nbspawn-runs-copied"))
    remove_stale()
    assert not left.exists()
    assert (theirs / "thesis").exists() and copied.exists()
    shutil.rmtree(theirs)
    shutil.rmtree(copied)


# ---------------------------------------------------------------- an exception out of the loop


class Broken(StreamView):
    """Raises when a rank has printed."""

    def show(self, run: Run, events: Any) -> None:
        super().show(run, events)
        if any(rank.line for rank in run.ranks):
            raise RuntimeError("the view is broken")


@clean
@both
def test_ranks_that_cannot_be_shown_run_on(method: str) -> None:
    with nbspawn.Session(2, start_method=method) as session:
        session._pool.command_options = CommandOptions(view=Broken())
        assert list(session.execute("import time; print('begins'); time.sleep(0.5); 'new'")) == ["new"] * 2


@clean
@both
def test_ranks_that_nobody_watches_any_more_are_stopped(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they were doing is not the next command's value."""

    def broken(policy: Any, *_: Any) -> None:
        raise RuntimeError("a bug of ours")

    with nbspawn.Session(2, start_method=method) as session:
        session.execute("import time; x = 1")
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug of ours"):
            patch.setattr(StopPolicy, "decide", broken)
            session.execute("print('begins'); time.sleep(60); 'old'")
        assert list(session.execute("x")) == [1, 1]


# ---------------------------------------------------------------- logs


@clean
def test_two_runs_do_not_write_to_the_same_logs(tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    with nbspawn.Session(1, log_dir=logs) as session:
        session.execute("print('first')")
        with pytest.raises(nbspawn.UsageError, match="other ranks, which live, write their logs to"):
            nbspawn.spawn(ranks.succeed, log_dir=logs)
        session.execute("print('second')")
        assert Path(logs, "rank-0.log").read_text() == "first\nsecond\n"
    nbspawn.spawn(ranks.succeed, log_dir=logs)


@clean
@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "hard link", "stranger's"])
def test_what_lies_under_a_logs_name_is_not_touched(tmp_path: Path, kind: str) -> None:
    log, other = tmp_path / "rank-0.log", tmp_path / "precious"
    other.write_text("text")
    if kind == "link":
        log.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(log)
    elif kind == "directory":
        log.mkdir()
    elif kind == "hard link":
        os.link(other, log)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can make a file of another user")
        log.write_text("text")
        os.chown(log, 65534, 65534)
    with pytest.raises(nbspawn.UsageError, match="no logs can be written to .*: .*rank-0.log|Is a directory") as caught:
        nbspawn.spawn(ranks.succeed, log_dir=str(tmp_path))
    assert "Give --log-dir" in str(caught.value)
    assert other.read_text() == "text"


@clean
@both
@pytest.mark.parametrize("how", ["python", "c"])
def test_output_that_has_no_room_is_an_error(method: str, how: str) -> None:
    with pytest.raises(nbspawn.RankRaisedError, match="could not be written to its log: ") as caught:
        nbspawn.spawn(ranks.print_beyond_the_limit, (how,), 2, start_method=method)
    assert caught.value.rank == 0


# ---------------------------------------------------------------- descriptors


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    taken = []
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def waiting(folder: Path, value: object, method: str, nprocs: int = 2) -> Any:
    """Ranks that have started, and return the value when there is a file ``go``."""
    given = str(folder / "go"), value
    context: Any = nbspawn.spawn(ranks.wait_for_file, given, nprocs, start_method=method, join=False)
    assert until(lambda: context.poll(0.05) is not None and len(context._exits.at_work(())) == nprocs)
    return context


def test_a_start_that_finds_no_room_says_where_and_leaves_nothing() -> None:
    folder = tempfile.mkdtemp(prefix="nbt-", dir="/tmp")  # short, so that it is used
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "test", folder], capture_output=True).returncode:
        os.rmdir(folder)
        pytest.skip("only root may mount")
    text = """
import os, sys, nbspawn, rank_functions as ranks
if __name__ == "__main__":
    nbspawn.spawn(ranks.succeed, start_method="fork")
    try:
        with open(os.environ["TMPDIR"] + "/filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        pass
    try:
        nbspawn.spawn(ranks.succeed, start_method="fork")
    except nbspawn.StartError as error:
        print(error)
"""
    env = {**os.environ, "TMPDIR": folder, "PYTHONPATH": SUPPORT}
    try:
        ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=150, env=env)
        left = os.listdir(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        os.rmdir(folder)
    shown = f"No space left on device in {folder!r}. Make room there, or start the kernel with another TMPDIR."
    assert shown in ran.stdout and left == ["filler"], (left, ran.stdout + ran.stderr)


@clean
@both
def test_a_run_goes_on_while_the_kernel_has_no_descriptor_left(tmp_path: Path, method: str) -> None:
    context = waiting(tmp_path, 5, method)
    with no_descriptor_left():
        for _ in range(3):
            context.poll(0.1)
        assert not context.failures
    (tmp_path / "go").touch()
    assert context.join(30)
    assert list(context.results()) == [5, 5]


@clean
@both
def test_a_value_that_cannot_be_received_names_its_rank(tmp_path: Path, method: str) -> None:
    context = waiting(tmp_path, None, method, nprocs=1)
    (tmp_path / "ready").touch()
    with no_descriptor_left():
        (tmp_path / "ready").rename(tmp_path / "go")
        assert until(lambda: context.poll(0.05) is not None and context._command.outcomes.reported)
    assert context.join(30)
    with pytest.raises(nbspawn.PayloadError, match="rank 0: .* MB could not be received by the kernel: Too many open"):
        context.results()[0]


# ---------------------------------------------------------------- helpers that end


@clean
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_survive_their_fork_server(tmp_path: Path, number: signal.Signals) -> None:
    context = waiting(tmp_path, 7, "forkserver")
    server = forkserver.server._current.pid
    os.kill(server, number)
    (tmp_path / "go").touch()
    assert context.join(30)
    assert list(context.results()) == [7, 7]
    if number == signal.SIGKILL:
        assert "the fork server was killed" in "".join(context.losses())
    assert list(nbspawn.spawn(ranks.add, (1, 2), 2, start_method="forkserver")) == [3, 3]
    assert forkserver.server._current.pid != server
    assert until(lambda: not lives(server))


@clean
def test_a_rank_that_dies_without_its_fork_server_is_told(tmp_path: Path) -> None:
    context = waiting(tmp_path, 7, "forkserver")
    os.kill(forkserver.server._current.pid, signal.SIGKILL)
    os.kill(context._exits.pid(1), signal.SIGKILL)
    with pytest.raises(nbspawn.RankExitedError, match="rank 1 of 2: process 1 exited, exit code unknown"):
        while not context.join(1):
            pass
    forkserver.server.get()


def kernel_server(kernel: Kernel) -> int:
    """The pid of its fork server."""
    for child in psutil.Process(kernel.pid).children():
        with suppress(psutil.ZombieProcess):
            if IMPORTER in " ".join(child.cmdline()):
                return child.children()[0].pid
    raise AssertionError("the kernel has no fork server")


@once
def test_stop_while_the_fork_server_is_stopped(kernel: Kernel, method: str) -> None:
    body = "import time; print('begins')\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass"
    cell = kernel.submit(f"%%spawn 2\n{body}").until_ranks("begins", range(2))
    os.kill(kernel_server(kernel), signal.SIGSTOP)
    kernel.interrupt()
    cell.see(lambda: "stopping" in cell.reply.table["text/plain"], "the first is heard")
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"


def start_in_frozen_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank that was handed to a fork server which froze before it read that. It would never end."""
    nbspawn.spawn(ranks.succeed, start_method="forkserver")
    frozen = forkserver.server._current.pid
    give = start_contexts.prepared

    def freeze(*args: Any, **kwargs: Any) -> bytes:
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(frozen).status() == psutil.STATUS_STOPPED, "the signal has arrived")
        return give(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(start_contexts, "prepared", freeze)
        return nbspawn.spawn(ranks.wait_for_file, ("/never", 0), start_method="forkserver", join=False)


@clean
def test_stop_ends_ranks_that_a_frozen_fork_server_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: no signal can reach them, and no grace period is of use to them."""
    context = start_in_frozen_server(monkeypatch)
    assert not context.join(0)
    context.interrupt()
    with pytest.raises(nbspawn.RankExitedError, match="the fork server was killed"):
        assert context.join(30)
    forkserver.server.get()


@clean
def test_a_kill_reaches_a_rank_whose_fork_server_wakes_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was not known when the others were killed."""
    context = start_in_frozen_server(monkeypatch)
    frozen = forkserver.server._current.pid
    context._signal(signal.SIGKILL)
    os.kill(frozen, signal.SIGCONT)
    with pytest.raises(nbspawn.RankExitedError, match="SIGKILL"):
        assert context.join(30)


@clean
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_guardian_is_started_again(number: signal.Signals) -> None:
    nbspawn.spawn(ranks.succeed, start_method="fork")
    pid = guard.pid
    assert pid is not None
    os.kill(pid, number)
    assert until(lambda: not lives(pid) or psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    nbspawn.spawn(ranks.succeed, start_method="fork")
    assert guard.pid not in (pid, None) and not lives(pid)


@clean
def test_the_guardian_is_started_again_while_ranks_run(tmp_path: Path) -> None:
    """If the kernel died later in the same run, nobody else would end what the ranks leave behind."""
    context = waiting(tmp_path, 7, "fork")
    pid = guard.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: context.poll(0.05) is not None and guard.pid != pid)
    (tmp_path / "go").touch()
    assert context.join(30)


def test_the_guardian_serves_several_threads(tmp_path: Path) -> None:
    own = Guard()

    def begin_and_end(thread: int) -> None:
        for number in range(8):
            run = tmp_path / f"{thread}-{number}"
            own.begin(run)
            assert own.pid is not None
            with suppress(ProcessLookupError):  # another thread has started it again
                os.kill(own.pid, signal.SIGSTOP)
            own.end(run)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(begin_and_end, range(4)))
    assert own.pid is not None
    descriptors.close(own._pipe)
    os.kill(own.pid, signal.SIGKILL)
    os.waitpid(own.pid, 0)


@clean
def test_a_guardian_that_was_stopped_does_not_spare_what_ranks_leave_behind() -> None:
    nbspawn.spawn(ranks.succeed, start_method="fork")
    (child,) = nbspawn.spawn(ranks.leave_a_child_and_stop, (guard.pid,), start_method="fork")
    assert until(lambda: not lives(child))


@clean
@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("ignored", "fork"),
        pytest.param("ignored", "spawn", marks=pytest.mark.extended),
        ("waited for", "fork"),
        pytest.param("waited for", "forkserver", marks=pytest.mark.extended),
    ],
)
def test_children_whose_end_this_process_is_not_told(how: str, method: str) -> None:
    """Values and errors come over the channel; exit codes are lost."""
    text = f"""
import os, signal, threading, time
import nbspawn, rank_functions as ranks
if __name__ == "__main__":
    if {how!r} == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        def bury():
            while True:
                try: os.waitpid(-1, 0)
                except ChildProcessError: time.sleep(0.001)
        threading.Thread(target=bury, daemon=True).start()
    print(list(nbspawn.spawn(ranks.add, (1, 2), 2, start_method={method!r})))
    try: nbspawn.spawn(ranks.os_exit, (7,), 1, start_method={method!r})
    except nbspawn.RankExitedError as error: print(str(error).splitlines()[0])
"""
    env = {**os.environ, "PYTHONPATH": SUPPORT}
    script = Path(tempfile.mkdtemp()) / "script.py"
    script.write_text(text)
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=env, check=False)
    shutil.rmtree(script.parent)
    assert shown.stdout.startswith("[3, 3]\n"), shown
    end = "process 0 (exited, exit code unknown|terminated with exit code 7)"
    assert re.search(f"^rank 0 of 1: {end}", shown.stdout, re.MULTILINE), shown


# ---------------------------------------------------------------- foreign code


HANGS = """\
class Hangs:
    def __repr__(self):
        import time
        time.sleep(1000)
"""


PRESS = """
import os, signal, sys, threading, time
def _press():
    while "torch.nn" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=_press, daemon=True).start()"""


@pytest.mark.parametrize(
    "cell", ["%%spawn 2\nrank", pytest.param("import nbspawn\nnbspawn.spawn(print)", marks=pytest.mark.extended)]
)
def test_stop_does_not_spoil_the_import_of_torch(tmp_path: Path, cell: str) -> None:
    with ExecutedKernel(tmp_path) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute(PRESS))
        reply = kernel.execute(cell)
        assert reply.ename == "KeyboardInterrupt", reply
        assert reply.traceback == "KeyboardInterrupt: nothing was started: torch was being imported."
        assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"


@both
def test_stop_ends_a_repr_that_does_not_return(kernel: Kernel, method: str) -> None:
    cell = kernel.submit(f"%%spawn 2 -m {method}\n{HANGS}print('made')\nHangs()").until_ranks("made", range(2))
    wait_until(lambda: len(kernel.ranks()) >= 2, "ranks run")
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt", reply


@once
def test_what_unpickles_in_the_kernel_does_so_where_it_is_asked_for(kernel: Kernel, method: str) -> None:
    """A value is neither loaded nor asked for its repr while ranks are watched."""
    body = """%%spawn 2 -o values
class Nasty:
    def __reduce__(self):
        return eval, ("(_ for _ in ()).throw(KeyboardInterrupt('in the kernel'))",)
    def __repr__(self):
        return "nasty"
Nasty()"""
    ok(kernel.execute(body))
    assert ok(kernel.execute("values")).result == "[0-1] nasty"
    assert kernel.execute("values[0]").evalue == "in the kernel"


@once
def test_stop_ends_packing_that_does_not_return(kernel: Kernel, method: str) -> None:
    slow = "class Slow:\n    def __reduce__(self):\n        print('packed')\n        import time; time.sleep(1000)"
    ok(kernel.execute(f"{slow}\nslow = Slow()"))
    cell = kernel.submit("%%spawn 2\nslow").until("packed")
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "nothing was started" in reply.traceback
    ok(kernel.execute("del slow, Slow"))


@both
def test_an_exception_of_megabytes_fits_into_the_notebook(kernel: Kernel, method: str) -> None:
    reply = kernel.execute(f"%%spawn 2 -m {method}\nraise ValueError('x' * 5_000_000)")
    assert reply.ename == "RankRaisedError" and "characters are left out" in reply.traceback
    assert reply.sent + len(reply.coloured) < 200_000
    reply = kernel.execute(f"%%spawn 1 -m {method}\nimport sys; sys.exit('x' * 5_000_000)")
    assert reply.ename == "RankExitedError" and reply.sent + len(reply.coloured) < 200_000


BROKEN_STREAM = """\
import sys
class Broken:
    def write(self, text): sys.__stdout__.write(text)
    def flush(self): raise RuntimeError("no flush")
sys.stdout = Broken()
"""
CLOSE_ALL = "import os; os.closerange(3, os.sysconf('SC_OPEN_MAX'))\n"


@both
@pytest.mark.parametrize("statement", [BROKEN_STREAM, "import os; os.close(1)\n", CLOSE_ALL], ids=["0", "1", "2"])
def test_what_a_cell_does_to_its_streams_and_descriptors_is_its_own_matter(
    kernel: Kernel, method: str, statement: str
) -> None:
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\n{statement}rank")).result == "[0] 0\n[1] 1"
    reply = kernel.execute(f"%%spawn 2 -m {method}\n{statement}1 / 0")
    assert "ZeroDivisionError" in reply.evalue, reply


@both
def test_kept_ranks_that_closed_every_descriptor_run_on(kernel: Kernel, method: str, tmp_path: Path) -> None:
    ok(kernel.execute(f"%%spawn 2 -k -m {method}\n{CLOSE_ALL}x = rank"))
    reply = ok(kernel.execute("%%ranks\nprint('said'); x"))
    assert reply.result == "[0] 0\n[1] 1" and reply.of(0) == reply.of(1) == ["said"]
    cell = kernel.submit(f"%%ranks\nimport time; open({str(tmp_path / 'begun')!r}, 'w').close(); time.sleep(100)")
    wait_until((tmp_path / "begun").exists, "it begins")
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert ok(kernel.execute("%%ranks\nx")).result == "[0] 0\n[1] 1"
    ok(kernel.execute("%ranks stop"))


def test_what_a_rank_has_said_on_its_old_connection_comes_first(tmp_path: Path) -> None:
    """It was over, and had connected again, before the kernel looked: whichever of both is heard first."""
    with selectors.DefaultSelector() as selector:
        hub = Hub(tmp_path / "socket", 1, selector)
        heard: list[Event] = []
        hub.on_message = lambda event, turn: heard.append(event)
        said = [Started(0, 1, 0.0), Imported(0, ("a",)), Imported(0, ("b",))]
        channel = Channel(tmp_path / "socket")
        channel.send(said[0])
        os.close(channel._socket.fileno())
        for event in said[1:]:
            channel.send(event)
        hub._accept()
        for connection in reversed(hub._unidentified):
            connection.read()
        hub.send(0, Close())
        assert heard == said and isinstance(channel.receive(), Close)
        hub.close()
        channel.close()


# ---------------------------------------------------------------- ranks and their kernel


@both
def test_ranks_that_closed_every_descriptor_end_with_the_kernel(
    own_kernel: Kernel, method: str, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    body = f"""%%spawn 2 -m {method}
import os, pathlib, time
os.closerange(3, os.sysconf("SC_OPEN_MAX"))
pathlib.Path({str(marks)!r}, f"pids-{{rank}}").write_text(str(os.getpid()))
time.sleep(1000)"""
    own_kernel.submit(body)
    pids = wait_until(lambda: len(found := marked_pids(marks)) == 2 and found, "both have told")
    own_kernel.kill()
    wait_gone(pids)


def test_a_rank_that_the_kernel_never_heard_of_ends_with_it(own_kernel: Kernel, tmp_path: Path) -> None:
    """The kernel is stopped when it has forked the rank, which closes every descriptor, and is then killed."""
    ok(
        own_kernel.execute(f"""import os, signal, traceback
def stop_the_kernel():
    if "popen_fork.py" in str(traceback.extract_stack()):  # not in the one that tries fork (start/fork_safety.py)
        os.kill({own_kernel.pid}, signal.SIGSTOP)
os.register_at_fork(after_in_child=stop_the_kernel)""")
    )
    own_kernel.submit(f"""%%spawn 1 -m fork
import os, pathlib, time
os.closerange(3, os.sysconf("SC_OPEN_MAX"))
pathlib.Path({str(tmp_path)!r}, "pids-0").write_text(str(os.getpid()))
time.sleep(1000)""")
    pids = wait_until(lambda: marked_pids(tmp_path), "it has told")
    own_kernel.kill()
    wait_gone(pids)


@once
def test_when_memory_runs_out_ranks_go_first(kernel: Kernel, method: str) -> None:
    score = "int(open('/proc/self/oom_score_adj').read())"
    mine = kernel.value(score)
    for method in ("fork", "forkserver", "spawn"):
        assert ok(kernel.execute(f"%%spawn 1 -m {method}\n{score}")).result == f"[0] {max(mine, 1000)}"
    assert int(Path(f"/proc/{kernel_server(kernel)}/oom_score_adj").read_text()) > mine


@clean
def test_a_temp_directory_with_a_newline(tmp_path: Path) -> None:
    odd = tmp_path / "a\nb"
    odd.mkdir()
    run = f"nbspawn.spawn(ranks.leave_child, {(str(tmp_path),)}, 2)"
    text = f"import nbspawn, rank_functions as ranks\nif __name__ == '__main__': {run}"
    env = {**os.environ, "TMPDIR": str(odd), "PYTHONPATH": SUPPORT}
    subprocess.run([sys.executable, "-c", text], env=env, check=True, timeout=120)
    children = [int(path.read_text()) for path in tmp_path.glob("child-*")]
    assert len(children) == 2
    wait_gone(children)
    assert not os.listdir(odd)


@both
def test_runs_of_ranks_leave_nothing(kernel: Kernel, method: str) -> None:
    before = ours()
    body = f"""%%spawn 2 -m {method}
import nbspawn
def add(rank, a, b): return a + b
sum(nbspawn.spawn(add, (1, 2), 2, start_method="forkserver"))"""
    assert ok(kernel.execute(body)).result == "[0-1] 6"
    wait_until(lambda: not ours() - before, "nothing is left")


def ours() -> set[str]:
    """What nbspawn and multiprocessing have made in the temp directory."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("nbspawn-", "pymp-"))}


LISTEN = """\
import io, logging
heard = io.StringIO()
listener = logging.StreamHandler(heard)
logging.getLogger("nbspawn").addHandler(listener)
logging.getLogger("nbspawn").setLevel("DEBUG")"""


def test_what_nbspawn_logs(kernel: Kernel) -> None:
    """Nothing, unless somebody listens."""
    assert not kernel.execute("%%spawn 2\nrank").text("stderr")
    ok(kernel.execute(LISTEN))
    kernel.execute("%%spawn 2 -g 0.5\nif rank == 1: 1/0\nimport time; time.sleep(100)")
    heard = kernel.value("heard.getvalue()")
    ok(kernel.execute("logger = logging.getLogger('nbspawn'); logger.removeHandler(listener); logger.setLevel(0)"))
    said = (
        "begins",
        "2 ranks start",
        "rank 1 has started: pid",
        "rank 1, command 1: Raised",
        "rank 0 gets SIGINT",
        "ended",
    )
    assert [what for what in said if what not in heard] == [], heard


# ---------------------------------------------------------------- what a second attack found


@clean
@both
def test_c_output_that_the_cell_has_closed_is_its_own_matter(method: str) -> None:
    """The mark of a failed write stays in C's stdout, and would fail every later command."""
    lost = "import os, ctypes\nc = ctypes.CDLL(None)\nsaved = os.dup(1)\nos.close(1)\nc.puts(b'x')\nc.fflush(None)\n"
    with nbspawn.Session(2, start_method=method) as session:
        assert list(session.execute(lost + "rank")) == [0, 1]
        session.execute("os.dup2(saved, 1)")
        assert list(session.execute("c.puts(b'seen')\nrank")) == [0, 1]
        assert "seen" in Path(session.log_path(0)).read_text()


LAZY = """class Lazy:
    asked = []
    @property
    def __class__(self):
        Lazy.asked.append("class")
        return Lazy
    @property
    def __dict__(self):
        Lazy.asked.append("dict")
        return {}
lazy = Lazy()
"""


@both
def test_a_proxy_in_the_notebook_is_not_asked_what_it_is(kernel: Kernel, method: str) -> None:
    """It may connect to a database first, and Stop does not reach it there."""
    ok(kernel.execute(LAZY))
    ok(kernel.execute(f"%%spawn 2 -m {method}\nrank"))
    assert kernel.value("Lazy.asked") == []


def test_a_forked_cell_that_uses_a_proxy_does_not_ask_it_before(kernel: Kernel) -> None:
    ok(kernel.execute(LAZY))
    ok(kernel.execute("%%spawn 2 -m fork\nid(lazy)"))
    assert kernel.value("Lazy.asked") == []


@clean
@both
def test_names_of_a_class_of_str_cost_no_ranks(method: str) -> None:
    """The kernel loads nothing but nbspawn's own messages."""
    with nbspawn.Session(2, start_method=method) as session:
        session.execute("class S(str): pass\nkept = rank\nimport time")
        with pytest.raises(nbspawn.RankRaisedError, match="Odd: m"):
            session.execute("raise type(S('Odd'), (Exception,), {})('m')")
        session.execute("exec(compile('for i in range(15): time.sleep(.1)', S('abc'), 'exec'))")
        with pytest.raises(nbspawn.RankRaisedError) as caught:
            session.execute("raise type('N' * 100_000, (Exception,), {})('m')")
        assert len(str(caught.value)) < 30_000
        assert list(session.execute("kept")) == [0, 1]


@clean
@both
def test_no_standard_streams_at_all(method: str) -> None:
    def lose_streams(rank: int) -> int:
        del sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__
        return rank

    with nbspawn.Session(2, start_method=method) as session:
        assert list(session.run(lose_streams)) == [0, 1]
        assert list(session.run(ranks.square)) == [0, 1]


def test_a_process_is_not_taken_for_ended_for_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    since = guardian.started_at(os.getpid())
    assert guardian.is_alive(os.getpid(), since) and not guardian.is_alive(os.getpid(), "1")

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", none_left)
    monkeypatch.setattr("os.open", none_left)
    assert guardian.is_alive(os.getpid(), since)


def test_the_fork_server_is_not_replaced_after_every_cell(kernel: Kernel) -> None:
    """Where nothing is preloaded, as in these tests."""
    pid = "from nbspawn._engine.start.forkserver import server\nserver._current.pid"
    first = kernel.value(pid)
    for _ in range(3):
        ok(kernel.execute("%%spawn 1\nrank"))
    assert kernel.value(pid) == first


@clean
def test_what_cannot_be_is_one_sentence() -> None:
    for options, match in (
        ({"log_dir": "~nobody-of-this-name/x"}, "is no directory"),
        ({"log_dir": "a\0b"}, "is no directory"),
        ({"threads": 10**20}, "threads must be between 1 and 4096"),
        ({"env": {"NBSPAWN_RUN": "x"}}, "is set by nbspawn itself"),
    ):
        with pytest.raises(nbspawn.UsageError, match=match):
            nbspawn.spawn(ranks.square, nprocs=1, **options)  # type: ignore[call-overload]
