"""What the ranks returned: a sequence by rank that prints readably."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from nbspawn._payload.packing import Unpackable, Value
from nbspawn.errors import PayloadError

_SHOWN = 16  # lines; more ranks with different values than that are folded


class Results(Sequence[Any]):
    """``results[r]`` is rank r's value: what its function returned, or its cell's last expression. If only some ranks
    were asked, it is that of the r-th of ``ranks``.

    Indexing raises ``PayloadError`` for a value that could not travel to the kernel (an open file, a generator); its
    text is still shown.
    """

    def __init__(self, values: Sequence[Value], ranks: Sequence[int] | None = None) -> None:
        self._values = tuple(values)
        self.ranks = tuple(range(len(values)) if ranks is None else ranks)
        """Whose values they are."""

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        try:
            return self._values[rank].get()
        except Unpackable as stuck:
            raise PayloadError(f"the value of rank {self.ranks[rank]}: {stuck}", stuck.variable) from None

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def empty(self) -> bool:
        """Did every rank end without a value?"""
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
