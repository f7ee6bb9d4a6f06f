"""The front end's debugger on all ranks: in front of the kernel's own, it passes on what the front end asks, and merges
what the kernel and the ranks answer.

JupyterLab and VS Code speak the Debug Adapter Protocol with a kernel (https://jupyter-client.readthedocs.io/en/stable/
messaging.html#debug-request). The kernel's own debugger gets what it always gets. Each rank connects to a socket while
the debugger is on, and gets the same breakpoints. All of this runs in the kernel's control thread.

JupyterLab shows one stack, and asks for that of thread 1 only: it gets the frames of all ranks that have stopped, one
rank below the other (https://github.com/jupyterlab/jupyterlab/issues/9865). VS Code shows each rank as a thread.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.util
import itertools
import json
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from nbspawn._engine.kernel.door import door
from nbspawn._notebook.dap import Message, RankLink
from nbspawn._protocol.questions import DEBUGGER

_RANKS = 1 << 50
"""The thread that JupyterLab is told of for all ranks: it remembers each thread that has stopped, and is told once that
they go on. Threads, frames and variables of ranks have numbers above: above all addresses, which pydevd takes for
frames, and below 2**53, up to which JavaScript knows integers."""
_TOGETHER = 0.15  # seconds in which ranks that run in step stop, and are shown at once
_IN_ALL = ("setBreakpoints", "setExceptionBreakpoints", "setFunctionBreakpoints")
_GO_ON = ("continue", "next", "stepIn", "stepOut")
_NUMBERED = ("frameId", "variablesReference", "srcFrameId", "threadId")
_STARTS_RANKS = "torch/multiprocessing/spawn.py"
"""Of a rank's frames, the first that is not the user's; under fork those of the notebook follow."""


class _Theirs(NamedTuple):
    link: RankLink
    kind: str
    number: int


class _Numbers:
    """What the front end calls threads, frames and variables of ranks. A rank's own numbers are not unique."""

    def __init__(self) -> None:
        self._numbers = itertools.count(_RANKS + 1)
        self._theirs: dict[int, _Theirs] = {}
        self._ours: dict[_Theirs, int] = {}

    def ours(self, link: RankLink, kind: str, number: int) -> int:
        """The number for the front end; 0, which stands for none, stays."""
        theirs = _Theirs(link, kind, number)
        if number and theirs not in self._ours:
            self._ours[theirs] = next(self._numbers)
            self._theirs[self._ours[theirs]] = theirs
        return self._ours[theirs] if number else 0

    def theirs(self, number: object) -> _Theirs | None:
        """What the front end means; None for what is not a rank's, or is no more."""
        return self._theirs.get(number) if isinstance(number, int) else None

    def forget(self, link: RankLink, threads: bool = False) -> None:
        """The rank goes on: its frames and variables are no more. With its end its ``threads`` aren't, either."""
        for theirs in [theirs for theirs in self._ours if theirs.link is link and (threads or theirs.kind != "thread")]:
            del self._theirs[self._ours.pop(theirs)]


