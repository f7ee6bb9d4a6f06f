"""Handles clicks while a cell runs: dispatches the widgets' messages, and defers all others until the cell ends.

While a cell runs, the kernel's event loop is blocked, and the messages of the shell channel wait in one ZMQStream of
the main thread. Its ``flush`` passes them to the stream's callback at once. During that call the callback is replaced:
comm messages are handled (by the kernel's own handlers, which are plain functions), all others are buffered, and are
passed to the kernel's callback in order when the pump is closed: queued cells still run after this one.

Neither subshells (ipykernel 7.4 sends the click back to the busy shell) nor nested event loops (``do_one_iteration``
was removed in ipykernel 7) work here: https://github.com/ipython/ipykernel/issues/1564.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

_COMM = ("comm_msg", "comm_close", "comm_open")
_POLLIN = 1  # zmq's


class CommPump:
    """Call it some times a second from the main thread; ``close`` it when the cell ends. ``works`` is False where there
    is no such stream: then it does nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = _stream(kernel) if threading.current_thread() is threading.main_thread() else None
        self._buffered: list[Any] = []

    @property
    def works(self) -> bool:
        """Are clicks handled?"""
        return self._stream is not None

    def __call__(self) -> None:
        """Handle the messages for widgets that have arrived."""
        stream = self._stream
        if stream is None:
            return
        callback = stream._recv_callback
        stream._recv_callback = self._receive
        try:
            stream.flush(_POLLIN)
        finally:
            stream._recv_callback = callback

    def close(self) -> None:
        """Pass the buffered messages to the kernel."""
        stream: Any
        stream, self._stream = self._stream, None
        buffered, self._buffered = self._buffered, []
        for frames in buffered if stream is not None else ():
            stream._run_callback(stream._recv_callback, frames)

    def _receive(self, frames: Sequence[Any]) -> None:
        kernel = self._kernel
        idents, parts = kernel.session.feed_identities([getattr(frame, "bytes", frame) for frame in frames])
        # Only unpacked: deserialize() records the signature, and would refuse the message the next time as a replay.
        if kernel.session.unpack(parts[1]).get("msg_type") not in _COMM:
            self._buffered.append(frames)
            return
        message = kernel.session.deserialize(parts)
        # The front end sends a widget's next change only when the kernel has been idle after the last one.
        kernel._publish_status("busy", "shell", parent=message)
        try:
            kernel.shell_handlers[message["header"]["msg_type"]](self._stream, idents, message)
        finally:
            kernel._publish_status("idle", "shell", parent=message)
            kernel._publish_status("busy", "shell")  # the cell still runs


def _stream(kernel: Any) -> Any:
    """The shell channel's ZMQStream in the main thread. In ipykernel 7 a thread of the shell channel forwards to it."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None:
        stream = getattr(getattr(thread.manager, "_shell_channel_to_main", None), "to_stream", None)
    else:
        stream = getattr(kernel, "shell_stream", None)
    return stream if hasattr(stream, "_recv_callback") and hasattr(stream, "_run_callback") else None
