"""What else holds memory of a GPU on which a rank has run out of it: the notebook's kernel, and its other ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbspawn._process import reached
from nbspawn._process.garbage import uncollected
from nbspawn._process.tensors import Holding
from nbspawn._render.text import size

if TYPE_CHECKING:
    from nbspawn._session.pool import Pool

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError: .*?\bGPU (\d+) has\b")
_NAMED = 3  # variables
_LITTLE = 0.01  # of the whole: a smaller variable is not named
_EARLIER = re.compile(r"Out|_oh|_+\d*")
"""Values of earlier cells, which IPython keeps."""


def advice(variables: dict[str, Any], pool: Pool, sessions: Mapping[str, Pool], errors: Sequence[str]) -> Iterator[str]:
    """Sentences about these ``errors`` of ranks of ``pool``; none unless a GPU had no room."""
    gpus = sorted({int(number) for error in errors for number in _OUT_OF_MEMORY.findall(error)})
    options, torch = pool.options, sys.modules["torch"]
    if not gpus or options.on is not None:
        return
    # The user's own allocator keeps no statistics, and a session may be ending: the error must be shown all the same.
    with suppress(Exception), uncollected():
        same_numbers = not any("VISIBLE_DEVICES" in name for name in options.env)
        if same_numbers and torch.cuda.is_initialized():
            found = reached.by(variables).holdings.values()
            yield from (_of_kernel(gpu, found, variables, torch) for gpu in gpus if torch.cuda.memory_reserved(gpu))
        for name, other in list(sessions.items()):
            held = sum(max(0, device) for _, device, _ in other.memory()) if other.alive and other is not pool else 0
            if held and other.options.on is None:
                at = f" @{name}" if name else ""
                yield f"Other ranks{at} hold {size(held)} of GPU memory: `%ranks stop{at}` ends them."


def _of_kernel(gpu: int, holdings: Iterable[Holding], variables: dict[str, Any], torch: Any) -> str:
    device, reserved = f"cuda:{gpu}", torch.cuda.memory_reserved(gpu)
    text = f"The notebook's kernel itself holds {size(reserved)} of {device}"
    large = [one for one in holdings if one.devices.get(device, 0) > _LITTLE * reserved]
    large = sorted(large, key=lambda one: -one.devices[device])[:_NAMED]
    if not large:
        return f"{text}. `torch.cuda.empty_cache()` in the notebook frees what is unused of it."
    what = ", ".join(f"{one.name} {size(one.devices[device])}" for one in large)
    names = dict.fromkeys(name for one in large for name in (one.name, *one.also))
    own = [name for name in names if name in variables and not _EARLIER.fullmatch(name)]
    commands = [f"del {', '.join(own)}"] if own else []
    if any(_EARLIER.fullmatch(name) for name in names):  # %reset leaves `_` in a namespace that `del` does not reach
        commands = ["%reset -f out", *(f"%xdel {name}" for name in own)]
    run = ", ".join(f"`{command}`" for command in (*commands, "torch.cuda.empty_cache()"))
    return f"{text} ({what}). To free that, run in the notebook {run}; what the cell needs of it, make in the cell."
