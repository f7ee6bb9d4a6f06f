"""What ranks run, a function or a cell, and the variables that it uses: packed for the ranks, or inherited by them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from nbspawn._engine.kernel.interrupt_flag import InterruptFlag
from nbspawn._payload import imported, packing
from nbspawn._payload.diagnosis import OR_FORK
from nbspawn._protocol.messages import RunCell, RunFunction
from nbspawn.errors import PayloadError, StartError, interrupt_error


@dataclass(frozen=True)
class FunctionJob:
    """``fn(rank, *args, **kwargs)`` in every rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """IPython's names for the notebook's cells, by file name."""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of modules that the notebook has set, for ranks that are started."""
    kind = "function"
    source = ()
    sources = ()

    @property
    def title(self) -> str:
        """The name in messages."""
        return f"{getattr(self.fn, '__name__', 'a function')}()"

    @property
    def modules(self) -> frozenset[str]:
        """The modules that it will import, beside those of what it is sent."""
        return frozenset()

    @property
    def variables(self) -> dict[str, Any]:
        """The objects that the ranks need."""
        return {"fn": self.fn, "args": self.args, "kwargs": dict(self.kwargs)}

    @property
    def command(self) -> RunFunction:
        """The command without its payload."""
        return RunFunction(self.names)

    def pack(self, descriptors: int | None) -> packing.Packed:
        """Pack the function and all that it uses of ``__main__`` by value, with at most ``descriptors`` descriptors."""
        variables = {**self.variables, **self.replaced}
        return packing.pack_variables(variables, self.replaced.keys(), vars(sys.modules["__main__"]), descriptors)

    def inherited(self) -> dict[str, Any]:
        """The payload under fork: the objects themselves."""
        return self.variables


@dataclass(frozen=True)
class CellJob:
    """A notebook cell, and the variables of ``namespace`` that it uses (``required``) or may use (``optional``)."""

    command: RunCell
    namespace: dict[str, Any]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    magics: Mapping[str, Any] = field(default_factory=dict)
    """The notebook's own that it uses; those that it may do without are in ``optional``, too."""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of modules that the notebook has set, for ranks that are started."""
    kind = "cell"

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.names.get(self.command.filename, "a cell")

    @property
    def sources(self) -> Collection[str]:
        """The files of the notebook's other cells, which are sent to the ranks."""
        return self.command.sources

    @property
    def source(self) -> tuple[str, ...]:
        """The cell's lines, as the user sees them."""
        first, *rest = self.command.source.split("\n")
        typed = self.command.first_line.rstrip("\n")
        return (typed if typed and first.startswith("# %%") else first, *rest)

    @property
    def names(self) -> Mapping[str, str]:
        """IPython's names for the notebook's cells, by file name."""
        return self.command.names

    @property
    def modules(self) -> frozenset[str]:
        """The modules that it will import, beside those of what it is sent."""
        return imported.by_source(self.command.transformed, self.command.flags)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables, and the magics, that the cell uses."""
        names = self.required | self.optional
        return {**{name: self.namespace[name] for name in names if name in self.namespace}, **self.magics}

    def pack(self, descriptors: int | None) -> packing.Packed:
        """Pack the variables, and what these use, with at most ``descriptors`` descriptors."""
        optional = (self.optional - self.required) | self.replaced.keys()
        return packing.pack_variables({**self.variables, **self.replaced}, optional, self.namespace, descriptors)

    def inherited(self) -> dict[str, Any]:
        """The payload under fork: nothing, because a rank has the notebook's variables already."""
        packing.track_classes(self.namespace)
        return {}

    def without(self, magics: Mapping[str, Any]) -> CellJob:
        """The job without these magics, which ranks have: in a kept rank a magic may have a state."""
        new = {name: magic for name, magic in self.magics.items() if magics.get(name) is not magic}
        return replace(self, magics=new)


Job = FunctionJob | CellJob


def pack(
    job: Job, interrupts: InterruptFlag | None = None, descriptors: int | None = None, elsewhere: bool = False
) -> packing.Packed:
    """Pack the job's variables, with at most ``descriptors`` file descriptors (None: any number); ``elsewhere``: for
    other machines.

    Raises PayloadError, with the name of the variable that cannot be pickled. Raises KeyboardInterrupt: an object is
    pickled by code of its class, which may never return.
    """
    try:
        with nullcontext() if interrupts is None else interrupts.as_exception():
            return job.pack(descriptors)
    except KeyboardInterrupt:
        raise interrupt_error((), "nothing was started: the variables that the ranks need were being packed") from None
    except packing.UnpicklableError as stuck:
        part = stuck.path.rpartition(" -> ")[2]
        cause = part if part == stuck.variable else f"{stuck.variable} (it uses {part})"
        text = str(stuck).replace(OR_FORK, "") if elsewhere else str(stuck)
        raise PayloadError(text, cause) from None


def fill(packed: packing.Packed, cancelled: Callable[[], object] = lambda: False) -> None:
    """Write what was packed to shared memory. Raises StartError if that is full."""
    try:
        packed.fill(cancelled)
    except OSError as refusal:
        raise StartError(
            f"the {sum(packed.sizes) / 1e6:,.0f} MB that the ranks need cannot be written to shared memory: "
            f"{refusal.strerror}. Send less, or let the ranks load the data themselves."
        ) from None
