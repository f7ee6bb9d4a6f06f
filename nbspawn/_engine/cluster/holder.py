"""The Ray actor that holds a node's share of resources, and starts the agent there.

It runs on that node, in a process of Ray's, and imports next to nothing: torch would take seconds, and be of no use.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress


class Holder:
    """Holds a share of a node, and starts the agent there: not as its child, since Ray kills an actor's children when
    it ends, and with them the guardian. The agent ends when its standard input does."""

    def start(self, arguments: tuple[str, ...], token: str, cpus: int) -> None:
        """Start the agent, which detaches itself; this actor has so many CPUs."""
        command = [sys.executable, "-m", "nbspawn._agent", *arguments, "detached"]
        env = dict(os.environ)
        if env.get("OMP_NUM_THREADS") == str(cpus):
            # Ray's own choice for one process, of which there will be one for each CPU. With as many threads in each,
            # a loop of small steps took ten times as long.
            env["OMP_NUM_THREADS"] = "1"
        with suppress(OSError):  # only root may; Ray gives its workers a nice value of 15 (RAY_worker_niceness)
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        assert self._process.stdin is not None
        print(token, file=self._process.stdin, flush=True)

    def hold(self) -> str:
        """Wait for the agent's end; returns the last that it has printed."""
        assert self._process.stdout is not None
        return self._process.stdout.read()[-1000:].strip()
