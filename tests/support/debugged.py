"""The debugger of a front end (JupyterLab's bug button): its requests, over the control channel of a kernel."""

from __future__ import annotations

from typing import Any

from kernels import Kernel
from methods import PATIENCE


class Debugged:
    """A kernel, and the requests to it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._number = 0

    def request(self, command: str, **arguments: Any) -> Any:
        self._number += 1
        content = {"type": "request", "seq": self._number, "command": command, "arguments": arguments}
        client = self.kernel._client
        message = client.session.msg("debug_request", content)
        client.control_channel.send(message)
        while True:
            reply = client.get_control_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                assert reply["content"].get("success"), reply["content"]
                return reply["content"].get("body")

    def switch_on(self) -> None:
        self.request("initialize", clientID="jupyterlab", adapterID="", pathFormat="path", linesStartAt1=True)
        self.request("attach")
        self.request("configurationDone")
