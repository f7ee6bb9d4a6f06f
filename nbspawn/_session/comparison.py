"""Are the values of an expression equal in all ranks? A conversation with them, and its outcome.

Each rank evaluates the expression and reports digests of what is in the value (_rank/compare/compared.py). Only where
these differ do values travel, a chunk at a time: of each group of ranks that agree, one rank's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from nbspawn._engine.jobs import FunctionJob, Job
from nbspawn._protocol.messages import Compared
from nbspawn._protocol.value_digests import CHUNK, DIGEST
from nbspawn._rank import jobs
from nbspawn._render import agreement as rendered
from nbspawn._results import Results, answers
from nbspawn._session import tensor_diff, views
from nbspawn._session.options import CommandOptions
from nbspawn._session.tensor_diff import Tolerance
from nbspawn._state import agreement
from nbspawn._state.agreement import Agreement, Closer, Differing, Group
from nbspawn.errors import SpawnError, UsageError

_LOOKED_AT = 10  # entries that differ, of which the elements are compared
_GROUPS = 4  # of one entry, of which the elements are compared
_BATCH = 64 << 20  # bytes that are sent at a time

_OPTION = r"--(?P<name>rtol|atol)(?:=|\s+)(?P<value>\S+)"


class Inspection(NamedTuple):
    """A question to each of these ranks, that _rank/compare/compared.py answers, by its name, and its arguments."""

    ranks: tuple[int, ...]
    name: str
    arguments: tuple[Any, ...] = ()


Conversation = Generator[Inspection, Mapping[int, Any], "Difference"]
"""Yields questions, is sent the answers by rank, and returns the outcome."""


class Difference:
    """How a value differs between ranks. It is true if the value differs.

    Attributes:
        expression: what was compared.
        ranks: the ranks that were compared.
        differing: the entries that are not equal in all ranks, a dict each: its ``path``; ``groups``, the lists of
            ranks in which it is the same, the largest first; ``kinds`` and ``values`` (short texts) of each group;
            ``statistics`` of each group, ``(min, max, NaN, infinities)`` or None; ``part`` of a sharded tensor. Where
            the elements were compared also ``closer``, for each further group a dict with the ``count`` of elements
            that differ from the first group's, the ``largest`` difference, the largest ``relative`` one, and the
            ``index`` and the ``values`` of the first element that differs.
    """

    def __init__(self, expression: str, found: Agreement, nprocs: int, tolerance: Tolerance) -> None:
        self.expression = expression
        """What was compared."""
        self.ranks = found.ranks
        """The ranks that were compared."""
        self.differing = [_record(one) for one in found.differing]
        """The entries that are not equal in all ranks."""
        self._text = rendered.text(expression, found, nprocs, *tolerance)

    @property
    def equal(self) -> bool:
        """Are all entries equal, or close, in all ranks?"""
        return not self.differing

    def __bool__(self) -> bool:
        return not self.equal

    def __repr__(self) -> str:
        return self._text


def parse(text: str) -> tuple[str, Tolerance]:
    """The expression and the tolerance of ``EXPR --rtol X --atol Y``; options precede or follow it. Raises
    UsageError."""
    expression, found = text.strip(), {}
    while option := re.match(rf"{_OPTION}(?:\s+|$)", expression) or re.search(rf"(?:\s+|^){_OPTION}$", expression):
        found[option["name"]] = option["value"]
        expression = (expression[: option.start()] + expression[option.end() :]).strip()
    if bare := re.search(r"(?:^|\s)--(rtol|atol)$", expression):
        raise UsageError(f"--{bare[1]} needs a number: `--{bare[1]} 1e-6`")
    return checked(expression, **found)


def checked(expression: str, rtol: Any = 0.0, atol: Any = 0.0) -> tuple[str, Tolerance]:
    """The expression and the tolerances, if they make sense. Raises UsageError."""
    numbers = {}
    for name, value in (("rtol", rtol), ("atol", atol)):
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            numbers[name] = math.nan
        if not 0.0 <= numbers[name] < math.inf:
            raise UsageError(f"{name} is a number of 0 or more, got {value!r}")
    if not isinstance(expression, str) or not expression.strip():
        raise UsageError("diff needs an expression, which each rank evaluates: `diff model.state_dict()`")
    try:
        compile(expression.strip(), "<diff>", "eval")
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"diff needs an expression, got {expression!r:.200}: {reason}") from None
    return expression.strip(), Tolerance(**numbers)


def of_idle(
    run: Callable[[Job, CommandOptions, Sequence[int]], Results[Any]],
    nprocs: int,
    ranks: Sequence[int],
    expression: str,
    tolerance: Tolerance,
) -> Difference:
    """Compare over some of ``nprocs`` kept ranks, in which ``run`` runs a job. Raises RankRaisedError where the
    expression raises."""
    if len(ranks) < 2:
        raise UsageError(f"diff compares ranks, and there is only rank {ranks[0]}")
    talk = conversation(expression, tuple(ranks), nprocs, tolerance)

    def asked(question: Inspection) -> Mapping[int, Any]:
        job = FunctionJob(jobs.compare, (question.name, *question.arguments))
        return answers(run(job, CommandOptions(view=views.StreamView()), question.ranks), Compared)

    try:
        question = next(talk)
        while True:
            question = talk.send(asked(question))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        with suppress(SpawnError):  # a rank that has ended has forgotten it
            asked(Inspection(tuple(ranks), "forget"))


def conversation(expression: str, ranks: tuple[int, ...], nprocs: int, tolerance: Tolerance) -> Conversation:
    """The conversation with these ranks, of ``nprocs``, which are able to answer."""
    yield Inspection(ranks, "evaluate", (expression,))
    found = agreement.compare((yield Inspection(ranks, "report")))
    numeric = [one for one in found.differing if one.comparable]
    looked_at = numeric if tolerance.given else numeric[:_LOOKED_AT]
    yield from _look_closer(looked_at, None if tolerance.given else _GROUPS, tolerance)
    close = {id(one) for one in looked_at if tolerance.given and all(closer.close for closer in one.closer.values())}
    found.within = len(close)
    found.differing = [one for one in found.differing if id(one) not in close]
    return Difference(expression, found, nprocs, tolerance)


class _Piece(NamedTuple):
    """A chunk that is not the same in all these ``groups`` of an entry."""

    one: Differing
    groups: tuple[Group, ...]
    number: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks to be asked, one of each group."""
        return tuple(group.ranks[0] for group in self.groups)


