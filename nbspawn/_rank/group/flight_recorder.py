"""Torch's flight recorder: the collectives that this process has called, as torch tells of them.

It remembers the last calls of each process (TORCH_FR_BUFFER_SIZE, environment.py), in all groups; each kind of backend
has a recorder of its own: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

_DEVICE = "_dump_nccl_trace"
"""Of NCCL: its calls return at once, and its work is queued on the device."""
_HOST = "_dump_fr_trace"
"""Of gloo."""

Unended = Mapping[str, tuple[int, int]]
"""By the backend's number in this process: of its last call, and of the last one that has ended."""


def entries() -> list[dict[str, Any]]:
    """The recorded entries, in the order of the calls of each backend; nothing where torch has no recorder."""
    found = []
    for dump in _dumps(_HOST, _DEVICE):
        with _without_inductor(sys.modules["torch"]):
            found += pickle.loads(dump(True, True, False)).get("entries", ())
    return _with_ends_of_batches(found)


def _with_ends_of_batches(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries, with all of a batch of sends and receives (``batch_isend_irecv``) marked as ended: torch marks only
    the entry that closes it. That is no call of the user's, and has the number of the collective before."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        batch = list(takewhile(functools.partial(_is_closed_by, entry), reversed(found)))
        for each in batch:
            each["state"], each["retired"] = entry["state"], entry["retired"]
        if not batch:
            found.append(entry)
    return found


def _is_closed_by(last: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    closes = last["profiling_name"].endswith(":coalesced") and entry["is_p2p"]
    return closes and all(entry[number] == last[number] for number in ("pg_id", "p2p_seq_id"))


def unended(device: bool) -> Unended:
    """The backends with calls that have not ended: on the ``device``, or on the host. Takes 10 us. A backend that was
    aborted keeps what it had."""
    calls = {
        backend: (one["last_enqueued_collective"], one["last_completed_collective"])
        for dump in _dumps(_DEVICE if device else _HOST)
        for backend, one in pickle.loads(dump(False, False, False)).get("pg_status", {}).items()
    }
    return {backend: (last, ended) for backend, (last, ended) in calls.items() if last > ended}


def _dumps(*names: str) -> Iterator[Any]:
    module = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    return filter(None, (getattr(module, name, None) for name in names))


@contextmanager
def _without_inductor(torch: Any) -> Iterator[None]:
    """torch maps frames by torch._inductor if that is there, and by asking it imports it, which takes a second:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/profiler/python/combined_traceback.cpp."""
    if "_inductor" in vars(torch):
        yield
        return
    torch._inductor = None
    try:
        yield
    finally:
        if vars(torch).get("_inductor", torch) is None:
            del torch._inductor
