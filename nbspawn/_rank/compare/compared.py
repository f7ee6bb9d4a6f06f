"""A rank's part in a comparison of values over ranks: what the kernel asks for, one question after the other.

``evaluate`` an expression, ``report`` on its value by digests, give the ``chunks`` that differ, ``forget`` the value.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Sequence
from typing import Any

from nbspawn._protocol.messages import Compared
from nbspawn._protocol.plain import Buffer
from nbspawn._protocol.value_digests import Entries

_FILE = "<diff>"

_value: list[Any] = []
"""What is being compared, until it is forgotten or the next one is."""
_data: dict[str, Any] = {}
"""Its entries' data, by path."""


def answer(question: str, arguments: Sequence[Any], variables: dict[str, Any]) -> Compared:
    """The answer to a question by its name. Raises what the expression raises."""
    if question == "report":
        return _report()
    if question == "chunks":
        return _chunks(*arguments)
    if question == "evaluate":
        _evaluate(variables, *arguments)
    else:
        forget()
    return None


def _evaluate(variables: dict[str, Any], expression: str) -> None:
    forget()
    linecache.cache[_FILE] = len(expression), None, expression.splitlines(keepends=True), _FILE
    _value.append(eval(compile(expression, _FILE, "eval"), variables))


def _report() -> Entries:
    import torch

    from nbspawn._rank.compare.flatten import MOST, leaves  # imports torch

    entries = []
    with torch.no_grad():
        for entry, data in itertools.islice(leaves(_value[0]), MOST + 1):
            entries.append(entry)
            _data[entry.path] = data
    return Entries(tuple(entries[:MOST]), len(entries) > MOST)


def _chunks(wanted: Sequence[tuple[str, int]]) -> tuple[Buffer, ...]:
    """The bytes of each of these: of the entry of that path the one of that number."""
    return tuple(_data[path].chunk(number) for path, number in wanted)


def forget() -> None:
    """Have no value any more."""
    _value.clear()
    _data.clear()
    linecache.cache.pop(_FILE, None)
