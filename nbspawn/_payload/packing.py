"""What a cell uses, packed once for all ranks; and what a rank's last expression was, on its way back.

A ``Packed`` is memory without a name (_protocol/shared_memory.py): the pickle stream, and behind it every large buffer
as it is. Each rank maps that file privately, so that all ranks share its pages until one of them writes, and what one
writes stays its own, as after a fork. Views go on aliasing their base, tied weights stay tied, and what the user
moved to shared memory stays shared. On the way back the message does the same with the large buffers of a ``Result``
(_protocol/messages.py). _payload/pickler.py explains how objects are pickled, _payload/diagnosis.py what the user reads
of one that cannot be.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from multiprocessing import forkserver
from typing import Any

from nbspawn._payload.classes import new_classes_are_the_kernels, track_classes
from nbspawn._payload.diagnosis import (
    RETURN_ANOTHER,
    RETURN_MODULE,
    UnloadableError,
    UnpicklableError,
    diagnose,
    one_line,
    trial,
)
from nbspawn._payload.one_memory import Region
from nbspawn._payload.pickler import Pickler, being_loaded, by_name, loads
from nbspawn._protocol import shared_memory
from nbspawn._protocol.messages import Result

__all__ = ["Packed", "UnloadableError", "UnpicklableError", "Value", "load", "pack", "pack_variables", "track_classes"]

REPR_LIMIT = 2000  # characters
_LOOKED_INTO = 3  # containers in each other
_NONE = pickle.dumps(None)

DESCRIPTORS = forkserver.MAXFDS_TO_SEND - 16
"""multiprocessing sends its fork server so many for one process, some of its own and those of a Packed among them."""


# ---------------------------------------------------------------- to the ranks


class Packed:
    """An object packed for any number of ranks; as a context manager it is filled, and closed.

    Send ``sizes`` (bytes: of the pickle stream, then of each large buffer) in a message, ``fds`` as descriptors travel,
    and ``spawn_arguments`` as an argument of the process. ``fill`` it, best while ranks start: they wait. Keep it open
    until every rank has it; the spawn arguments must live as long as the ranks use them. ``modules`` are those that a
    rank imports for it.
    """

    left_out: frozenset[str] = frozenset()
    """Names of what was optional, and cannot travel."""

    def __init__(self, pickler: Pickler, head: memoryview) -> None:
        self.sizes = tuple(part.nbytes for part in (head, *pickler.buffers))
        self.fds = shared_memory.empty_files(sum(self.sizes))
        self.spawn_arguments = tuple(pickler.spawn_arguments)
        self.modules = frozenset(pickler.modules)
        self._to_write: list[shared_memory.Large] | None = [head, *pickler.buffers]

    def fill(self, cancelled: Callable[[], object] = lambda: False) -> None:
        """Write it, or stop in the middle once ``cancelled``; then, as after an error, ranks that wait must be ended.
        Raises OSError if there is no room."""
        assert self._to_write is not None
        shared_memory.fill(self.fds, self._to_write, cancelled)
        self._to_write = None

    def close(self) -> None:
        shared_memory.close(self.fds)
        self.fds, self._to_write = (), None

    def __enter__(self) -> Packed:
        self.fill()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def pack(
    obj: object, namespace: dict[str, Any] | None = None, name: str = "object", most: int | None = DESCRIPTORS
) -> Packed:
    """Pack ``obj``; ``namespace`` is the notebook's, which its functions have as globals. At ``most`` so many
    descriptors may go with its spawn arguments (None: any number).

    Raises ``UnpicklableError``, with ``name`` as the variable, if a part of it cannot travel; ``OSError`` if there can
    be no file.
    """
    try:
        pickler, head = _pickled(obj, namespace)
    except Exception as error:
        raise diagnose(name, obj, error, namespace) from error
    if most is not None and pickler.descriptors > most:
        raise _too_many(pickler.descriptors, most, name)
    return Packed(pickler, head)


def pack_variables(
    variables: Mapping[str, object],
    optional: Collection[str] = frozenset(),
    namespace: dict[str, Any] | None = None,
    most: int | None = DESCRIPTORS,
) -> Packed:
    """Pack the variables of a cell as one dict. Those named in ``optional`` stay behind where they cannot travel.

    Raises ``UnpicklableError`` about the first of the others that cannot travel; its ``others`` are the rest.
    """
    variables = dict(variables)
    try:
        pickler, head = _pickled(by_name(variables), namespace)
    except Exception:
        errors = {name: error for name, value in variables.items() if (error := trial(value, namespace))}
    else:
        if most is not None and pickler.descriptors > most:
            shared = [name for name, value in variables.items() if _pickled(value, namespace)[0].descriptors]
            raise _too_many(pickler.descriptors, most, " and ".join(shared))
        return Packed(pickler, head)
    found = [diagnose(name, variables[name], errors[name], namespace) for name in errors if name not in optional]
    if found:
        found[0].others = tuple(found[1:])
        raise found[0] from errors[found[0].variable]
    rest = {name: value for name, value in variables.items() if name not in errors}
    packed = pack(by_name(rest), namespace, "what the cell uses", most)
    packed.left_out = frozenset(errors)
    return packed


def load(
    fds: Sequence[int],
    sizes: Sequence[int],
    spawn_arguments: Sequence[object] = (),
    namespace: dict[str, Any] | None = None,
) -> Any:
    """In the rank: the object that was packed. Functions of the notebook get ``namespace`` as their globals.

    The mapping lives as long as something uses it; ``fds`` may be closed at once. Raises ``UnloadableError``, where the
    rank cannot import what the notebook did, for one.
    """
    stream, *large = shared_memory.read(fds, sizes)
    with new_classes_are_the_kernels({} if namespace is None else namespace):
        try:
            return loads(stream, large, spawn_arguments, namespace)
        except Exception as error:
            raise UnloadableError(being_loaded() or "what the cell uses", error) from error


def _too_many(descriptors: int, most: int, name: str) -> UnpicklableError:
    reason = (
        f"{descriptors} descriptors of shared tensors, queues and the like go along, and the fork server takes {most}"
    )
    remedy = (
        "Put them into fewer, larger tensors, call torch.multiprocessing.set_sharing_strategy('file_system'), or run "
        "with -m fork or -m spawn."
    )
    return UnpicklableError(name, name, reason, remedy)


def _pickled(
    obj: object, namespace: dict[str, Any] | None, regions: Sequence[Region] = ()
) -> tuple[Pickler, memoryview]:
    pickler = Pickler(namespace, regions=regions)
    stream = io.BytesIO()
    pickler.dump(obj, stream)
    if not regions and (shared := pickler.memories.shared()):
        return _pickled(obj, namespace, shared)
    # Not getbuffer(): a BytesIO whose buffer an error's traceback still holds complains when it is collected.
    return pickler, memoryview(stream.getvalue())


# ---------------------------------------------------------------- and back


class Value:
    """A rank's result: the object by value, or the reason why it had to stay. In the rank the buffers of ``result``,
    which is sent, are the object's own memory, also a GPU's. The kernel unpickles it when it is needed."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self._loaded: list[Any] = []

    @classmethod
    def of(cls, obj: object) -> Value:
        """Pack ``obj`` in the rank. Never raises: what cannot travel is kept as text."""
        if obj is None:
            return cls(Result(_NONE, repr="None"))
        pickler = Pickler(None, returning=True)
        stream = io.BytesIO()
        try:
            pickler.dump(obj, stream)
        except Exception as error:
            reason = diagnose("the result", obj, error, None, returning=True).reason
            return cls(Result(repr=_shown(obj), reason=reason))
        return cls(Result(stream.getvalue(), tuple(pickler.buffers), _shown(obj)))

    def get(self) -> Any:
        """The object, the same one at every call. Raises ``UnpicklableError`` if it had to stay or cannot be loaded."""
        result = self.result
        if result.reason:
            reason = f"{result.reason}. It reads: {result.repr}"
            raise UnpicklableError("the result", "the result", reason, RETURN_ANOTHER)
        if not self._loaded:
            try:
                self._loaded.append(loads(result.data, _on_host(result)))  # type: ignore[arg-type]
            except Exception as error:
                reason = f"it cannot be loaded: {one_line(error).rstrip('.')}"
                other = RETURN_MODULE if "process group has not been initialized" in reason else RETURN_ANOTHER
                raise UnpicklableError("the result", "the result", reason, other) from error
            self.result = Result(repr=result.repr)
        return self._loaded[0]

    def text(self) -> str:
        """The value's repr, of at most ``REPR_LIMIT`` characters."""
        return self.result.repr

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[object, ...]]:
        result = Value.of(self._loaded[0]).result if self._loaded else self.result  # its memory is the object's now
        how: type = pickle.PickleBuffer if protocol >= 5 else bytearray
        return _value, (how(result.data), tuple(map(how, _on_host(result))), result.repr, result.reason)