def _look_closer(
    differing: Sequence[Differing], most: int | None, tolerance: Tolerance
) -> Generator[Inspection, Mapping[int, Any], None]:
    """Have ``closer`` of these, for at ``most`` so many groups of each."""
    pieces = []
    for one in differing:
        groups = one.groups[:most]
        one.closer = {group.ranks[0]: Closer() for group in groups[1:]}
        for number in range(len(one.comparable[0].digests) // DIGEST):
            digest = slice(number * DIGEST, (number + 1) * DIGEST)
            if len({entry.digests[digest] for entry in one.comparable[:most]}) > 1:
                pieces.append(_Piece(one, groups, number))
    for batch in _batches(sorted(pieces, key=lambda piece: piece.ranks)):
        ranks = batch[0].ranks
        wanted = [(piece.one.path, piece.number) for piece in batch]
        answers = yield Inspection(ranks, "chunks", (wanted,))
        for place, piece in enumerate(batch):
            for rank in ranks[1:]:
                chunks = answers[ranks[0]][place], answers[rank][place]
                tensor_diff.compare(piece.one.closer[rank], piece.one.comparable[0], piece.number, *chunks, tolerance)


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """The pieces in batches that the same ranks are asked for, of bounded size."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        more = min(CHUNK, piece.one.comparable[0].nbytes) * len(piece.ranks)
        if batch and (piece.ranks != batch[0].ranks or size + more > _BATCH):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += more
    if batch:
        yield batch


def _record(one: Differing) -> dict[str, Any]:
    entries = [group.entry for group in one.groups]
    record: dict[str, Any] = {
        "path": one.path,
        "groups": [list(group.ranks) for group in one.groups],
        "kinds": [entry and entry.kind for entry in entries],
        "values": [entry.text if entry else "" for entry in entries],
        "statistics": [entry.statistics and tuple(entry.statistics) if entry else None for entry in entries],
        "part": one.part,
    }
    return record | {"closer": [vars(closer) for closer in one.closer.values()]}
