"""The courses of numbers that ranks log (``nbspawn.log``) or print by name ('loss 0.31', 'acc=0.9', a bar's postfix).

They are of bounded size. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from nbspawn._protocol.messages import Event, Logged, Printed

_NAMES = 4  # that are drawn
_KNOWN = 32  # names, most of them of settings, which are printed once
_RANKS = 8
_POINTS = 60  # of one rank, and up to twice as many
_LEAST = 3  # points: fewer are no curve
_LINES = 20  # of what a rank has printed at once

_NAMED = re.compile(
    r"""
    (?<![\w./-]) ["']? (?P<name>[A-Za-z_][\w/.-]{0,30}) ["']? (?P<sign>\ *[=:]\ *|\ +)
    (?P<value>[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)) (?![\w.:%/])
    """,
    re.VERBOSE,
)
"""A number with a fraction: others count steps. Without a sign only behind a name of ``_METRIC``."""
_TIME = re.compile(r"(?i)time|elapsed|seconds|eta$|^took$")
_METRIC = re.compile(
    r"(?i)loss|acc|error|perplexity|(?:^|[_/.-])(?:lr|ppl|f1|auc|mse|mae|rmse|bleu|reward|kl)(?:$|[_/.-])"
)


@dataclass
class Course:
    """``values`` at these ``times`` (CLOCK_MONOTONIC seconds)."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, time: float, value: float) -> None:
        """One more; where there are too many, every second one is forgotten."""
        self.times.append(time)
        self.values.append(value)
        if len(self.values) > 2 * _POINTS:
            del self.times[1:-1:2], self.values[1:-1:2]


class Curves:
    """Of one run: the first names, and the first ranks that print any."""

    def __init__(self) -> None:
        self._courses: dict[str, dict[int, Course]] = {}
        self._ranks: set[int] = set()

    def add(self, events: Iterable[Event], now: float) -> None:
        """These have happened by ``now``."""
        for event in events:
            if len(self._ranks) == _RANKS and event.rank not in self._ranks:
                continue
            if isinstance(event, Printed):
                for line in event.lines[-_LINES:]:
                    self._read(event.rank, line, now)
                self._read(event.rank, event.current, now, again=True)
            elif isinstance(event, Logged):
                for name, value in event.numbers.items():
                    if (course := self._course(name, event.rank)) is not None and math.isfinite(value):
                        course.add(event.time, value)

    @property
    def drawn(self) -> Mapping[str, Mapping[int, Course]]:
        """By name and rank, those that are curves."""
        found = {
            name: {rank: course for rank, course in sorted(ranks.items()) if len(course.values) >= _LEAST}
            for name, ranks in self._courses.items()
        }
        return dict(islice(((name, ranks) for name, ranks in found.items() if ranks), _NAMES))

    def _read(self, rank: int, line: str, now: float, again: bool = False) -> None:
        """``again``: a bar that is redrawn, which may not have changed."""
        if "." not in line and "e" not in line:
            return
        for found in _NAMED.finditer(line):
            name, value = found["name"], float(found["value"])
            if _TIME.search(name) or not (found["sign"].strip() or _METRIC.search(name)):
                continue
            course = self._course(name, rank)
            if course is not None and not (again and course.values and course.values[-1] == value):
                course.add(now, value)

    def _course(self, name: str, rank: int) -> Course | None:
        """None of a name for which there is no room."""
        if len(self._courses) == _KNOWN and name not in self._courses:
            return None
        self._ranks.add(rank)
        return self._courses.setdefault(name, {}).setdefault(rank, Course())
