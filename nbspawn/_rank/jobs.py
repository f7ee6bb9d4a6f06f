"""What the kernel itself has kept ranks run: functions of a rank's number, which it names in a ``FunctionJob``."""

from __future__ import annotations

from typing import Any

from nbspawn._protocol import plain
from nbspawn._protocol.messages import Compared
from nbspawn._rank.compare import compared
from nbspawn._rank.notebook import namespace


def nothing(rank: int) -> None:
    """Do nothing: the ranks are only to be there."""


def bind(rank: int, variables: dict[str, Any]) -> None:
    """Have these variables, whatever had their names before."""
    namespace.put(variables)


def variable(rank: int, name: str) -> Any:
    """The value of one of the rank's variables; raises NameError."""
    try:
        return namespace.of_rank()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined") from None


def compare(rank: int, question: str, *arguments: Any) -> Any:
    """The answer to a question of a comparison, taken apart (plain.py): the expression is of the rank's variables."""
    return plain.apart(Compared, compared.answer(question, arguments, namespace.of_rank()))
