"""``--debugpy``: a port on this machine at which a debugger of the Debug Adapter Protocol (VS Code's) can attach."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nbspawn.messages import Listening
from nbspawn.rank import debugger
from nbspawn.rank.channel import Channel
from nbspawn.rank.launch import RankInfo

_LOOPBACK = "127.0.0.1"


@contextmanager
def listening(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives, if the person asked for it; without, debugpy is not even imported."""
    if not info.launch.debugpy:
        yield
        return
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # its warning would stand among what the person prints
    import debugpy

    hook = sys.breakpointhook
    try:
        # In this process: the adapter that debugpy would start otherwise leaves the rank's process group.
        _, port = debugpy.listen((_LOOPBACK, 0), in_process_debug_adapter=True)
    except RuntimeError as refusal:
        raise RuntimeError(
            f"debugpy cannot listen in a rank that was forked from a kernel whose own debugger is on ({refusal}). "
            "Turn that off and restart the kernel, or use -m forkserver."
        ) from None

    sys.breakpointhook = hook  # debugpy's own does nothing while nobody is attached
    sys.modules["pydevd_tracing"].restore_sys_set_trace_func()  # its own warns of pdb, with ten lines at each step
    debugger.attached = _stop_at
    here = Listening(info.rank, port or _port())
    channel.send(here)
    info.on_begin.append(lambda: channel.send(here))
    yield


def _stop_at(frame: FrameType) -> bool:
    """Stop there, if a debugger is attached."""
    pydevd: Any = sys.modules["pydevd"]
    if not pydevd._is_attached():
        return False
    pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)
    return True


def _port() -> int:
    """Older releases do not tell which one the system chose."""
    server: Any = sys.modules["pydevd"].get_global_debugger()
    server.wait_for_server_socket_ready()
    return int(server._server_socket_name[1])
