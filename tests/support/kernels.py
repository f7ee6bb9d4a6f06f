"""Drives a real kernel as a front end does: sends cells, folds what comes back into a notebook's outputs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import IPython
import psutil
import pytest
import zmq
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from methods import PATIENCE
from provisioner import NAME

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Without colours."""
    return _ESCAPE.sub("", text)


def wait_until(happened: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
    """Look again and again, for at most ``timeout`` seconds; returns what ``happened`` gave."""
    end = time.monotonic() + timeout
    while not (result := happened()):
        assert time.monotonic() < end, f"waited {timeout} s in vain: {what}"
        time.sleep(0.01)
    return result


def lives(pid: int) -> bool:
    """Is the process there, and no zombie?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: Sequence[int], seconds: float = PATIENCE) -> None:
    """Assert that the processes end within ``seconds``."""
    wait_until(lambda: not any(map(lives, pids)), f"processes {[pid for pid in pids if lives(pid)]} end", seconds)


IMPORTER = "nbspawn._server.preload"
"""In the command line of the process that forks the fork servers, and in theirs."""


def ranks_of(pid: int) -> list[psutil.Process]:
    """What lives of this process's descendants, but for agents, the fork server, the guardian and the like."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if IMPORTER in command:
                found += [rank for server in child.children() for rank in server.children(recursive=True)]
            elif "nbspawn._agent" in command:
                found += ranks_of(child.pid)
            elif "multiprocessing.resource_tracker" not in command and "_engine/kernel/guardian.py" not in command:
                found += [child, *child.children(recursive=True)]
    return [process for process in found if lives(process.pid)]


def stacks(pid: int) -> str:
    """Where a process's threads are, for a test that has waited in vain; '' in an environment without py-spy."""
    program = Path(sys.executable).with_name("py-spy")
    if not program.exists():
        return ""
    dumped = subprocess.run([program, "dump", "--pid", str(pid)], capture_output=True, text=True)
    return dumped.stdout + dumped.stderr


@dataclass
class Reply:
    """What one cell left behind. ``saved`` are the outputs of the saved notebook, in order, consecutive text merged."""

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    """Without colours."""
    coloured: str = ""
    """The traceback with colours."""
    saved: list[dict[str, Any]] = field(default_factory=list, repr=False)
    displays: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """Of the whole notebook, by display id: the output, in its last state."""
    prompts: list[tuple[str, bool]] = field(default_factory=list)
    """What was asked, and whether as a password."""
    sent: int = 0
    """Bytes of text and displays that went over the wire."""
    updates: int = 0
    """How often displays were updated."""
    payload: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    _clear: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        shown = [output for output in self.saved if "text" not in output]
        parts = self.status, self.text()[-3000:], self.text("stderr")[-3000:], self.traceback, f"Shown: {shown}"[:3000]
        return "\n".join(parts)

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Those that show something: the place of the controls is empty."""
        return [output for output in self.saved if output.get("data", True)]

    def text(self, name: str = "stdout") -> str:
        """All that was printed."""
        return "".join(output["text"] for output in self.outputs if output["type"] == name)

    @property
    def lines(self) -> list[str]:
        """The printed lines, the note "↓" before a display left out."""
        return [line for line in self.text().splitlines() if not line.endswith("↓")]

    def of(self, rank: int) -> list[str]:
        """What one rank printed, alone or together with others, without the mark."""
        found = []
        for line in self.lines:
            marked = re.match(r"\[([\d,-]+)\] *(.*)", line, re.DOTALL)
            if marked and rank in ranks_in(marked[1]):
                found.append(marked[2])
        return found

    @property
    def table(self) -> dict[str, str]:
        """The mime bundle of the cell's first output."""
        return self.outputs[0]["data"]

    @property
    def shown(self) -> list[dict[str, str]]:
        """The mime bundles that ranks displayed: all but the table, and but the empty ones."""
        rich = [output for output in self.outputs if output["type"] == "display_data"]
        return [output["data"] for output in rich[1:] if output["data"]]

    @property
    def stacks(self) -> list[dict[str, str]]:
        """The mime bundles that say where ranks stand."""
        return [data for data in self.shown if data.get("text/plain", "").startswith("Where the ranks stand")]

    @property
    def result(self) -> str:
        """The text of Out[n]."""
        return "".join(output["data"]["text/plain"] for output in self.outputs if output["type"] == "execute_result")

    def fold(self, kind: str, content: dict[str, Any]) -> None:
        """One message of the kernel."""
        if kind == "clear_output":
            self._clear = True
            if not content["wait"]:
                self._clear_now()
        elif kind == "stream":
            self._clear_now()
            self.sent += len(content["text"].encode())
            if self.saved and self.saved[-1]["type"] == content["name"]:
                self.saved[-1]["text"] += content["text"]
            else:
                self.saved.append({"type": content["name"], "text": content["text"]})
        elif kind in ("display_data", "execute_result"):
            self._clear_now()
            self.sent += len(str(content["data"]))
            output = {"type": kind, "data": content["data"], "metadata": content["metadata"]}
            self.saved.append(output)
            if name := content.get("transient", {}).get("display_id"):
                self.displays[name] = output
        elif kind == "update_display_data":
            self.updates += 1
            self.sent += len(str(content["data"]))
            name = content["transient"]["display_id"]
            if name in self.displays:
                self.displays[name].update(data=content["data"], metadata=content["metadata"])
        elif kind == "error":
            self.ename, self.evalue = content["ename"], content["evalue"]
            self.coloured = "\n".join(content["traceback"])
            self.traceback = plain(self.coloured)
            self.saved.append({"type": "error", **content})

    def _clear_now(self) -> None:
        if self._clear:
            self.saved.clear()
            self._clear = False


def ranks_in(ranges: str) -> set[int]:
    """The ranks of a mark: ``0,2-3`` of ``[0,2-3] line``."""
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def who_said(text: str, line: str) -> set[int]:
    """The ranks that have printed this line, alone or together: equal lines are merged only while the view buffers."""
    return set().union(*map(ranks_in, re.findall(rf"\[([\d,-]+)\] *{re.escape(line)}\b", text)))


class Cell:
    """A cell that has been sent. ``reply`` grows while messages are read, by ``until`` and ``wait``."""

    def __init__(self, kernel: Kernel, message: str, answers: Sequence[str]) -> None:
        self.reply = Reply(displays=kernel.displays)
        self._kernel = kernel
        self._message = message
        self._answers = list(answers)
        self._idle = False
        self._replied = False
        self._sent_at = time.monotonic()
        kernel.cells[message] = self

    @property
    def over(self) -> bool:
        return self._idle and self._replied

    def until(self, text: str, times: int = 1, timeout: float = PATIENCE) -> Cell:
        """Read messages until ``text`` has been printed so often."""
        self.read_until(lambda: self.reply.text().count(text) >= times, f"{text!r} is printed {times} times", timeout)
        return self

    def until_ranks(self, text: str, ranks: Iterable[int]) -> Cell:
        """Read messages until each of these ranks has printed this line."""
        waiting = set(ranks)
        self.read_until(
            lambda: all(text in self.reply.of(rank) for rank in waiting), f"{text!r} of {waiting}", PATIENCE
        )
        return self

    def asked(self, count: int = 1, timeout: float = PATIENCE) -> Cell:
        """Read messages until so many questions have come, and what was printed before them."""
        self.read_until(lambda: len(self.reply.prompts) >= count, f"{count} prompts", timeout)
        self.catch_up()
        return self

    def catch_up(self) -> None:
        """Read all that was printed by now. A question may overtake that, since it comes over another socket; the
        status of another request comes behind it, over the same."""
        other = self._kernel.ask_for_info()
        self.read_until(lambda: other._idle, "what was printed by now", PATIENCE, after=True)

    def wait(self, timeout: float = PATIENCE) -> Reply:
        """Read messages to the cell's end."""
        self.read_until(lambda: self.over, "the cell ends", timeout)
        self.reply.seconds = time.monotonic() - self._sent_at
        return self.reply

    def see(self, happened: Callable[[], Any], what: str, timeout: float = PATIENCE) -> None:
        """Read messages until this has happened, after the cell's end too."""
        self.read_until(happened, what, timeout, after=True)

    def take(self, channel: str, message: dict[str, Any]) -> None:
        """One message, if it is this cell's; displays are updated from wherever."""
        kind, content = message["header"]["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != self._message:
            if kind == "update_display_data":
                self.reply.fold(kind, content)
            return
        if channel == "shell":
            self._replied = True
            self.reply.status = content["status"]
            self.reply.payload = content.get("payload", [])
        elif channel == "stdin":
            self.reply.prompts.append((content["prompt"], content["password"]))
            if self._answers:
                self._kernel.answer(self._answers.pop(0))
        elif kind == "status":
            self._idle = content["execution_state"] == "idle"
        else:
            self.reply.fold(kind, content)

    def read_until(self, enough: Callable[[], bool], what: str, timeout: float, after: bool = False) -> None:
        """Read messages until this has happened; ``after``: be it after the cell's end."""
        end = time.monotonic() + timeout
        while not enough():
            assert after or not self.over or enough(), f"the cell ended before: {what}\n{self.reply}"
            waited = f"waited {timeout} s in vain: {what}"
            assert time.monotonic() < end, f"{waited}\n{self.reply}\n{stacks(self._kernel.pid)}"
            assert self._kernel.alive, f"the kernel died before: {what}\n{self._kernel.terminal}"
            for channel, message in self._kernel.messages():
                # Cells that were sent later may answer while this one is waited for.
                self._kernel.cells.get(message["parent_header"].get("msg_id"), self).take(channel, message)


def assigned(command: str) -> str:
    """What stands for ``!command`` in an assignment, which IPython 7 does not know since Python 3.12."""
    unknown = IPython.version_info < (8,) and sys.version_info >= (3, 12)
    return f"get_ipython().getoutput({command!r})" if unknown else f"!{command}"


once = pytest.mark.parametrize("method", ["forkserver"])
"""For a test of something that does not depend on how the ranks were started."""


def ok(reply: Reply) -> Reply:
    """A reply that has to be one."""
    assert reply.status == "ok", str(reply)
    return reply


class Kernel:
    """An ipykernel of this interpreter, forked (provisioner.py); what it writes to its own terminal lands in
    ``terminal``."""

    provisioner: ClassVar = {"provisioner_name": NAME}

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.displays: dict[str, dict[str, Any]] = {}
        """All that can be updated, by display id."""
        self.cells: WeakValueDictionary[str, Cell] = WeakValueDictionary()
        self.last: Cell | None = None
        self._terminal = open(folder / "terminal.txt", "ab+")
        self._env = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1", **env}

    def start(self) -> Kernel:
        """Start it and wait until it answers."""
        self._manager = KernelManager()
        self._manager._kernel_spec = KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="test",
            language="python",
            metadata={"kernel_provisioner": self.provisioner},
        )
        streams = {"stdout": self._terminal, "stderr": self._terminal}
        self._manager.start_kernel(env=self._env, cwd=str(self.folder), **streams)
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __enter__(self) -> Kernel:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown(now=True)
        self._manager.cleanup_resources()
        self._terminal.close()

    def _connect(self) -> None:
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)
        # jupyter_client 7 has asyncio's sockets here, 8 blocking ones; seen as plain sockets they are alike.
        self._sockets = {
            zmq.Socket.shadow(self._client.stdin_channel.socket): "stdin",
            zmq.Socket.shadow(self._client.iopub_channel.socket): "iopub",
            zmq.Socket.shadow(self._client.shell_channel.socket): "shell",
        }
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    @property
    def pid(self) -> int:
        return self._manager.provisioner.pid

    @property
    def alive(self) -> bool:
        return lives(self.pid)

    @property
    def terminal(self) -> str:
        """What kernel and ranks wrote to the terminal that the server was started in."""
        return Path(self._terminal.name).read_text(errors="replace")

    def submit(self, code: str, stdin: bool = True, answers: Sequence[str] = ()) -> Cell:
        """Send a cell and return at once."""
        # ipykernel 6 aborts for a moment what comes after a failed cell; a user is not as quick as a test
        self.last = Cell(self, self._client.execute(code, allow_stdin=stdin, stop_on_error=False), answers)
        return self.last

    def execute(self, code: str, timeout: float = PATIENCE, stdin: bool = True, answers: Sequence[str] = ()) -> Reply:
        """Run a cell to its end."""
        return self.submit(code, stdin, answers).wait(timeout)

    def value(self, expression: str) -> Any:
        """The value of an expression in the kernel, if its repr is a literal."""
        import ast

        reply = self.execute(expression)
        assert reply.status == "ok", reply.traceback
        return ast.literal_eval(reply.result)

    def ask_for_info(self) -> Cell:
        """Send a request that the kernel answers at any time."""
        request = self._client.session.msg("kernel_info_request")
        self._client.control_channel.send(request)
        return Cell(self, request["header"]["msg_id"], ())

    def answer(self, text: str) -> None:
        """The user's answer to the question that was asked last."""
        self._client.input(text)

    def messages(self) -> list[tuple[str, dict[str, Any]]]:
        """What has come within 50 ms."""
        found = []
        for socket, _ in self._poller.poll(50):
            _, message = self._client.session.recv(socket, mode=0)
            found.append((self._sockets[socket], message))
        return found

    def complete(self, code: str) -> list[str]:
        """The completions at the end of ``code``."""
        return self._request(self._client.complete(code, len(code)))["matches"]

    def inspect(self, code: str) -> str:
        """What Shift-Tab shows at the end of ``code``."""
        return plain(self._request(self._client.inspect(code, len(code)))["data"].get("text/plain", ""))

    def _request(self, message: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for channel, reply in self.messages():
                if channel == "shell" and reply["parent_header"].get("msg_id") == message:
                    return reply["content"]
        raise AssertionError("the kernel did not answer")

    def interrupt(self) -> None:
        """The Stop button of Jupyter."""
        self._manager.interrupt_kernel()

    def interrupt_every_process(self) -> None:
        """The Stop button of VS Code: SIGINT to every descendant, then to the kernel."""
        kernel = psutil.Process(self.pid)
        for process in [*kernel.children(recursive=True), kernel]:
            process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL, as the system does when memory is out."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self, now: bool = False) -> None:
        """As the front end's button does it; returns when the new kernel answers."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=now)
        self._connect()

    def shutdown(self, now: bool = False) -> None:
        """Close the notebook."""
        self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=now)

    def ranks(self) -> list[psutil.Process]:
        """Those that live, with what they have started."""
        return ranks_of(self.pid)

    def assert_no_rank(self, seconds: float = PATIENCE) -> None:
        """Every rank, and every child of one, has gone (the fork server may take a moment to bury its own)."""
        try:
            wait_until(lambda: not self.ranks(), "ranks end", seconds)
        except AssertionError:
            left = [f"{rank.pid}: {rank.cmdline()}\n{stacks(rank.pid)}" for rank in self.ranks()]
            raise AssertionError("\n".join(["these are left:", *left])) from None


class ExecutedKernel(Kernel):
    """One that starts as a server starts it: for what depends on its first imports or the environment they find, for
    long days, and for benchmarks."""

    provisioner: ClassVar = {}


WARM = """\
import torch as _torch  # takes as long as the fork server's own import beside it
from nbspawn._engine.start.forkserver import server as _server
_server.get()
del _torch, _server
"""

# With a limit of 0 the server would import nothing.
IMPORTED = """\
import os as _os
from nbspawn._engine.start.forkserver import server as _server
_os.environ["NBSPAWN_PRELOAD_MB"] = "4096"
if not _server.report.modules.issuperset({modules}):
    _server.stop()
_server.get({modules})
_os.environ["NBSPAWN_PRELOAD_MB"] = "0"
del _os, _server
"""


def prepare(kernel: Kernel, *modules: str) -> None:
    """Load the extension, and wait for the fork server, which has these modules besides, if they are installed."""
    if modules:
        ok(kernel.execute(IMPORTED.format(modules=modules)))
    ok(kernel.execute(f"%cd -q {kernel.folder}\n%load_ext nbspawn"))
    ok(kernel.execute(WARM))
