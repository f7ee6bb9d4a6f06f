"""``nbspawn.log(loss=0.31)``: numbers of a rank for the curves under its cell, sent at a bounded rate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbspawn._protocol.messages import Logged
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

_SPACING = 0.1  # seconds between two messages


class _Log:
    """What was not sent yet: of each number the newest value, the least and the greatest."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self._rank = rank
        self._channel = channel
        self._numbers: dict[str, tuple[float, float, float]] = {}
        self._sent_at = 0.0

    def add(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            _, least, most = self._numbers.get(name, (value, value, value))
            self._numbers[name] = value, min(least, value), max(most, value)
        if time.monotonic() - self._sent_at >= _SPACING:
            self.send()

    def send(self) -> None:
        if self._numbers:
            self._sent_at = time.monotonic()
            self._channel.send(Logged(self._rank, self._sent_at, self._numbers))
            self._numbers = {}


_log: _Log | None = None


@contextmanager
def logging(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: send what ``nbspawn.log`` is given."""
    global _log
    _log = _Log(info.rank, channel)
    yield


def send() -> None:
    """The command has ended: send what has not been sent."""
    if _log is not None:
        _log.send()


def log(**numbers: Any) -> None:
    """Draw numbers as live curves under the cell that runs on ranks; in the notebook itself, and elsewhere, do nothing.

    Ten times a second the newest value of each rank is drawn, with the least and the greatest since then. There are
    at most four pictures under a cell. Numbers that ranks print by name (``loss 0.31``) are drawn without this.

    Args:
        numbers: by name; a tensor with one element counts as its value.

    Raises:
        TypeError, ValueError: a value is no number.
    """
    given = {}
    for name, value in numbers.items():
        try:
            given[name] = float(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is no number: {error}") from None
    if _log is not None:
        _log.add(given)
