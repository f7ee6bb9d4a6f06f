"""Progress bars that ranks have finished, in one line for those that counted the same: their times and rates, which
differ, become ranges. Pure.

    bars.merged(["100%|██| 50/50 [00:03<00:00, 16.2it/s]", "100%|██| 50/50 [00:04<00:00, 12.1it/s]"])
    "100%|██| 50/50 [00:03–00:04<00:00, 12.1–16.2it/s]"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbspawn._render.lines import strip_ansi

_SIGNS = ("%|", "it [", "━", "[=", "[Gloo] ")
"""One of these is in every bar. A flood of other lines is searched for them at once."""
_COUNTED = re.compile(
    r"""
    .*?(?:
        \d+%\|.*\|\s*[\d.]+\S*/[\d.]+\S*   # tqdm, with a total
        | [\d.]+\w*it(?=\ \[)              # and without
        | \d+/\d+\s+(?:━+|\[=+\])          # Keras
        | ━+.*?\d+(?:/\d+|%)               # rich, Lightning
        | ^\[Gloo\]\ Rank\ (?=\d)           # no bar: what torch 2.6 to 2.9 print for each rank of a group
    )
    """,
    re.VERBOSE,
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?::\d\d)+|(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def keys(lines: list[str], text: str) -> list[str]:
    """For each of the lines of ``text`` one that is equal for bars that can be merged; the line itself, if it is no
    bar."""
    return list(map(_key, lines)) if any(sign in text for sign in _SIGNS) else lines


def is_one(line: str) -> bool:
    """Is the line a bar?"""
    return any(sign in line for sign in _SIGNS) and _COUNTED.match(strip_ansi(line)) is not None


def _key(line: str) -> str:
    if (counted := _COUNTED.match(plain := strip_ansi(line))) is None:
        return line
    return counted[0] + " ".join(_NUMBER.sub("#", plain[counted.end() :]).split())


def merged(lines: Sequence[str]) -> str:
    """The line for bars that have the same key."""
    first = lines[0]
    if lines.count(first) == len(lines):
        return first
    plain = [strip_ansi(line) for line in lines]
    counted = _COUNTED.match(plain[0])
    assert counted is not None
    numbers = zip(*(_NUMBER.findall(one[counted.end() :]) for one in plain), strict=True)
    return counted[0] + _NUMBER.sub(lambda _: _range(next(numbers)), plain[0][counted.end() :])


def _range(numbers: Sequence[str]) -> str:
    least, most = min(numbers, key=_value), max(numbers, key=_value)
    return least if least == most else f"{least}–{most}"


def _value(number: str) -> float:
    """The value of a number, or of a time, '01:02:03'."""
    value = 0.0
    for part in number.lstrip("-").split(":"):
        value = value * 60 + float(part)
    return -value if number.startswith("-") else value
