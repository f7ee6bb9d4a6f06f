"""A process that has imported what every kernel imports: a kernel that is forked from it starts in a tenth of the time.

The kernel is as another in what matters to nbspawn: a child of the test's process, in a session of its own, with its
own environment, folder and terminal, one thread, and only what ipykernel and torch's training import.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import time

# The last is what an optimizer, or DistributedDataParallel, imports when it is made: 1.5 s in each forked rank.
IMPORTS = ("ipykernel.kernelapp", "ipykernel.ipkernel", "ipywidgets", "torch", "torch._dynamo")


def serve(connection: socket.socket) -> None:
    """Until the other end is closed, fork a kernel for each request; it answers with its pid."""
    sys.path.remove(os.path.dirname(__file__))
    os.environ["JPY_PARENT_PID"] = str(os.getppid())  # ipykernel looks when it is imported
    for name in IMPORTS:
        importlib.import_module(name)
    while True:
        request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not request:
            return
        between = os.fork()
        if not between:
            if not os.fork():
                break
            os._exit(0)
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)
    os.setsid()
    while os.getppid() != int(os.environ["JPY_PARENT_PID"]):
        time.sleep(0.001)
    connection.sendall(str(os.getpid()).encode())
    connection.close()
    run(streams, **json.loads(request))


def run(streams: list[int], command: list[str], cwd: str, env: dict[str, str]) -> None:
    """What ``python -m MODULE ...`` does in a process of its own."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.path[0] = cwd
    _, _, module, *sys.argv[1:] = command
    runpy._run_module_as_main(module)
