"""Hears clicks while a cell runs: hands the widgets' messages to Python, and keeps everything else for afterwards.

While a cell runs, the kernel's event loop stands still, and the messages of the shell channel wait in one ZMQStream of
the main thread. Its ``flush`` gives them to the stream's callback at once. For that moment the callback is ours:
messages of comms are handled (by the kernel's own handlers, which are plain functions), all others are kept, and go to
the kernel's callback in their order when the pump is closed, so that queued cells still run after this one.

Neither subshells (ipykernel 7.4 sends the click back to the shell that is busy) nor nested event loops
(``do_one_iteration`` has gone from ipykernel 7) serve: https://github.com/ipython/ipykernel/issues/1564.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

_COMM = ("comm_msg", "comm_close", "comm_open")
_POLLIN = 1  # zmq's


class CommPump:
    """Call it some times a second from the main thread; ``close`` it when the cell ends. ``works`` is False where there
    is no such stream: then nothing is taken, and nothing heard."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = _stream(kernel) if threading.current_thread() is threading.main_thread() else None
        self._kept: list[Any] = []

    @property
    def works(self) -> bool:
        """Will clicks be heard?"""
        return self._stream is not None

    def __call__(self) -> None:
        """Handle what has come for widgets."""
        stream = self._stream
        if stream is None:
            return
        callback = stream._recv_callback
        stream._recv_callback = self._take
        try:
            stream.flush(_POLLIN)
        finally:
            stream._recv_callback = callback

    def close(self) -> None:
        """Give back what was kept."""
        stream: Any
        stream, self._stream = self._stream, None
        kept, self._kept = self._kept, []
        for frames in kept if stream is not None else ():
            stream._run_callback(stream._recv_callback, frames)

    def _take(self, frames: Sequence[Any]) -> None:
        kernel = self._kernel
        idents, parts = kernel.session.feed_identities([getattr(frame, "bytes", frame) for frame in frames])
        # Only a look: deserialize() checks the signature, and takes the same one for a replay the next time.
        if kernel.session.unpack(parts[1]).get("msg_type") not in _COMM:
            self._kept.append(frames)
            return
        message = kernel.session.deserialize(parts)
        # The front end sends a widget's next change only after the kernel was idle again after the last.
        kernel._publish_status("busy", "shell", parent=message)
        try:
            kernel.shell_handlers[message["header"]["msg_type"]](self._stream, idents, message)
        finally:
            kernel._publish_status("idle", "shell", parent=message)
            kernel._publish_status("busy", "shell")  # the cell still runs


def _stream(kernel: Any) -> Any:
    """ipykernel 7 has a thread for the shell channel, which passes on to the main thread; ipykernel 6 has none."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None:
        stream = getattr(getattr(thread.manager, "_shell_channel_to_main", None), "to_stream", None)
    else:
        stream = getattr(kernel, "shell_stream", None)
    return stream if hasattr(stream, "_recv_callback") and hasattr(stream, "_run_callback") else None
