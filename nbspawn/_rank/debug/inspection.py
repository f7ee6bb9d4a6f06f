"""A rank at a debugger's prompt answers questions of a comparison over ranks, and stays at its prompt."""

from __future__ import annotations

from nbspawn._payload.diagnosis import one_line
from nbspawn._protocol.messages import Inspect, Inspected
from nbspawn._rank.compare import compared
from nbspawn._rank.debug import pdb_methods

active = False
"""Is a question being answered? The rank cannot ask the user meanwhile: it has asked already."""


def answer(rank: int, asked: Inspect) -> Inspected:
    """The answer; an expression is evaluated where the debugger is. An interrupt ends the session, as at the prompt."""
    global active
    active = True
    try:
        value = compared.answer(asked.question, asked.arguments, pdb_methods.rank.variables)
        return Inspected(rank, asked.number, value)
    except (Exception, SystemExit) as error:
        return Inspected(rank, asked.number, None, one_line(error))
    finally:
        active = False
