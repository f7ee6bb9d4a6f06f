"""What this rank has called in its process groups, by torch's flight recorder. It is read only when somebody asks.

gloo's send and recv are not recorded: for these the main thread's frame tells what it waits for.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from types import FrameType
from typing import Any, NamedTuple

from nbspawn._process.imports import is_library
from nbspawn._protocol import plain
from nbspawn._protocol.collectives import ROOTED, UNKNOWN, Call, Collectives, GroupCalls, Transfer
from nbspawn._protocol.frames import RANK_MAIN, Frame
from nbspawn._rank.group import flight_recorder
from nbspawn._rank.group.lost_peer import has_lost_peer, raised_in_collective
from nbspawn._rank.report.sampler import COLLECTIVES, is_collective

_log = logging.getLogger(__name__)

_CALLS = 64  # of one group, the last ones
_PENDING = 16  # and those from the first that has not ended: a device may be a hundred calls behind
_GROUPS = 32
_LAST = 4  # of one group, at the end of a rank: each run sends them
_FRAMES = 4  # of the user's code: the outermost, and the innermost others
_TENSORS = 3
_MARKED = 0.2  # seconds within which a call that has ended is marked as ended

_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}

_Lines = Set[tuple[str, int]]  # of files

cells: Mapping[str, str] = {}
"""The files of the notebook's cells; set when the rank starts."""


class _Stack(NamedTuple):
    """Innermost frame first. ``lines`` are those in which the main thread may be in a collective."""

    frames: Sequence[FrameType] = ()
    lines: _Lines = frozenset()


_raised: _Stack | None = None  # of the error that the main thread is reporting


def report() -> Collectives | None:
    """This rank's process groups and its last collectives in each; None if it is in no group. For another thread than
    the main one."""
    stack = _raised or _main_stack()
    return _reported(_unended(flight_recorder.entries(), stack.lines), stack.frames)


def if_raised_in_collective(error: BaseException) -> Collectives | None:
    """The report, if this error comes from torch.distributed; None for another error."""
    global _raised
    if not raised_in_collective(error) and not has_lost_peer(error):
        return None
    way = list(traceback.walk_tb(error.__traceback__))[::-1]
    _raised = _Stack([frame for frame, _ in way], {(frame.f_code.co_filename, line) for frame, line in way})
    try:
        return _reported(_unended(_settled_entries(), _raised.lines), _raised.frames)
    except Exception:
        _log.exception("the recorder cannot be read")
        return None
    finally:
        _raised = None


def at_end() -> Collectives | None:
    """The last calls of a rank that ends well, and so is in none of them, for peers that made others."""
    try:
        told = _reported(flight_recorder.entries()) if _distributed() is not None else None
    except Exception:
        _log.exception("the recorder cannot be read")
        return None
    if told is None:
        return None
    calls = [tuple(call._replace(pending=False) for call in group.calls[-_LAST:]) for group in told.groups]
    return told._replace(
        groups=tuple(group._replace(calls=last) for group, last in zip(told.groups, calls, strict=True))
    )


def _unended(entries: list[dict[str, Any]], lines: _Lines) -> list[dict[str, Any]]:
    """The last call has not ended, or not well, if the main thread is at one of these lines because of it: gloo marks a
    call that fails as one that has ended, before the caller learns of it."""
    if entries and any(frame[:2] in lines for frame in _users(_frames(entries[-1]))[-1:]):
        entries[-1]["retired"] = False
    return entries


def _reported(entries: Sequence[Mapping[str, Any]], stack: Sequence[FrameType] = ()) -> Collectives | None:
    """``stack``: of the main thread, innermost frame first."""
    if (dist := _distributed()) is None:
        return None
    world = dist.distributed_c10d._world
    groups = []
    for group, name in list(world.pg_names.items())[:_GROUPS]:
        ranks = sorted(members := world.pg_group_ranks[group], key=members.__getitem__)
        for backend, counter in _counters(dist, group):
            calls = tuple(map(_call, _worth_telling(_calls_of(name, counter, entries, backend))))
            if calls and calls[-1].pending and calls[-1].name in ROOTED:
                calls = (*calls[:-1], calls[-1]._replace(root=_root(dist, calls[-1].name, stack)))
            groups.append(GroupCalls(name, group.group_desc, tuple(ranks), calls, backend))
    transfer = _transfer(dist, stack) or _queued_transfer(dist, entries)
    # torch keeps what a user gives as ranks and tags, such as NumPy's numbers.
    return plain.copy(Collectives, Collectives(dist.get_rank(), tuple(groups), transfer))  # type: ignore[no-any-return]