class GraphicalDebugger:
    """Stands in front of ``kernel.debugger`` (ipykernel's) until ``remove``."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._own = kernel.debugger
        self._ask_kernel: Callable[[Message], Awaitable[Message]] = self._own.process_request
        self._links: list[RankLink] = []
        self._numbers = _Numbers()
        self._server: Any = None
        self._client: Message = {"adapterID": "debugpy", "pathFormat": "path", "linesStartAt1": True}
        self._settings: dict[tuple[str, str], Message] = {}
        self._looked_at: RankLink | None = None
        """The rank of which the user has looked at a frame last."""
        self._stopping: asyncio.Task[None] | None = None
        self._awaited: set[RankLink] = set()
        self._alone: RankLink | None = None
        """The rank that has gone on by itself last, while others stay where they are."""
        self._inspected: tuple[int, Message] | None = None
        self._attachment: Message = {"justMyCode": False}
        self._own.process_request = self._process
        self._shut_kernel_down: Callable[[bool], Any] = kernel.do_shutdown
        kernel.do_shutdown = self._shut_down
        door.wanted = True
        if self._own.is_started:  # before the extension was loaded
            for path, points in self._own.breakpoint_list.items():
                source = {"source": {"path": path}, "breakpoints": points}
                self._settings["setBreakpoints", path] = source
            self._in_control_thread(self._open())

    def remove(self) -> None:
        """Leave the kernel's debugger as it was."""
        vars(self._own).pop("process_request", None)
        vars(self._kernel).pop("do_shutdown", None)
        self._in_control_thread(self._close()).result()
        door.remove()

    def _shut_down(self, restart: bool) -> Any:
        """A kernel that is restarted stops its control thread at once, before it has heard that its ranks have ended:
        JupyterLab would show them as paused."""
        for thread in set(map(self._shown, self._stopped)):
            self._event("continued", {"threadId": thread, "allThreadsContinued": True})
        return self._shut_kernel_down(restart)

    def _in_control_thread(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._kernel.control_thread.io_loop.asyncio_loop)

    # ------------------------------------------------------------ what the front end asks

    async def _process(self, request: Message) -> Message:
        command = request["command"]
        arguments = request["arguments"] = request.get("arguments") or {}
        theirs = next(filter(None, (self._numbers.theirs(arguments.get(name)) for name in _NUMBERED)), None)
        if command in ("stackTrace", "pause", *_GO_ON):
            return await self._of_threads(request, theirs.link if theirs is not None else None)
        if theirs is not None:
            return await self._of_rank(request, theirs.link)
        if any(isinstance(arguments.get(name), int) and arguments[name] > _RANKS for name in _NUMBERED):
            if command == "richInspectVariables":  # of a panel that JupyterLab has left open: it shows that
                return _reply(request, {"data": {}, "metadata": {}})
            return _reply(request, None, "this frame is no more: the rank has gone on, or has stopped anew")
        if command == "inspectVariables" and self._links:
            return await self._inspect(request)
        if command == "initialize":
            self._client = {**arguments, "adapterID": "debugpy"}
        elif command == "disconnect":
            await self._close()
        elif command in _IN_ALL:
            self._settings[command, str((arguments.get("source") or {}).get("path"))] = json.loads(
                json.dumps(arguments)
            )
        reply = await self._ask_kernel(request)
        if command in _IN_ALL:
            await asyncio.gather(*(link.request(command, arguments) for link in self._links))
        elif command == "attach" and reply.get("success"):
            self._attachment = arguments
            await self._open()
        elif command == "threads" and reply.get("success"):
            reply["body"]["threads"] += [
                {"id": self._numbers.ours(link, "thread", 1), "name": f"rank {link.rank}"} for link in self._links
            ]
        elif command == "debugInfo":
            reply["body"]["stoppedThreads"] += sorted(set(map(self._shown, self._stopped)))
        return reply

    async def _inspect(self, request: Message) -> Message:
        """The notebook's variables: JupyterLab asks for them at each message of a cell, and they do not change while a
        cell waits for its ranks."""
        count = self._kernel.shell.execution_count
        if self._inspected is None or self._inspected[0] != count:
            self._inspected = count, await self._ask_kernel(request)
        return {**self._inspected[1], "seq": request["seq"], "request_seq": request["seq"]}

    async def _of_threads(self, request: Message, link: RankLink | None) -> Message:
        """Of the thread of one rank, or, as JupyterLab asks, of the notebook's; if that has not stopped, of all
        ranks."""
        command = request["command"]
        stopped = self._stopped
        of_ranks = link is not None or request["arguments"].get("threadId") == _RANKS
        if self._own.stopped_threads and not of_ranks:
            reply = await self._ask_kernel(request)
            if stopped and command in _GO_ON:
                self._announce()  # JupyterLab shows one stop
            return reply
        if command == "pause":
            if not self._links:
                return await self._ask_kernel(request)
            links = [link] if link is not None else self._links
            await asyncio.gather(*(link.request("pause", {"threadId": "*"}) for link in links))
            return _reply(request, {})
        if command == "stackTrace":
            if link is None and not stopped:
                return await self._ask_kernel(request)
            return await self._stack(request, [link] if self._shows_threads and link is not None else stopped)
        self._alone = link if (request.get("arguments") or {}).get("singleThread") else None
        # With nothing stopped, too: debugpy would never answer, and the control thread never ask anything again.
        await self._go_on(command, [self._alone] if self._alone is not None else stopped)
        return _reply(request, {"allThreadsContinued": self._alone is None} if command == "continue" else {})

    async def _stack(self, request: Message, links: Sequence[RankLink]) -> Message:
        replies = await asyncio.gather(*(link.request("stackTrace", {"threadId": link.thread}) for link in links))
        frames: list[Message] = []
        for link, reply in zip(links, replies, strict=True):
            theirs = (reply.get("body") or {}).get("stackFrames", ())
            for frame in itertools.takewhile(lambda one: not _path(one).endswith(_STARTS_RANKS), theirs):
                number = self._numbers.ours(link, "frame", frame["id"])
                name = frame["name"] if self._shows_threads else f"rank {link.rank}: {frame['name']}"
                frames.append({**frame, "id": number, "name": name})
        start = request["arguments"].get("startFrame") or 0  # VS Code asks for the topmost first, then for the others
        levels = request["arguments"].get("levels") or len(frames)
        return _reply(request, {"stackFrames": frames[start : start + levels], "totalFrames": len(frames)})

    async def _go_on(self, command: str, links: Sequence[RankLink]) -> None:
        """Have ranks continue, or step, together."""
        threads = [link.thread for link in links]
        self._awaited = set(links) if command != "continue" else set()
        for link in links:
            self._has_gone_on(link)
        await asyncio.gather(
            *(link.request(command, {"threadId": thread}) for link, thread in zip(links, threads, strict=True))
        )

    async def _of_rank(self, request: Message, link: RankLink) -> Message:
        command, arguments = request["command"], dict(request.get("arguments") or {})
        for name in _NUMBERED:
            if (theirs := self._numbers.theirs(arguments.get(name))) is not None:
                arguments[name] = link.thread if theirs.kind == "thread" else theirs.number
        if command == "scopes":
            self._looked_at = link
        elif command == "richInspectVariables":
            return await self._rich(request, link, arguments)
        elif command == "copyToGlobals":
            command, arguments = "setExpression", _copy(arguments)
        reply = await link.request(command, arguments)
        body = reply.get("body") or {}
        if command == "variables" and "variables" in body:
            body["variables"] = [one for one in body["variables"] if self._own.accept_variable(one["name"])]
            if not self._shows_threads:
                for one in body["variables"]:
                    if one["value"].startswith((f"{one['type']} ", f"{one['type']}, ")):
                        one["type"] = one["value"]  # all that JupyterLab shows of what has parts
        for one in (body, *body.get("scopes", ()), *body.get("variables", ())):
            if "variablesReference" in one:
                one["variablesReference"] = self._numbers.ours(link, "variable", one["variablesReference"])
        return {**reply, **_reply(request, body, "" if reply["success"] else reply.get("message", "it has failed"))}

    async def _rich(self, request: Message, link: RankLink, arguments: Message) -> Message:
        """What a cell would show for a variable."""
        shown: Message = {"data": {}, "metadata": {}}
        if (name := str(arguments["variableName"])).isidentifier():
            code = f"__import__('nbspawn._rank.debug.graphical', fromlist=['shown']).shown({name})"
            asked = {"expression": code, "frameId": arguments.get("frameId"), "context": "clipboard"}
            reply = await link.request("evaluate", asked)
            with suppress(ValueError, SyntaxError, KeyError):  # not a variable of this frame: nothing is shown
                shown["data"], shown["metadata"] = ast.literal_eval(reply["body"]["result"])
        return _reply(request, shown)

    # ------------------------------------------------------------ ranks

    async def _open(self) -> None:
        """The debugger is on: ranks connect from now on, those that run are asked to."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._connected, door.path())
        local = sys.modules.get("nbspawn._engine.run.local")
        for ranks in list(local.running) if local is not None else ():
            asyncio.get_running_loop().run_in_executor(None, ranks.ask, DEBUGGER)

    async def _close(self) -> None:
        """It is off: ranks go on, and are not debugged any more."""
        self._settings.clear()
        if self._server is None:
            return
        self._server.close()
        self._server = None
        door.close()
        links = list(self._links)
        await asyncio.gather(*(link.request("disconnect", {"terminateDebuggee": False}) for link in links))
        for link in links:
            link.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = RankLink(json.loads(await reader.readline()), reader, writer, self._rank_event)
        reading = asyncio.create_task(link.read())
        try:
            await link.request("initialize", self._client)
            attachment = {**self._attachment, "logToFile": False, "subProcess": False, "rules": _rules()}
            await link.request("attach", attachment)
            if self._server is None:
                return  # it was switched off meanwhile
            self._links.append(link)  # before the breakpoints are sent: one that is set meanwhile is for it, too
            for (command, _), arguments in list(self._settings.items()):
                await link.request(command, arguments)
            await link.request("configurationDone")
            await reading
        finally:
            link.close()
            if link in self._links:
                self._links.remove(link)
            if link is self._looked_at:
                self._looked_at = None
            self._awaited.discard(link)
            self._has_gone_on(link)
            self._numbers.forget(link, threads=True)

    def _rank_event(self, link: RankLink, event: Message) -> None:
        body = event.get("body") or {}
        if event["event"] == "stopped":
            body.pop("hitBreakpointIds", None)  # of the rank's own numbers
            link.thread, link.stop, link.announced = body["threadId"], body, False
            self._awaited.discard(link)
            self._announce()
        elif event["event"] == "continued":
            self._has_gone_on(link)
        elif event["event"] == "output":  # of a breakpoint that logs a message
            self._event("output", {**body, "output": f"rank {link.rank}: {body['output']}"})

    def _has_gone_on(self, link: RankLink) -> None:
        if link.thread is None:
            return
        thread, link.thread = self._shown(link), None
        self._numbers.forget(link)
        if self._shows_threads or not self._stopped:
            self._event("continued", {"threadId": thread, "allThreadsContinued": not self._shows_threads})
        elif not self._awaited:
            self._announce()

    def _announce(self) -> None:
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.get_running_loop().create_task(self._announce_together())

    async def _announce_together(self) -> None:
        """Tell the front end once of all ranks that stop at about the same time: JupyterLab shows one stop, VS Code
        takes the second stop of Run by Line for the end of the step."""
        end = time.monotonic() + _TOGETHER
        while time.monotonic() < end and (self._awaited or len(self._stopped) < len(self._links)):
            await asyncio.sleep(0.01)
        stopped = self._stopped
        looking = self._shows_threads and any(link.announced for link in stopped)
        if self._shows_threads and self._attachment.get("__mode") != "runByLine":
            stopped = [link for link in stopped if not link.announced]
        else:
            stopped = stopped[:1]
        for link in stopped:
            link.announced = True
            body = {**link.stop, "threadId": self._shown(link), "allThreadsStopped": False}
            self._event("stopped", {**body, "preserveFocusHint": looking and link is not self._alone})
            looking = True

    @property
    def _shows_threads(self) -> bool:
        return bool(self._client.get("clientID") == "vscode")

    @property
    def _stopped(self) -> list[RankLink]:
        """The ranks that have stopped; first the one that the user looks at, and those of its run."""
        stopped = [link for link in self._links if link.thread is not None]
        run = self._looked_at.run if self._looked_at is not None else ""
        return sorted(stopped, key=lambda link: (link is not self._looked_at, link.run != run, link.run, link.rank))

    def _shown(self, link: RankLink) -> int:
        """The thread that is said to stop and to go on."""
        return self._numbers.ours(link, "thread", 1) if self._shows_threads else _RANKS

    def _event(self, name: str, body: Message) -> None:
        self._own.event_callback({"type": "event", "seq": next(_events), "event": name, "body": body})


_events = itertools.count(1 << 20)


def _reply(request: Message, body: Message | None, refusal: str = "") -> Message:
    reply = {
        "type": "response",
        "seq": request["seq"],
        "request_seq": request["seq"],
        "success": not refusal,
        "command": request["command"],
        "body": body or {},
    }
    return {**reply, "message": refusal} if refusal else reply


@functools.cache
def _rules() -> list[Message]:
    """Where ranks neither stop nor step into: the longest folder counts. What the kernel gives its own debugger is a
    rule for each module that it has imported: to look through hundreds of them for each file takes a rank 0.15 s."""
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    shells = [importlib.util.find_spec(package) for package in ("IPython", "ipykernel", "traitlets")]
    passed_over = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    passed_over.update(folder for spec in shells if spec for folder in spec.submodule_search_locations or ())
    return [{"path": path, "include": path in libraries} for path in sorted(libraries | passed_over)]


def _path(frame: Message) -> str:
    return str((frame.get("source") or {}).get("path", ""))


def _copy(arguments: Message) -> Message:
    """ipykernel's copyToGlobals, as a request of debugpy's."""
    return {
        "expression": f"globals()[{arguments['dstVariableName']!r}]",
        "value": arguments["srcVariableName"],
        "frameId": arguments["srcFrameId"],
    }
