"""What takes this rank's memory: its tensors by variable, what it shares, what torch's allocator holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._process import reached
from nbspawn._process.garbage import uncollected
from nbspawn._process.tensors import Holding
from nbspawn._protocol import gauges
from nbspawn._protocol.memory import DeviceMemory, Held, Memory
from nbspawn._rank.notebook import namespace
from nbspawn._rank.report import naming

_VARIABLES = 100  # that are reported each; the rest is one number
_NAME = 60  # characters
_TEXT = 300  # characters of a description
_SUMMARY = 8000  # characters
_DEVICES = 8
_ALSO = 2  # further variables that are named

_ROLLUP = re.compile(r"^(Rss|Shared_Clean|Shared_Dirty): +(\d+) kB", re.MULTILINE)


def report() -> Memory:
    """What takes the memory of this rank."""
    return of(namespace.of_rank())


def of(variables: dict[str, Any]) -> Memory:
    """What takes the memory of this process, whose variables are these. May run beside the user's code, in another
    thread."""
    with uncollected():  # which would look at all that is held meanwhile, and may end what holds the largest
        walk = reached.by(variables)
        unreached, largest = walk.unreached()
        holder = "" if largest is None else naming.holder(largest)
    holdings = sorted((one for one in walk.holdings.values() if one.size), key=lambda one: -one.size)
    rest = holdings[_VARIABLES:]
    resident, shared = _process()
    return Memory(
        resident,
        shared,
        gauges.peak(),
        sum(one.devices.get("cpu", 0) for one in (*holdings, unreached)),
        _pinned(),
        tuple(_held(one, naming.way(one.place), naming.container(one.place)) for one in holdings[:_VARIABLES]),
        Held("", sum(one.size for one in rest), f"{len(rest)} variables" if rest else ""),
        _held(unreached, "", holder),
        _devices(),
        walk.partial,
    )


def _held(holding: Holding, way: str, within: str) -> Held:
    """A holding in words. ``way`` leads to the largest tensor, which is directly ``within`` something."""
    largest = holding.largest
    if largest is None:
        return Held("", 0, "")
    tensor = f"{largest.dtype}[{', '.join(map(str, largest.shape))}]"
    if largest.own < largest.size:
        tensor += f", a view of {_amount(largest.size)}"
    noun = {0: "tensors", holding.count: "arrays"}.get(holding.arrays, "tensors and arrays")
    alike = holding.alike[largest.dtype, largest.shape]
    within = f" in {within}" if within else ""
    if holding.count == 1:
        text = f"{way} {tensor}".strip() if way else f"{tensor}{within}"
    elif alike == holding.count:
        text = f"{holding.count:,} {noun} {tensor}{within}"
    elif alike > holding.count / 2:
        text = f"{holding.count:,} {noun}, {alike:,} of them {tensor}{within}"
    else:
        text = f"{holding.count:,} {noun}, largest {f'{way} {tensor}'.strip()}{'' if way else within}"
    text = ", ".join([text, *_further(holding)])
    return Held(_cut(holding.name, _NAME), holding.size, _cut(text, _TEXT))


def _further(holding: Holding) -> Iterator[str]:
    if holding.gradients:
        yield f"{_amount(holding.gradients)} of it gradients"
    if holding.graphs:
        yield f"{f'{holding.graphs:,} ' if holding.count > 1 else ''}with an autograd graph"
    if holding.shared:
        yield f"{_part(holding.shared, holding.size)}in shared memory"
    if holding.mapped:
        yield f"{_part(holding.mapped, holding.size)}sent by the notebook, shared until it is changed"
    for device, size in holding.devices.items():
        if device != "cpu":
            yield f"{_part(size, holding.size)}on {device}"
    if names := [name for name in holding.also if not name.startswith("_")]:
        more = f" and {len(names) - _ALSO} more" if len(names) > _ALSO else ""
        yield f"also in {', '.join(names[:_ALSO])}{more}"


def _process() -> tuple[int, int]:
    """Resident bytes, and how many of them other processes have, too (-1: not known)."""
    try:
        rollup = dict(_ROLLUP.findall(Path("/proc/self/smaps_rollup").read_text()))
    except OSError:  # macOS, gVisor
        return gauges.memory()[0], -1
    return int(rollup["Rss"]) * 1024, (int(rollup["Shared_Clean"]) + int(rollup["Shared_Dirty"])) * 1024


def _devices() -> tuple[DeviceMemory, ...]:
    """The memory of the GPUs that this process uses."""
    accelerator = kinds.in_use()
    if accelerator is None:
        return ()
    module, found = accelerator.module, []
    tell = getattr(module, "memory_summary", None)  # XPU has none
    for number in range(min(module.device_count(), _DEVICES)):
        allocated, reserved = module.memory_allocated(number), module.memory_reserved(number)
        if reserved:
            name, peak = f"{accelerator.type}:{number}", module.max_memory_allocated(number)
            summary = tell(number, abbreviated=True)[:_SUMMARY] if tell else ""
            load = accelerator.load(number)
            found.append(DeviceMemory(name, allocated, peak, reserved - allocated, summary, load))
    return tuple(found)


def _pinned() -> int:
    """What torch holds in page-locked memory, in use or not; 0 where torch does not tell."""
    accelerator = kinds.in_use()
    if accelerator is None or not hasattr(accelerator.module, "host_memory_stats"):
        return 0
    return int(accelerator.module.host_memory_stats().get("allocated_bytes.current", 0))


def _part(size: int, whole: int) -> str:
    return "" if size == whole else f"{_amount(size)} "


def _amount(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} kB"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
