"""The rank's end of the front end's debugger (_notebook/graphical.py): pydevd, over a socket of the kernel's.

The rank connects when a command begins, if the debugger is on, and when the kernel asks it to. Otherwise debugpy is not
even imported.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._process import traced
from nbspawn._protocol import questions
from nbspawn._rank.debug import attached, presented
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.report.questions import answers


@contextmanager
def following(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: be debugged whenever the front end's debugger is on. pydevd has one client: with
    ``--debugpy`` it is the one that attaches to the port."""
    if info.launch.door and not info.launch.debugpy:
        follower = Follower(info)
        answers[questions.DEBUGGER.name] = follower.connect
        info.on_begin.append(follower.begin)
        follower.begin()
    yield


class Follower:
    """Connects, and notices that the debugger was switched off."""

    def __init__(self, info: RankInfo) -> None:
        self._door = info.launch.door
        self._hello = json.dumps({"rank": info.ordinal, "run": os.fspath(info.launch.files.socket)}).encode() + b"\n"
        self._connection: _Connection | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A command begins, or the rank."""
        was_connected = self._connection is not None
        if self.connect():
            attached.go_on()  # Pause, while the rank was idle, would stop it before the user's code
        elif was_connected:
            traced.trace_nothing()

    def connect(self) -> bool:
        """Connect if the debugger is on, and wait until the kernel has sent the breakpoints. Is the rank debugged?"""
        with self._lock:
            if self._connection is not None and not self._connection.is_set():
                return True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            connection = _Connection(socket.AF_UNIX)
            try:
                connection.connect(self._door)
                connection.sendall(self._hello)
            except OSError:
                connection.close()
                return False
            self._connection = connection
            debugger = _debugger_on(connection)
            debugger.block_until_configuration_done(cancel=connection)
            debugger.enable_tracing(debugger.trace_dispatch, apply_to_all_threads=True)
            debugger.set_tracing_for_untraced_contexts()
            traced.trace_not(debugger)
            return not connection.is_set()


def shown(value: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The value as a cell shows it: a mime bundle, and its metadata."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return {"text/plain": repr(value)}, {}
    data, metadata = shell.display_formatter.format(value)
    return data, {kind: known for kind, known in metadata.items() if kind in data}


class _Connection(socket.socket):
    """To the kernel; ``is_set`` and ``set`` are those of an Event, by which pydevd stops waiting."""

    def is_set(self) -> bool:
        """Has the kernel closed it?"""
        try:
            return not self.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def set(self) -> None:
        """Not from here."""


def _debugger_on(connection: socket.socket) -> Any:
    """This process's debugger, on the connection."""
    pydevd = attached.loaded()
    debugger = pydevd.get_global_debugger()
    if debugger is not None:  # it was on before
        debugger.on_initialize()
        debugger.initialize_network(connection, terminate_on_socket_close=False)
        return debugger

    def connect(debugger: Any, *_: object) -> None:
        attached.watch(debugger)
        debugger.initialize_network(connection, terminate_on_socket_close=False)

    to_a_port, pydevd.PyDB.connect = pydevd.PyDB.connect, connect
    try:
        pydevd.settrace(suspend=False, patch_multiprocessing=False, wait_for_ready_to_run=False, notify_stdin=False)
    finally:
        pydevd.PyDB.connect = to_a_port
    debugger = pydevd.get_global_debugger()
    attached.end_at_once(debugger)
    presented.present()
    return debugger
