"""The importer: a process that imports what every rank would otherwise import itself, and forks the fork servers.

It imports in stages, as the kernel plans them (_protocol/preload.py). After each stage it forks a server that has all
of it: multiprocessing's, which forks ranks; the importer itself goes on with the next stage. So torch alone is there
after a second, whatever comes later, and nothing is imported twice.

It ends when the kernel has gone, or needs it no more, and its servers have ended.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any, NoReturn

from nbspawn._protocol.preload import ImportReport, Plan
from nbspawn._rank.program import exiting, process
from nbspawn._server import huge_pages, plan, trial


def main(fd: int, life: int) -> NoReturn:
    """The whole life of the process. ``fd`` is its end of a pair of connected sockets, the other one is the kernel's;
    ``life`` is the end of a pipe into which the kernel writes nothing.

    Its own streams become /dev/null: they would be the kernel's, and a rank that dies before it has a log would write
    to them."""
    with open(os.devnull, "r+b", 0) as null:
        for stream in (0, 1, 2):
            os.dup2(null.fileno(), stream)
    process.prefer_as_oom_victim()
    kernel = socket.socket(fileno=fd)
    kernel.set_inheritable(False)
    os.set_inheritable(life, False)
    try:
        _serve_kernel(kernel, life)
    finally:
        os._exit(0)  # the finalization takes a second with all these modules, and waits for threads that they have made


def _serve_kernel(kernel: socket.socket, life: int) -> None:
    began_with = frozenset(os.environ)
    imports = plan.Imports()
    servers: set[int] = set()
    with kernel.makefile("rb") as lines:
        while True:
            with _reaping(servers):
                line = lines.readline()
            if not line:
                break
            stage = Plan.of(line)
            try:
                with process.killed_at_its_end(life):
                    report = _carry_out(stage, imports, began_with)
            except BaseException as error:
                kernel.sendall(ImportReport(failed=f"{type(error).__name__}: {error}").line())
                return
            trial.exit_if_orphaned()
            _serve(stage.address, report, kernel, life, servers)
    for pid in servers:
        os.waitpid(pid, 0)


@contextmanager
def _reaping(servers: set[int]) -> Iterator[None]:
    """Meanwhile servers that end are waited for, and forgotten. (Imports wait for children of their own.)"""

    def reap(*_: object) -> None:
        servers.difference_update([pid for pid in servers if os.waitpid(pid, os.WNOHANG)[0]])

    before = signal.signal(signal.SIGCHLD, reap)
    try:
        reap()
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _carry_out(stage: Plan, imports: plan.Imports, began_with: frozenset[str]) -> ImportReport:
    gc.disable()  # imports leave little garbage, and the search for it takes a sixth of their time
    if stage.environment is not None:
        plan.adopt(stage.environment)
    with imports.recording(), exiting.keeping_handlers():
        import asyncio  # noqa: F401

        import cloudpickle  # noqa: F401
        import torch.distributed
        import torch.multiprocessing  # noqa: F401

        import nbspawn._carried.loggers
        import nbspawn._process.imports
        import nbspawn._process.pools
        import nbspawn._rank.group.environment
        import nbspawn._rank.main

        if stage.shell:
            import nbspawn._server.preload_shell

        report = imports.carry_out(stage)
    nbspawn._rank.group.environment.server_began_with = began_with
    nbspawn._rank.main.preloaded = nbspawn._process.imports.Preloaded(imports.planned)
    nbspawn._carried.loggers.note_preloaded()
    nbspawn._process.pools.find()
    gc.enable()
    if stage.settle:
        gc.collect()
        huge_pages.collapse()
    return report


def _serve(address: str, report: ImportReport, kernel: socket.socket, life: int, servers: set[int]) -> None:
    """Fork a server, and send the report, with the descriptor that keeps the server alive."""
    alive, keeps_alive = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        known: dict[str, Any] = {}
        if sys.version_info >= (3, 14):  # a client proves that it knows what the server has read from a pipe
            report.key = os.urandom(32).hex()
            known["authkey_r"], written = os.pipe()
            os.write(written, bytes.fromhex(report.key))
            os.close(written)
        report.pid = os.fork()
        if report.pid == 0:
            try:
                os.close(keeps_alive)
                os.close(life)
                os.close(kernel.detach())  # close() would leave it open for the file that plans are read from
                forkserver.main(listener.detach(), alive, [], **known)
            finally:
                os._exit(0)
    for fd in (alive, *known.values()):
        os.close(fd)
    servers.add(report.pid)
    line = report.line()
    try:
        sent = socket.send_fds(kernel, [line], [keeps_alive])
        kernel.sendall(line[sent:])
    finally:
        os.close(keeps_alive)
