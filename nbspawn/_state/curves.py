"""The courses of numbers that ranks log (``nbspawn.log``) or print by name ('loss 0.31', 'acc=0.9', a bar's postfix).

They are of bounded size. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nbspawn._protocol.messages import Event, Logged, Printed

_NAMES = 4  # that are drawn
_KNOWN = 32  # names, most of them of settings, which are printed once
_RANKS = 8
_POINTS = 60  # of one rank, and up to twice as many
_LEAST = 3  # points: fewer are no curve
_LONGEST = 1000  # characters of a line
_LINES = 20  # of what a rank has printed at once

_NAMED = re.compile(
    r"""
    (?<![\w./-]) ["']? (?P<name>(?:(?:train|val|test|eval|dev)\w*\ )?[A-Za-z_][\w/.-]{0,30}) ["']?
    (?P<sign>\ *[=:]\ *|\ +) ["']?
    (?: (?P<value>[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|nan|inf)) (?!\ ?%|[\w.:/])
      | (?:\d+/\d+\ \()?(?P<percent>\d+(?:\.\d+)?)\ ?%(?!\|)
      | (?P<whole>[-+]?\d+) (?![\w.:/%]|\ ?%) )
    """,
    re.VERBOSE,
)
"""A number with a fraction, or of percent; whole ones may count steps. Without a sign, and of percent, only behind a
name of ``_METRIC``."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PERCENT = re.compile(r"(\d+)%\|")
_BAR = re.compile(r"\d%\||it/s|s/it|━")
_NO_COURSE = re.compile(r"(?i)time|elapsed|seconds|per_second|eta$|^took$|^epoch$|^(?:global_)?step$")
_METRIC = re.compile(
    r"(?i)loss|acc|error|perplexity|(?:^|[_/.-])(?:lr|ppl|f1|auc|mse|mae|rmse|bleu|reward|kl)(?:$|[_/.-])"
)


@dataclass
class Course:
    """Finite ``values`` at these ``times`` (CLOCK_MONOTONIC seconds), the ``last`` of all, and the extremes of all."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    last: float = math.nan
    least: float = math.inf
    most: float = -math.inf
    of_bar: bool = False
    """Was it read from a progress bar that was running?"""
    bar: tuple[str, int] | None = None
    """What stands before its percentage, and that; None once its end has been read."""
    next_began: bool = False
    """Has another bar been read since, while the end of this one is still to come?"""

    def read(self, time: float, value: float, line: str, again: bool) -> None:
        """A value that was in this line. ``again``: of a bar that is being redrawn, and may show what it showed before.
        The line of one that has ended comes last, and may come after the beginning of the next bar."""
        shown = _PERCENT.search(line)
        bar = (line[: shown.start()], int(shown[1])) if shown else None
        if again:
            if bar and self.bar:
                self.next_began = self.next_began or bar[0] != self.bar[0] or bar[1] < self.bar[1]
            self.of_bar, self.bar = True, bar
            if self.last != value:
                self.add(time, value)
        elif not (self.of_bar and _BAR.search(line)):
            self.add(time, value)
        elif self.next_began:
            self.next_began = False
        else:
            self.bar = None
            if bar and self.last != value:
                self.add(time, value)

    def add(self, time: float, value: float) -> None:
        """Add a value. Where there are too many, of each two the one that differs less from the one before is
        dropped."""
        self.last = value
        if not math.isfinite(value):
            return
        self.least, self.most = min(self.least, value), max(self.most, value)
        self.times.append(time)
        self.values.append(value)
        if len(self.values) > 2 * _POINTS:
            kept = [0]
            for index in range(1, len(self.values) - 2, 2):
                before = self.values[kept[-1]]
                kept.append(max(index, index + 1, key=lambda one: abs(self.values[one] - before)))
            kept.append(len(self.values) - 1)
            self.times, self.values = [self.times[one] for one in kept], [self.values[one] for one in kept]


class Curves:
    """The curves of one run: of the first names, and of the first ranks that print any."""

    def __init__(self) -> None:
        self._courses: dict[str, dict[int, Course]] = {}
        self._logged: dict[str, None] = {}
        self._ranks: set[int] = set()

    def add(self, events: Iterable[Event], now: float) -> None:
        """Take note of events that have happened by ``now``."""
        for event in events:
            if len(self._ranks) == _RANKS and event.rank not in self._ranks:
                continue
            if isinstance(event, Printed):
                for line in event.lines[-_LINES:]:
                    self._read(event.rank, line, now)
                self._read(event.rank, event.current, now, again=True)
            elif isinstance(event, Logged):
                for name, (value, least, most) in event.numbers.items():
                    self._logged[name] = None
                    if (course := self._course(name, event.rank)) is not None:
                        for one in (least, most, value) if least < most else (value,):
                            course.add(event.time, one)

    @property
    def drawn(self) -> Mapping[str, Mapping[int, Course]]:
        """The curves by name and rank, the first ones; those that were logged before those that were printed, among
        which there are settings, which do not change."""
        return {name: self._curves(name) for name in self._names[:_NAMES]}

    @property
    def left_out(self) -> list[str]:
        """The names of those for which there is no room."""
        return self._names[_NAMES:]

    @property
    def _names(self) -> list[str]:
        names = sorted(self._courses, key=lambda name: (name not in self._logged, not _METRIC.search(name)))
        return [name for name in names if self._curves(name) and (name in self._logged or self._changes(name))]

    def _curves(self, name: str) -> dict[int, Course]:
        return {rank: one for rank, one in sorted(self._courses[name].items()) if len(one.values) >= _LEAST}

    def _changes(self, name: str) -> bool:
        return len({bound for one in self._courses[name].values() for bound in (one.least, one.most, one.last)}) > 1

    def _read(self, rank: int, line: str, now: float, again: bool = False) -> None:
        """``again``: a bar that is redrawn, which may not have changed."""
        line = _COLOUR.sub("", line[:_LONGEST])
        named = list(_NAMED.finditer(line))
        for found in named:
            name, percent = found["name"], found["percent"]
            if _NO_COURSE.search(name) or not ((found["sign"].strip() and not percent) or _METRIC.search(name)):
                continue
            if sum(one["name"] == name for one in named) > 1:  # of what, nobody knows
                continue
            key = f"{name} %" if percent else name
            if found["whole"] and not (_METRIC.search(name) or key in self._courses):
                continue
            course = self._course(key, rank)
            if course is not None:
                course.read(now, float(percent or found["value"] or found["whole"]), line, again)

    def _course(self, name: str, rank: int) -> Course | None:
        """The course of a name; None if there is no room for it."""
        if len(self._courses) == _KNOWN and name not in self._courses:
            return None
        self._ranks.add(rank)
        return self._courses.setdefault(name, {}).setdefault(rank, Course())
