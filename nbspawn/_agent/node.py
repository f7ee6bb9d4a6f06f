"""An agent: does on its node what the kernel asks for, and reports what happens there.

It ends with the connection to the kernel, and its ranks end with it, as they do with a kernel that is killed.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from nbspawn._agent import interfaces
from nbspawn._agent.connections import Connections, Received
from nbspawn._agent.modules import Modules
from nbspawn._agent.translation import Translation
from nbspawn._engine import devices
from nbspawn._engine.cluster.agents import versions
from nbspawn._engine.launch import start
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.run.local_context import LocalContext
from nbspawn._engine.start.forkserver import server
from nbspawn._engine.start.start_method import Start
from nbspawn._process.tcp_store import tcp_store
from nbspawn._protocol import connection
from nbspawn._protocol.agents import (
    CALLS,
    LOG_PART,
    Answer,
    Begin,
    Begun,
    Call,
    FromAgent,
    Hello,
    Refused,
    Reported,
    RunNext,
    Status,
)
from nbspawn._protocol.messages import UNHURRIED, Event, RunCell, RunFunction
from nbspawn._protocol.payload import Shared
from nbspawn._protocol.wire import pickled
from nbspawn.errors import SpawnError

_TICK = 0.5  # seconds: how long a poll waits when nothing happens
_REACH_SECONDS = 3.0  # in which a node of a network connects to another one
_GATHER = 0.05  # seconds for which events that are not urgent are gathered


class Node:
    """``control`` and ``bulk`` lead to the kernel; other nodes reach this one at ``address``; ``slow_dns`` as in
    Place."""

    def __init__(self, control: socket.socket, bulk: socket.socket, address: str, slow_dns: bool) -> None:
        self._address, self._slow_dns = address, slow_dns
        self._kernel = Connections(control, bulk, self._wake)
        self._context: LocalContext | None = None
        self._translation: Translation | None = None
        self._gathered: list[Event] = []
        self._send_at = math.inf
        self._held: Received | None = None
        self._command_number = 0
        self._status: Status | None = None
        self._store: Any = None
        self._listener: socket.socket | None = None
        self._modules = Modules()
        self._own: Mapping[str, Callable[..., object]] = {
            "serve_store": self._serve_store,
            "log_part": self._log_part,
            "listen": self._listen,
            "reach": self._reach,
            "backend": _backend,
            "use_folders": lambda folders: _or_why(lambda: self._modules.use(folders)),
            "write_files": lambda files: _or_why(lambda: self._modules.write(files)),
        }
        """What is asked of the node itself; the rest is of its ranks' engine."""

    def run(self) -> None:
        """Serve the kernel, until the connection to it ends."""
        try:
            self._kernel.start()
            while True:
                self._report()
                context = self._context
                if (found := self._kernel.next(block=context is None or context.all_exited)) is None:
                    continue
                message, received = found
                if isinstance(message, Exception):
                    break
                if isinstance(message, Begin) and received is not None:
                    self._begin(message, received)
                elif isinstance(message, RunNext):
                    self._run_next(message, received)
                elif isinstance(message, Call):
                    self._call(message)
        except OSError:
            pass  # the kernel has gone
        finally:
            if self._context is not None:
                self._context.dispose()
            server.stop()  # an import writes compiled files among the modules
            self._modules.remove()

    def _wake(self) -> None:
        context = self._context
        if context is not None:
            context.wake()

    # ------------------------------------------------------------ what happens here

    def _report(self) -> None:
        context, translation = self._context, self._translation
        if context is None or translation is None:
            return
        self._kernel.ask_for_the_time()
        wait = 0.0 if self._kernel.waiting else min(_TICK, max(0.0, self._send_at - time.monotonic()))
        events = [] if context.all_exited else [translation.event(event) for event in context.poll(wait)]
        status = Status(
            self._command_number,
            context.all_exited,
            context.finished,
            len(context.sentinels) == context.nprocs,
            tuple(map(translation.failure, context.failures)),
        )
        urgent = status != self._status or not all(isinstance(event, UNHURRIED) for event in events)
        for event in events:
            if (large := self._kernel.with_buffers(event)) is not None:
                # What the rank has printed comes first; but the kernel must not hear of the end before the value.
                self._flush(replace(status, all_exited=False, finished=False))
                self._kernel.send_large(*large)
            else:
                self._send_at = min(self._send_at, time.monotonic() + _GATHER)
                self._gathered.append(event)
        if urgent or time.monotonic() >= self._send_at:
            self._flush(status)

    def _flush(self, status: Status) -> None:
        if self._gathered or status != self._status:
            self._kernel.send(Reported(tuple(self._gathered), status))
        self._status, self._send_at = status, math.inf
        self._gathered.clear()

    # ------------------------------------------------------------ what the kernel asks for

    def _begin(self, begin: Begin, received: Received) -> None:
        self._command_number = begin.command.command_number
        if self._listener is not None:
            self._listener.close()
        self._kernel.clock.known.wait()
        place = replace(begin.place, slow_dns=self._slow_dns)
        self._translation = Translation(place, self._kernel.clock, self._modules.sent_from)
        try:
            options = devices.resolve(begin.options)
            server.get(environment={**os.environ, **options.env})
            how = Start("forkserver", "", received, True)  # type: ignore[arg-type]
            self._context = start(begin.command, how, options, place=place, notebook=begin.notebook)
        except (SpawnError, OSError) as refusal:
            received.close()
            self._kernel.send(Refused(str(refusal)))
            return
        context, self._status = self._context, None
        paths = tuple(context.log_path(rank) for rank in range(context.nprocs))
        self._kernel.send(Begun(tuple(process.pid or 0 for process in context.processes), context.log_dir, paths))

    def _run_next(self, message: RunNext, received: Received | None) -> None:
        if self._context is None:
            return
        commands: Mapping[int, RunCell | RunFunction] = message.commands
        self._release()
        if received is not None:
            self._held = received
            payload = Shared([f"/proc/{os.getpid()}/fd/{fd}" for fd in received.fds], received.sizes)
            commands = {rank: replace(command, payload=payload) for rank, command in commands.items()}
        self._command_number = next(iter(commands.values())).command_number
        self._context.run(commands)

    def _release(self) -> None:
        """Free the last command's payload, which no rank of this node needs any more."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _call(self, call: Call) -> None:
        assert call.method in CALLS
        value: Any = None
        if call.method in self._own:
            value = self._own[call.method](*call.arguments)
        elif self._context is not None:
            value = getattr(self._context, call.method)(*call.arguments)
        if call.method == "dispose":
            self._release()
            self._context = self._status = None
            self._gathered.clear()
            value = True
        if call.number:
            self._kernel.send(Answer(call.number, pickled(CALLS[call.method], value)))

    def _log_part(self, rank: int, start: int) -> bytes | None:
        """The next bytes of a rank's log, from ``start`` (from the end, if that is negative); None if it is lost."""
        try:
            with open(self._context.log_path(rank) if self._context is not None else "", "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) + start) if start < 0 else start)
                return log.read(LOG_PART)
        except OSError:
            return None

    def _serve_store(self) -> tuple[str, int]:
        """A TCPStore for the ranks of all nodes, at this node's address; it lives as long as the agent."""
        if self._store is None:
            listener, (host, port) = self._listening(1024)
            held = listener.detach()
            self._store = host, port, tcp_store(host, port, self._slow_dns, is_master=True, master_listen_fd=held)
        return self._store[0], self._store[1]

    def _listening(self, backlog: int) -> tuple[socket.socket, tuple[str, int]]:
        """A socket at this node's address."""
        listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        listener.bind((self._address, 0))
        listener.listen(backlog)
        return listener, (self._address, listener.getsockname()[1])

    def _listen(self) -> tuple[str, int]:
        """An address at which this node can be reached, until ranks begin."""
        self._listener, address = self._listening(1)
        return address

    def _reach(self, addresses: Sequence[tuple[str, int]]) -> list[str]:
        """Connect to other nodes: '', or why that fails, as far as the first failure. (A client of a TCPStore would try
        for minutes.)"""
        found: list[str] = []
        for address in addresses:
            try:
                socket.create_connection(address, _REACH_SECONDS).close()
            except OSError as error:
                return [*found, error.strerror or str(error)]
            found.append("")
        return found


def _backend(options: LaunchOptions) -> str | None:
    """The one that fits here."""
    try:
        return devices.resolve(options).backend
    except SpawnError:  # as the start of ranks is going to say
        return None


def _or_why(action: Callable[[], object]) -> object:
    """What it returns ('' for None), or why the system refuses that: a disk may be full."""
    try:
        found = action()
        return "" if found is None else found
    except OSError as error:
        return str(error)


def _end_with(last: Callable[[], object], control: socket.socket) -> None:
    """End when that returns, or fails."""
    with suppress(OSError):
        last()
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)


def serve(control: socket.socket, bulk: socket.socket, life: socket.socket, address: str) -> None:
    """Serve the kernel to which these lead. Other nodes reach this one at ``address``."""
    if name := interfaces.with_address(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    for last in (sys.stdin.read, partial(life.recv, 1)):  # whoever has started this agent holds its standard input
        threading.Thread(target=_end_with, args=(last, control), daemon=True).start()
    server.for_cells = True
    server.warm_up()
    slow_dns = interfaces.dns_is_slow(address)
    hello = Hello(socket.gethostname(), address, versions())
    control.sendall(connection.frame(pickled(FromAgent, hello)))
    Node(control, bulk, address, slow_dns).run()
