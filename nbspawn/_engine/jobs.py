"""What ranks are to run, a function or a cell, and what it uses: packed for the ranks, or inherited by them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from nbspawn._engine.interrupt_flag import InterruptFlag
from nbspawn._payload import packing
from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn.errors import PayloadError, StartError, interrupted


@dataclass(frozen=True)
class FunctionJob:
    """``fn(rank, *args, **kwargs)`` in every rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """What IPython calls the notebook's cells, by file name."""
    kind = "function"
    source = ()
    sources = ()

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"{getattr(self.fn, '__name__', 'a function')}()"

    @property
    def variables(self) -> dict[str, Any]:
        """What the ranks need."""
        return {"fn": self.fn, "args": self.args, "kwargs": dict(self.kwargs)}

    @property
    def command(self) -> RunFunction:
        """As it is sent, but for the payload."""
        return RunFunction(self.names)

    def pack(self, descriptors: int | None) -> packing.Packed:
        """Everything by value that the function uses of ``__main__``, at most so many ``descriptors`` beside it."""
        return packing.pack_variables(self.variables, namespace=vars(sys.modules["__main__"]), most=descriptors)

    def inherited(self) -> dict[str, Any]:
        """Under fork nothing travels."""
        return self.variables


@dataclass(frozen=True)
class CellJob:
    """A notebook cell and the variables that it uses (``required``, and those it may use) of ``namespace``."""

    command: RunCell
    namespace: dict[str, Any]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    kind = "cell"

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return self.names.get(self.command.filename, "a cell")

    @property
    def sources(self) -> Collection[str]:
        """The files of the notebook's other cells, which its ranks are told of."""
        return self.command.sources

    @property
    def source(self) -> tuple[str, ...]:
        """The cell's lines, as the user sees them."""
        first, *rest = self.command.source.split("\n")
        typed = self.command.first_line.rstrip("\n")
        return (typed if typed and first.startswith("# %%") else first, *rest)

    @property
    def names(self) -> Mapping[str, str]:
        """What IPython calls the notebook's cells, by file name."""
        return self.command.names

    @property
    def variables(self) -> dict[str, Any]:
        """What the cell uses, and only that."""
        return {name: self.namespace[name] for name in self.required | self.optional if name in self.namespace}

    def pack(self, descriptors: int | None) -> packing.Packed:
        """The variables, and what they use in their turn, with at most so many ``descriptors`` beside them."""
        return packing.pack_variables(self.variables, self.optional - self.required, self.namespace, descriptors)

    def inherited(self) -> dict[str, Any]:
        """Under fork a rank has the notebook's variables already."""
        packing.track_classes(self.namespace)
        return {}


Job = FunctionJob | CellJob


def pack(job: Job, interrupted_by: InterruptFlag | None = None, descriptors: int | None = None) -> packing.Packed:
    """The job's variables packed, with at most so many ``descriptors`` beside them (None: any number).

    Raises PayloadError that names the variable that cannot travel, and KeyboardInterrupt: how an object is pickled is
    the code of its class, which may take for ever.
    """
    try:
        with nullcontext() if interrupted_by is None else interrupted_by.as_exception():
            return job.pack(descriptors)
    except KeyboardInterrupt:
        raise interrupted((), "nothing was started: the variables that the ranks need were being packed") from None
    except packing.Unpackable as stuck:
        part = stuck.path.rpartition(" -> ")[2]
        culprit = part if part == stuck.variable else f"{stuck.variable} (it uses {part})"
        raise PayloadError(str(stuck), culprit) from None


def fill(packed: packing.Packed, give_up: Callable[[], object] = lambda: False) -> None:
    """Write what was packed. Raises StartError if there is no room."""
    try:
        packed.fill(give_up)
    except OSError as refusal:
        raise StartError(
            f"the {sum(packed.sizes) / 1e6:,.0f} MB that the ranks need cannot be put into shared memory: "
            f"{refusal.strerror}. Send less, or have the ranks load it themselves."
        ) from None
