"""``input()`` and ``getpass()`` in a rank: the kernel asks the user. While it waits at a debugger's prompt, a rank
answers questions of a comparison over ranks, and stays there."""

from __future__ import annotations

import builtins
import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._payload.diagnosis import one_line
from nbspawn._protocol.messages import InputRequest, Inspect, Inspected
from nbspawn._rank.compare import compared
from nbspawn._rank.debug import pdb_methods
from nbspawn._rank.program import stdio
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

_comparing = False
"""Is a question of a comparison being answered? The rank cannot ask the user meanwhile: it has asked already."""


def ask(info: RankInfo, channel: Channel, prompt: object, password: bool) -> str:
    """Wait for the user's answer. Raises EOFError and KeyboardInterrupt as ``input`` does, RuntimeError if the front
    end cannot ask the user (nbclient, papermill)."""
    if _comparing:
        raise RuntimeError("an expression that is compared over ranks cannot ask for input")
    reply = channel.ask(InputRequest(info.rank, str.__str__(str(prompt)), password, stdio.log_offset()))
    while isinstance(reply, Inspect):
        reply = channel.ask(_inspected(info.rank, reply))
    if reply.kind == "text":
        return reply.text
    if reply.kind == "eof":
        raise EOFError
    if reply.kind == "interrupt":
        raise KeyboardInterrupt
    raise RuntimeError(reply.text)


def _inspected(rank: int, asked: Inspect) -> Inspected:
    """The answer; an expression is evaluated where the debugger is. An interrupt ends the session, as at the prompt."""
    global _comparing
    _comparing = True
    try:
        value = compared.answer(asked.question, asked.arguments, pdb_methods.rank.variables)
        return Inspected(rank, asked.number, value)
    except (Exception, SystemExit) as error:
        return Inspected(rank, asked.number, None, one_line(error))
    finally:
        _comparing = False


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
