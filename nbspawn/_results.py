"""The values of the ranks: a sequence by rank, with a readable repr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from nbspawn._payload.packing import UnpicklableError, Value
from nbspawn._protocol import plain
from nbspawn._protocol.messages import Result
from nbspawn.errors import PayloadError

_SHOWN = 16  # groups of ranks with equal values; more are abbreviated


T = TypeVar("T", covariant=True)


class Results(Sequence[T]):
    """The values of the ranks: ``results[i]`` is what rank i returned, or the value of the cell's last expression.

    A sequence over the ranks that ran the command, in their order. If these are not all ranks, ``results[i]`` is the
    value of rank ``results.ranks[i]``; ``by_rank`` maps the ranks' own numbers to values.

    Args:
        values: the values, as the ranks sent them.
        ranks: the numbers of the ranks; None: 0, 1, ...

    Attributes:
        ranks: the numbers of the ranks, in the order of the values.

    Raises:
        PayloadError: when a value is accessed that could not be pickled in its rank (an open file, a generator). Its
            repr is still shown.
    """

    def __init__(self, values: Sequence[Result], ranks: Sequence[int] | None = None) -> None:
        self._values = tuple(map(Value, values))
        self.ranks = tuple(range(len(values)) if ranks is None else ranks)
        """The numbers of the ranks, in the order of the values."""
        self._timeline: Callable[[], list[dict[str, Any]]] = list

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._value(one) for one in range(*index.indices(len(self)))]
        return self._value(index)

    def _value(self, index: int) -> T:
        try:
            return self._values[index].get()  # type: ignore[no-any-return]
        except UnpicklableError as stuck:
            raise PayloadError(f"the value of rank {self.ranks[index]}: {stuck}", stuck.variable) from None

    def __iter__(self) -> Iterator[T]:
        return (self._value(index) for index in range(len(self)))

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """What each rank did when, from the samples that are taken two to ten times a second.

        Returns:
            A list of dicts, which ``pandas.DataFrame`` takes: the ``rank`` spent ``seconds`` of the time between
            ``start`` and ``end`` (seconds since the run began) at this ``line`` of this ``file`` (``Cell In[5]``; None
            and '' outside of the user's code), whose text is ``source``; ``waiting`` if for other ranks, ``device`` if
            for its GPU. However long a run lasts, a rank has at most 120 such intervals. A run of less than a tenth of
            a second has none.
        """
        return self._timeline()

    def set_timeline(self, timeline: Callable[[], list[dict[str, Any]]]) -> None:
        """Set what makes the timeline when it is asked for."""
        self._timeline = timeline

    @property
    def by_rank(self) -> dict[int, T]:
        """The values by the ranks' own numbers.

        Returns:
            A dict from rank to value.

        Raises:
            PayloadError: a value could not be pickled in its rank.
        """
        return dict(zip(self.ranks, self, strict=True))

    @property
    def unsent(self) -> dict[int, str]:
        """The ranks of whose values only the text is there, because they could not be pickled.

        Returns:
            A dict from rank to the reason.
        """
        reasons = ((rank, value.result.reason) for rank, value in zip(self.ranks, self._values, strict=True))
        return {rank: reason for rank, reason in reasons if reason}

    def __eq__(self, other: object) -> bool:
        """Same length and equal values; tensors and arrays are equal if all their elements are."""
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def empty(self) -> bool:
        """Did every rank return None?"""
        return all(value.text() == "None" for value in self._values)

    def __repr__(self) -> str:
        groups: list[tuple[int, int, str]] = []
        for rank, value in zip(self.ranks, self._values, strict=True):
            text = value.text()
            if groups and groups[-1][1:] == (rank - 1, text):
                groups[-1] = (groups[-1][0], rank, text)
            else:
                groups.append((rank, rank, text))
        lines = []
        for first, last, text in groups[:_SHOWN]:
            mark = f"[{first}]" if first == last else f"[{first}-{last}]"
            lines.append(f"{mark} " + text.replace("\n", "\n" + " " * (len(mark) + 1)))
        if len(groups) > _SHOWN:
            lines.append(f"... and the values of ranks {groups[_SHOWN][0]}-{self.ranks[-1]}")
        return "\n".join(lines)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def answers(results: Results[Any], declared: Any) -> dict[int, Any]:
    """The answers of ranks that have run nbspawn's own code, by rank. They are no user's objects, and nothing is run to
    have them: each is made of plain data, of this type (_protocol/plain.py). Raises PayloadError."""
    found = {}
    for rank, value in zip(results.ranks, results._values, strict=True):
        try:
            found[rank] = plain.loaded(declared, value.result.data, value.result.buffers)
        except plain.NotPlainError as error:
            raise PayloadError(f"the answer of rank {rank} cannot be read: {value.result.reason or error}") from error
    return found
