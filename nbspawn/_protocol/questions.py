"""Questions of the kernel to ranks, busy or idle: one in a file that all ranks map, an answer in a file a rank."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from nbspawn._protocol.collectives import Collectives
from nbspawn._protocol.gauges import mapped
from nbspawn._protocol.memory import Memory
from nbspawn._protocol.plain import loaded
from nbspawn._protocol.wire import pickled

T = TypeVar("T")


@dataclass(frozen=True)
class Question(Generic[T]):
    """What the kernel may ask. _rank/report/questions.py has who answers, and a rank that cannot answers None."""

    name: str
    answer: type[T]
    """Plain data (plain.py)."""
    seconds: float = 0.8
    """Within which a rank answers: its sampler looks twice a second."""


class Variables(NamedTuple):
    """The variables of one rank: the name and one line about the value of each, in the order in which they were bound;
    ``more`` were left out."""

    found: tuple[tuple[str, str], ...]
    more: int


COLLECTIVES = Question("collectives", Collectives)
MEMORY = Question("memory", Memory, 4.0)  # of a rank with millions of objects and a busy thread
VARIABLES = Question("variables", Variables)
DEBUGGER = Question("debugger", bool, 3.0)  # seconds in which debugpy is imported
"""A request: connect to the front end's debugger. Is the rank debugged now?"""
Answer = bool | Collectives | Memory | Variables | None
"""Of any of them."""

_NUMBER = struct.Struct("=I")
_NAME = struct.Struct("=28s")
SIZE = _NUMBER.size + _NAME.size
"""Bytes of the file."""


class Asked:
    """In the rank: looks for questions that are asked from now on."""

    def __init__(self, path: Path) -> None:
        self._map = mapped(path)
        self._seen = self._number()

    def new(self) -> tuple[int, str] | None:
        """The number and the name of the last question, if it is new."""
        number = self._number()
        if number == self._seen:
            return None
        self._seen = number
        (name,) = _NAME.unpack_from(self._map, _NUMBER.size)
        return number, name.rstrip(b"\0").decode()

    def _number(self) -> int:
        return int(_NUMBER.unpack_from(self._map)[0])


def ask(fd: int, number: int, name: str) -> None:
    """In the kernel: ask all ranks; ``number`` counts the questions."""
    os.pwrite(fd, _NAME.pack(name.encode()), _NUMBER.size)
    os.pwrite(fd, _NUMBER.pack(number), 0)


def write_answer(path: Path, number: int, answer: Answer) -> None:
    """In the rank: the answer to the question of that number. Raises OSError, NotPlainError."""
    whole = path.with_suffix(".new")
    whole.write_bytes(pickled(tuple[int, Answer], (number, answer)))
    whole.replace(path)


def read_answer(path: Path, number: int) -> tuple[Any] | None:
    """In the kernel: the answer to that question, None if there is none yet. Raises NotPlainError."""
    try:
        answered, value = loaded(tuple[int, Answer], path.read_bytes())
    except OSError:  # none yet; deleted; or this process has no descriptor left
        return None
    return (value,) if answered == number else None