def _distributed() -> Any:
    """torch.distributed, if this rank is in a group."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _is_pending(entry: Mapping[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def _settled_entries() -> list[dict[str, Any]]:
    """The recorder's entries, once the calls before the last one are marked as ended: gloo's thread marks a call after
    it has let the caller go on, which may have raised in the next by then. An asynchronous one is waited for in
    vain."""
    end = time.monotonic() + _MARKED
    while True:
        entries = flight_recorder.entries()
        if not any(map(_is_pending, entries[:-1])) or time.monotonic() >= end:
            return entries
        time.sleep(0.002)


def _counters(dist: Any, group: Any) -> list[tuple[str, Any]]:
    """The backends of a group with several, by name, each with what counts its calls; else the group, under ''."""
    devices = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backends = {backend: device for device, _, backend in devices}
    if len(backends) < 2:
        return [("", group)]
    return [(backend, group._get_backend(sys.modules["torch"].device(device))) for backend, device in backends.items()]


def _calls_of(
    name: str, counter: Any, entries: Sequence[Mapping[str, Any]], backend: str = ""
) -> list[Mapping[str, Any]]:
    """The calls of the group that has this name now: an earlier one may have had it, too."""
    found = [
        entry
        for entry in entries
        if entry["process_group"][0] == name
        and not entry["is_p2p"]
        and entry["profiling_name"].startswith(backend and f"{backend}:")
    ]
    newest = max((entry["pg_id"] for entry in found), default=0)
    found = [entry for entry in found if entry["pg_id"] == newest]
    if found and found[-1]["collective_seq_id"] > counter._get_sequence_number_for_group():
        return []
    return found


def _worth_telling(calls: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    pending = next((index for index, entry in enumerate(calls) if _is_pending(entry)), len(calls))
    last = max(0, len(calls) - _CALLS)
    return calls[pending : min(pending + _PENDING, last)] + calls[last:]


def _call(entry: Mapping[str, Any]) -> Call:
    operation = entry["profiling_name"]
    recorded = operation.rpartition(":")[2]
    name = _NAMES.get(recorded, recorded)
    for frame in _frames(entry):
        if frame.name in COLLECTIVES and frame.file.endswith("distributed_c10d.py"):
            name = frame.name  # the outermost of torch's own: all_gather_object, not the all_gather that it calls
    return Call(
        entry["collective_seq_id"],
        name,
        operation,
        _tensors(entry["input_sizes"], entry["input_dtypes"]),
        _tensors(entry["output_sizes"], entry["output_dtypes"]),
        _users(_frames(entry)),
        _is_pending(entry),
        time.time() - entry["time_created_ns"] / 1e9,
    )


def _frames(entry: Mapping[str, Any]) -> Iterator[Frame]:
    """Innermost first."""
    return (Frame(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))


def _tensors(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> tuple[str, ...]:
    shown = [_tensor(_DTYPES.get(dtype, dtype.lower()), size) for size, dtype in zip(sizes, dtypes, strict=False)]
    more = len(shown) - _TENSORS
    return (*shown[:_TENSORS], f"and {more} more") if more > 0 else tuple(shown)


def _tensor(dtype: str, size: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, size))}]"


def _users(frames: Iterator[Frame]) -> tuple[Frame, ...]:
    """The frames of the user's code in a stack (innermost frame first), outermost first."""
    found: list[Frame] = []
    for frame in frames:
        if frame.file == RANK_MAIN:
            break  # under fork the kernel's own frames follow
        if frame.file in cells or not is_library(frame.file):
            found.insert(0, frame)
    return tuple(found if len(found) <= _FRAMES else [found[0], *found[1 - _FRAMES :]])


def _root(dist: Any, name: str, stack: Sequence[FrameType]) -> int:
    """The rank that the main thread's call of this collective names."""
    frame = next((frame for frame in stack if is_collective(frame) and frame.f_code.co_name == name), None)
    return UNKNOWN if frame is None else _named(dist, frame, ROOTED[name])


def _named(dist: Any, frame: FrameType, role: str) -> int:
    """The rank that a call names as its ``role``, 'src' or 'dst', or by its number in the group."""
    given = frame.f_locals
    rank = given.get(role)
    if rank is None and (in_group := given.get(f"group_{role}")) is not None:
        rank = dist.get_global_rank(given.get("group") or dist.group.WORLD, in_group)
    return UNKNOWN if rank is None else rank


def _transfer(dist: Any, stack: Sequence[FrameType]) -> Transfer | None:
    """What the main thread waits in, if that is a send or a recv."""
    waits = next((frame for frame in stack if is_collective(frame)), None)
    if waits is None or waits.f_code.co_name not in ("send", "recv"):
        return None
    given = waits.f_locals
    group = given.get("group") or dist.group.WORLD
    tensor = given["tensor"]
    return Transfer(
        waits.f_code.co_name,
        dist.distributed_c10d._world.pg_names.get(group, ""),
        _named(dist, waits, "dst" if waits.f_code.co_name == "send" else "src"),
        given.get("tag", 0),
        _tensor(str(tensor.dtype).removeprefix("torch."), tensor.shape),
        _users(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name) for frame in stack),
    )


def _queued_transfer(dist: Any, entries: Sequence[Mapping[str, Any]]) -> Transfer | None:
    """What the device waits in, if that is a send or a receive: its first call that has not ended."""
    entry = next((entry for entry in entries if _is_pending(entry) and _is_queued(entry)), None)
    told = re.search(r"(send|recv) \d+(?:->|<-)(\d+)", entry["profiling_name"] if entry is not None else "")
    if entry is None or told is None:
        return None
    world = dist.distributed_c10d._world
    name = entry["process_group"][0]
    group = next((group for group, its_name in world.pg_names.items() if its_name == name), None)
    if group is None:
        return None
    call = _call(entry)
    peer = dist.get_global_rank(group, int(told.group(2)))
    return Transfer(told.group(1), name, peer, 0, ", ".join(call.inputs or call.outputs), call.frames, call.age)


def _is_queued(entry: Mapping[str, Any]) -> bool:
    """Does the device wait in it, not the host?"""
    return not entry["profiling_name"].startswith("gloo:")


def _main_stack() -> _Stack:
    """The main thread's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    lines = {(frame.f_code.co_filename, frame.f_lineno) for frame in stack} if any(map(is_collective, stack)) else set()
    return _Stack(stack, lines)
