"""The debugger of a front end (JupyterLab's bug button): its requests, over the control channel of a kernel."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from queue import Empty
from typing import Any

from kernels import Cell, Kernel, Reply, ok, wait_until
from methods import PATIENCE


class Debugged:
    """A kernel, and the requests of a ``client`` to it; ``events`` are what its debugger has told, in order."""

    def __init__(self, kernel: Kernel, client: str = "jupyterlab") -> None:
        self.kernel = kernel
        self.client = client
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._read = 0

    def __enter__(self) -> Debugged:
        received = self.kernel.messages

        def messages() -> list[tuple[str, dict[str, Any]]]:
            found = received()
            self.events += [one["content"] for _, one in found if one["header"]["msg_type"] == "debug_event"]
            return found

        self.kernel.messages = messages  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        """Switch it off, and let go on what has stopped."""
        if self.kernel.alive and self.request("debugInfo")["isStarted"]:
            self.switch_off()
        del self.kernel.messages

    def request(self, command: str, **arguments: Any) -> Any:
        """The body of the reply, which has to be a success."""
        reply = self.ask(command, **arguments)
        assert reply.get("success"), reply
        return reply.get("body")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The reply."""
        self._number += 1
        content = {"type": "request", "seq": self._number, "command": command, "arguments": arguments}
        client = self.kernel._client
        message = client.session.msg("debug_request", content)
        client.control_channel.send(message)
        end = time.monotonic() + PATIENCE
        while self.kernel.alive and time.monotonic() < end:
            with suppress(Empty):
                reply = client.get_control_msg(timeout=0.5)
                if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                    return reply["content"]  # type: ignore[no-any-return]
        return {"success": False, "message": f"no answer to {command}"}

    def switch_on(self, **attached: Any) -> None:
        """Click the bug."""
        self.request("initialize", clientID=self.client, adapterID="", pathFormat="path", linesStartAt1=True)
        self.request("attach", **attached)
        self.request("configurationDone")

    def switch_off(self) -> None:
        """Click it again."""
        self.request("disconnect", restart=False, terminateDebuggee=False)

    def breakpoints(self, code: str, *points: int | dict[str, Any]) -> None:
        """Click in the gutter of the cell, at these lines; no others stay."""
        self.breakpoints_in(self.request("dumpCell", code=code)["sourcePath"], *points)

    def breakpoints_in(self, path: str, *points: int | dict[str, Any]) -> None:
        """The same of a file."""
        found = [{"line": point} if isinstance(point, int) else point for point in points]
        self.request("setBreakpoints", source={"path": path}, breakpoints=found, sourceModified=False)

    def stopping(self, code: str, *points: int | dict[str, Any]) -> Cell:
        """Run the cell with these breakpoints, until it has stopped."""
        self.breakpoints(code, *points)
        cell = self.kernel.submit(code)
        self.until(cell, "stopped")
        return cell

    def until(self, cell: Cell, name: str) -> dict[str, Any]:
        """The body of the next event of this name."""

        def come() -> bool:
            return any(event["event"] == name for event in self.events[self._read :])

        cell.see(come, f"the debugger tells: {name}")
        while self.events[self._read]["event"] != name:
            self._read += 1
        self._read += 1
        return self.events[self._read - 1]["body"]  # type: ignore[no-any-return]

    def told(self, name: str) -> bool:
        """Has it told this since it was asked for the last time?"""
        read, self._read = self._read, len(self.events)
        return any(event["event"] == name for event in self.events[read:])

    def step(self, cell: Cell, command: str = "next", thread: int = 1) -> list[tuple[str, int]]:
        """Make a step, until it has stopped again; where."""
        self.request(command, threadId=thread)
        self.until(cell, "continued")
        self.until(cell, "stopped")
        return self.stack(thread)

    def frames(self, thread: int = 1) -> list[dict[str, Any]]:
        """What the call stack shows. Colab's IPython names a cell's own frame by its line."""
        found: list[dict[str, Any]] = self.request("stackTrace", threadId=thread)["stackFrames"]
        return [{**frame, "name": re.sub("<cell line: .*>", "<module>", frame["name"])} for frame in found]

    def stack(self, thread: int = 1) -> list[tuple[str, int]]:
        """The names and the lines of it."""
        return [(frame["name"], frame["line"]) for frame in self.frames(thread)]

    def stops_of(self, ranks: int) -> list[tuple[str, int]]:
        """The stack once so many ranks have stopped."""

        def all_there() -> list[tuple[str, int]]:
            stack = self.stack() if self.stopped else []
            return stack if len({name.partition(":")[0] for name, _ in stack}) == ranks else []

        return wait_until(all_there, f"{ranks} ranks stop")  # type: ignore[no-any-return]

    def threads_of(self, ranks: int) -> list[int]:
        """The threads of so many ranks, once they have connected."""

        def all_there() -> list[int]:
            known = {thread["name"]: thread["id"] for thread in self.request("threads")["threads"]}
            found = [known.get(f"rank {rank}", 0) for rank in range(ranks)]
            return found if all(found) else []

        return wait_until(all_there, f"{ranks} ranks have connected")  # type: ignore[no-any-return]

    @property
    def stopped(self) -> list[int]:
        """The threads that a front end finds stopped when it is loaded again."""
        return self.request("debugInfo")["stoppedThreads"]  # type: ignore[no-any-return]

    def variables(self, frame: dict[str, Any]) -> dict[str, str]:
        """The local variables of a frame."""
        return {name: one["value"] for name, one in self.listed(frame).items()}

    def listed(self, frame: dict[str, Any], of: str = "") -> dict[str, dict[str, Any]]:
        """What a front end lists of a frame's local variables, or below one ``of`` them."""
        scopes = self.request("scopes", frameId=frame["id"])["scopes"]
        found = self._listed(scopes[0]["variablesReference"])
        return self._listed(found[of]["variablesReference"]) if of else found

    def _listed(self, reference: int) -> dict[str, dict[str, Any]]:
        found = self.request("variables", variablesReference=reference)["variables"]
        return {one["name"]: one for one in found}

    def evaluate(self, expression: str, frame: dict[str, Any]) -> str:
        """An expression's value in a frame."""
        return self.request("evaluate", expression=expression, frameId=frame["id"], context="repl")["result"]  # type: ignore[no-any-return]

    def go_on(self, cell: Cell, thread: int = 1) -> Reply:
        """Continue, as often as it stops, to the cell's end, which has to be a good one."""
        self.request("continue", threadId=thread)
        while not cell.over:
            cell.read_until(lambda: cell.over or self._has_stopped(), "it stops, or ends", PATIENCE, after=True)
            if not cell.over:
                self.until(cell, "stopped")
                self.request("continue", threadId=thread)
        return ok(cell.reply)

    def _has_stopped(self) -> bool:
        return any(event["event"] == "stopped" for event in self.events[self._read :])
