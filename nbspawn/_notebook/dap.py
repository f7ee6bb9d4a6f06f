"""The connection to one rank's debugger. They speak the Debug Adapter Protocol, in the kernel's control thread.

https://microsoft.github.io/debug-adapter-protocol/specification
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

_ANSWER = 10.0
"""Seconds for a reply. The control thread answers one request at a time, and the front end asks all ranks by it: a rank
that evaluates a collective must not keep the others from an answer."""
_BUSY = "it still computes, or waits: in a collective for other ranks, or for what input() asks in the cell"


class RankLink:
    """The connection. ``hello`` is what the rank has said of itself (_rank/debug/graphical.py)."""

    def __init__(
        self,
        hello: Message,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[RankLink, Message], None],
    ) -> None:
        self.rank: int = hello["rank"]
        self.run: str = hello["run"]
        """The same for the ranks of one run."""
        self.thread: int | None = None
        """The debugger's number of the thread that it has stopped; None if the rank runs."""
        self.stop: Message = {}
        """The body of the event that has told of it."""
        self.announced = False
        """Has the front end been told?"""
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Message]] = {}

    async def request(self, command: str, arguments: Message | None = None) -> Message:
        """The reply. One that is not there in time, or that a rank cannot give any more, is an unsuccessful one."""
        number = next(self._numbers)
        message = {"type": "request", "seq": number, "command": command, "arguments": arguments or {}}
        data = json.dumps(message).encode()
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
            return await asyncio.wait_for(reply, _ANSWER)
        except (TimeoutError, asyncio.TimeoutError):
            return {"success": False, "message": f"rank {self.rank} has not answered within {_ANSWER:g} s: {_BUSY}"}
        except (OSError, _EndedError):
            return {"success": False, "message": f"rank {self.rank} has ended"}
        finally:
            del self._replies[number]

    async def read(self) -> None:
        """Read until the rank ends, or ``close``."""
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    header = await self._reader.readuntil(b"\r\n\r\n")
                    size = int(header.lower().partition(b"content-length:")[2].split()[0])
                    self._received(json.loads(await self._reader.readexactly(size)))
        finally:
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(_EndedError())

    def _received(self, message: Message) -> None:
        if message["type"] == "response":
            reply = self._replies.get(message["request_seq"])
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif message["type"] == "event":
            self._on_event(self, message)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


class _EndedError(Exception):
    """The rank has ended while a reply was waited for."""
