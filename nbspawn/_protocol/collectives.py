"""What torch's flight recorder has of a rank's collectives, as plain data.

The numbers of ranks in here are torch's (those of the default group). A tensor is a text: 'float32[1024, 10]'.
"""

from __future__ import annotations

from typing import NamedTuple

from nbspawn._protocol.frames import Frame

ROOTED = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}
"""Collectives in which all ranks name one of them, and the argument that does."""
UNKNOWN = -1


class Call(NamedTuple):
    """A call of a collective. ``number`` counts those of its group from 1. ``name`` is the function's, as in the user's
    code, and ``operation`` the recorder's ('gloo:all_reduce'). ``frames`` are the user's, outermost first. ``pending``:
    has it not ended? ``age`` is in seconds, since it was called. ``root`` is the rank that it names, where that is
    known: of the call that the main thread is in."""

    number: int
    name: str
    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    frames: tuple[Frame, ...]
    pending: bool
    age: float
    root: int = UNKNOWN


class GroupCalls(NamedTuple):
    """A process group that this rank is in, and its last ``calls`` there in the order of their numbers, with those from
    the first that is pending. ``name`` and ``description`` are torch's ('0' and 'default_pg'), ``ranks`` the group's
    ranks in their order there. ``backend``: of a group with several ('cpu:gloo,cuda:nccl'), which each count their
    calls, the one that has these."""

    name: str
    description: str
    ranks: tuple[int, ...]
    calls: tuple[Call, ...]
    backend: str = ""


class Transfer(NamedTuple):
    """What the rank's main thread, or its device, waits in between two ranks: ``name`` is send or recv. ``peer`` is the
    other rank (-1: any), ``group`` the group's name. ``age`` is in seconds, since it was called; 0 where it is not
    known."""

    name: str
    group: str
    peer: int
    tag: int
    tensor: str
    frames: tuple[Frame, ...]
    age: float = 0.0


class Collectives(NamedTuple):
    """The recorded collectives of one rank, whose number in torch's default group is ``rank``."""

    rank: int
    groups: tuple[GroupCalls, ...]
    transfer: Transfer | None