def _on_host(result: Result) -> list[Any]:
    """The result's buffers, in a process that reads them itself."""
    return [buffer[:] if isinstance(buffer, shared_memory.DeviceBuffer) else buffer for buffer in result.buffers]


def _value(*fields: Any) -> Value:
    return Value(Result(*fields))


def _shown(obj: object) -> str:
    try:
        text = str.__str__(_repr(obj))  # not a subclass, which the kernel would have to load
    except Exception as error:
        text = f"<{type(obj).__name__}, whose repr raises {one_line(error)}>"
    return text if len(text) <= REPR_LIMIT else text[: REPR_LIMIT - 3] + "..."


def _repr(obj: Any, depth: int = 0) -> str:
    """The repr of an object, but of a large builtin only so much as is shown."""
    kind = type(obj)
    if kind in (str, bytes, bytearray):
        return repr(obj[:REPR_LIMIT])
    if depth > _LOOKED_INTO or kind not in (list, tuple, dict):
        return repr(obj)
    if kind is dict:
        pairs = islice(obj.items(), REPR_LIMIT)
        return "{" + ", ".join(f"{_repr(key, depth + 1)}: {_repr(value, depth + 1)}" for key, value in pairs) + "}"
    inside = ", ".join(_repr(item, depth + 1) for item in islice(obj, REPR_LIMIT))
    return f"[{inside}]" if kind is list else f"({inside},)" if len(obj) == 1 else f"({inside})"
