"""A kernel that benchmarks send cells to, and what they make of the times."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds for one cell


@dataclass
class Ran:
    """One cell as its client saw it: moments are CLOCK_MONOTONIC seconds, which all processes here share."""

    sent: float
    replied: float
    value: Any
    error: str
    """The error's name, '' if there was none."""
    text: str
    """What it printed."""
    output: int
    """Bytes of text and displays in the saved notebook: of a display that is updated, the last state."""
    visible: float
    """When the first output came that holds the text that was looked for; 0 if none did."""

    @property
    def seconds(self) -> float:
        """From the request to the reply."""
        return self.replied - self.sent


class Kernel:
    """A kernel of this Python that sees ``tree``, and the modules in ``path``. Its working directory is its own: what
    tools leave there goes with it. What they keep for later kernels is in ``caches``, never in the user's own."""

    def __init__(self, path: str, caches: str = "", tree: Path = ROOT) -> None:
        self._manager = KernelManager()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=argv, display_name="benchmark", language="python")
        self._home = tempfile.TemporaryDirectory()
        bin_ = os.path.dirname(sys.executable)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), path]),
            "XDG_CACHE_HOME": caches or self._home.name,
            "PATH": os.pathsep.join([bin_, os.environ["PATH"]]),  # for `!torchrun`
        }
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._manager.start_kernel(env=environment, cwd=self._home.name, **quiet)
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._manager.provisioner.pid

    def try_(self, code: str, expression: str = "", silent: bool = False, look_for: str = "") -> Ran:
        """Run a cell; the value is that of ``expression`` afterwards."""
        expressions = {"it": f"__import__('json').dumps({expression})"} if expression else {}
        sent = time.monotonic()
        ident = self._client.execute(code, silent=silent, store_history=not silent, user_expressions=expressions)
        ran = Ran(sent, 0.0, None, "", "", 0, 0.0)
        texts: list[str] = []
        displays: dict[str, int] = {}
        reply: dict[str, Any] | None = None
        idle = False
        poller = zmq.Poller()
        for channel in (self._client.shell_channel, self._client.iopub_channel):
            poller.register(channel.socket, zmq.POLLIN)
        # Outputs while they come, not when all is over: a kernel may print faster than a queue is long.
        while reply is None or not idle:
            end = time.monotonic() + PATIENCE
            while not poller.poll(1000):
                if not self._manager.is_alive():
                    raise RuntimeError(f"the kernel has died\nin this cell:\n{code}")
                if time.monotonic() > end:
                    raise TimeoutError(f"no word from the kernel for {PATIENCE:g} s\nin this cell:\n{code}")
            if self._client.shell_channel.msg_ready():
                reply = self._client.get_shell_msg(timeout=PATIENCE)
                ran.replied = time.monotonic()
            while self._client.iopub_channel.msg_ready():
                message = self._client.get_iopub_msg(timeout=PATIENCE)
                if message["parent_header"].get("msg_id") == ident:
                    idle = _note(message, ran, texts, displays, look_for)
        ran.output += sum(displays.values())
        content = reply["content"]
        ran.text = "".join(texts)
        if content["status"] != "ok":
            ran.error = content.get("ename", "aborted")
            ran.text += "\n".join(content.get("traceback", ()))
        elif expression:
            ran.value = json.loads(_unquoted(content["user_expressions"]["it"]))
        return ran

    def run(self, code: str, expression: str = "", silent: bool = False) -> Ran:
        """As ``try_``, but raises RuntimeError if the cell fails."""
        ran = self.try_(code, expression, silent)
        if ran.error:
            lines = [line.strip() for line in ran.text.splitlines() if line.strip()]
            raise RuntimeError(f"{lines[-1] if lines else ran.error}\n\nin this cell:\n{code}\n\n{ran.text}")
        return ran

    def busy(self) -> float:
        """How many cores it and all that it has started use now."""

        def used() -> float:
            seconds = 0.0
            for process in [kernel, *kernel.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    seconds += times.user + times.system
            return seconds

        kernel = psutil.Process(self.pid)
        began, before = time.monotonic(), used()
        time.sleep(2)
        return max(0.0, used() - before) / (time.monotonic() - began)

    def close(self) -> None:
        """End it, and all that it has started: other tools' workers may outlive it."""
        started = psutil.Process(self.pid).children(recursive=True) if psutil.pid_exists(self.pid) else []
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._home.cleanup()


def _note(message: dict[str, Any], ran: Ran, texts: list[str], displays: dict[str, int], look_for: str) -> bool:
    """One output; True when the kernel says that there are no more."""
    kind, content = message["msg_type"], message["content"]
    if kind == "status":
        return bool(content["execution_state"] == "idle")
    reported = [content["text"]] if kind == "stream" else [text for text in content.get("data", {}).values()]
    reported += content.get("traceback", [])
    shown = content.get("transient", {}).get("display_id", f"{len(displays)} is another")
    displays[shown] = (0 if kind.endswith("display_data") else displays.get(shown, 0)) + sum(
        map(len, map(str, reported))
    )
    if look_for and not ran.visible and any(look_for in str(text) for text in reported):
        ran.visible = time.monotonic()
    if kind == "stream":
        texts += reported
    return False


def _unquoted(shown: dict[str, Any]) -> str:
    """The text that a user expression showed as its repr."""
    if shown["status"] != "ok":
        raise RuntimeError(f"{shown['ename']}: {shown['evalue']}")
    text: str = shown["data"]["text/plain"]
    return text[1:-1]
