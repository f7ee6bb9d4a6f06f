"""``input()`` and ``getpass()`` in a rank: the kernel asks the user."""

from __future__ import annotations

import builtins
import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._protocol.messages import InputRequest, Inspect
from nbspawn._rank.debug import inspection
from nbspawn._rank.program import stdio
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo


def ask(info: RankInfo, channel: Channel, prompt: object, password: bool) -> str:
    """Wait for the user's answer. Raises EOFError and KeyboardInterrupt as ``input`` does, RuntimeError if the front
    end cannot ask the user (nbclient, papermill)."""
    if inspection.active:
        raise RuntimeError("an expression that is compared over ranks cannot ask for input")
    reply = channel.ask(InputRequest(info.rank, str.__str__(str(prompt)), password, stdio.log_offset()))
    while isinstance(reply, Inspect):
        reply = channel.ask(inspection.answer(info.rank, reply))
    if reply.kind == "text":
        return reply.text
    if reply.kind == "eof":
        raise EOFError
    if reply.kind == "interrupt":
        raise KeyboardInterrupt
    raise RuntimeError(reply.text)


@contextmanager
def answered_by_kernel(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: send its prompts to the notebook: the rank's own stdin is empty."""

    def rank_input(prompt: object = "", /) -> str:
        return ask(info, channel, prompt, password=False)

    def rank_getpass(prompt: str = "Password: ", *_: Any, **__: Any) -> str:
        return ask(info, channel, prompt, password=True)

    builtins.input = rank_input
    getpass.getpass = rank_getpass
    yield
