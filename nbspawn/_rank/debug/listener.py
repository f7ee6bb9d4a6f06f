"""``--debugpy``: a port on this machine at which a debugger of the Debug Adapter Protocol (VS Code's) can attach.

An attached debugger runs code as the notebook's user, and every user of the machine can connect to its ports. debugpy
uses tokens only between its own parts: the port for editors requires none. So the rank checks whose connection it is.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._protocol.messages import Listening
from nbspawn._rank.debug import attached
from nbspawn._rank.program import connections
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

_LOOPBACK = "127.0.0.1"


@contextmanager
def listening(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives, if the user has asked for it: listen for debugpy's clients. Otherwise debugpy is not even
    imported."""
    if not info.launch.debugpy:
        yield
        return
    pydevd = attached.loaded()
    import debugpy

    listener = _listener_for_pydevd(pydevd)
    try:
        # In this process: the adapter process that debugpy starts by default leaves the rank's process group.
        debugpy.listen(listener.getsockname(), in_process_debug_adapter=True)
    except RuntimeError as refusal:
        raise RuntimeError(
            f"debugpy cannot listen in a rank that was forked from a kernel whose own debugger is on ({refusal}). "
            "Turn that off and restart the kernel, or use -m forkserver."
        ) from None
    attached.watch(pydevd.get_global_debugger())
    attached.end_at_once(pydevd.get_global_debugger())
    here = Listening(info.rank, listener.getsockname()[1])
    channel.send(here)
    info.on_begin.append(lambda: channel.send(here))
    yield


class UserOnlyListener(socket.socket):
    """Accepts connections of this user's processes, and of root's. Prints once that it has closed another one."""

    _reported = False

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            connection, address = super().accept()
            end = connections.other_ends().get(os.fstat(connection.fileno()).st_ino)
            if end is not None and end.uid in (os.geteuid(), 0):
                return connection, address
            connection.close()
            if not self._reported:
                self._reported = True
                print(
                    "nbspawn: a connection to this rank's debugger was closed: it does not come from a process of "
                    f"this machine that is user {os.geteuid()}'s or root's.",
                    file=sys.stderr,
                )


def _listener_for_pydevd(pydevd: Any) -> UserOnlyListener:
    """Have pydevd accept its connections from a ``UserOnlyListener``."""
    try:
        connections.other_ends()
    except OSError as error:
        raise RuntimeError(
            f"--debugpy needs Linux and its /proc/net/tcp ({error}): without it a rank cannot know whose connection it "
            "is, and other users of this machine could attach."
        ) from None
    waiting = getattr(pydevd.PyDB, "_WaitForConnectionThread", None)
    if waiting is None or "create_server_socket" not in waiting.run.__code__.co_names:
        raise RuntimeError(
            "This release of debugpy listens in a way that cannot be closed to other users of this machine: "
            "pip install 'debugpy<=1.8.22'."
        )
    listener = UserOnlyListener()
    listener.bind((_LOOPBACK, 0))
    listener.listen()
    pydevd.create_server_socket = lambda host, port: listener
    return listener
