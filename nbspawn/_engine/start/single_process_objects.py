"""Which of the notebook's objects were made for one process, and stay so in ranks; and what to do about it.

What a rank can make its own there needs no word: accelerate's states, and with them TrainingArguments and transformers'
Trainer (_payload/accelerate_state.py), if the order of its data does not come from the random numbers that its process
has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from nbspawn._engine.start.reachable import findings
from nbspawn._payload.diagnosis import attributes, parts

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_PLUGINS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


_ALONE = "{was} made in the notebook, for one process: each rank would train alone. Make {it} in the cell."
_SHUFFLES = "{was} made in the notebook: ranks would shuffle {its} data differently. Make {it} in the cell."
_HAS_PREPARED = "{has} prepared things in the notebook, for one process: make them and call prepare() in the cell."
_PREPARED = "{was} prepared in the notebook, for one process: make {it} and call prepare() in the cell."
_SAME_NUMBERS = (
    "{was} made in the notebook, without a seed: all ranks draw the same numbers. Make {it} in the cell, or from a "
    "seed with the rank, np.random.default_rng([seed, rank])."
)
_NO_PLUGIN = "{was} made in the notebook, where {it} kept no plugin: make {it} in the cell."
_ONE = {"was": "was", "has": "has", "it": "it", "its": "its"}
_SEVERAL = {"was": "were", "has": "have", "it": "them", "its": "their"}


def notes(variables: Mapping[str, object]) -> tuple[str, ...]:
    """A sentence for those of these variables, and of what they use, that are such objects; one for all of a kind."""
    found: dict[str, list[str]] = {}
    if any(library in sys.modules for library in (*_LIGHTNING, "transformers", "accelerate")):
        for path, reason in findings(variables, _reason):
            found.setdefault(reason, []).append(path)
    if generators := [path for path, value in _first_parts(variables) if _draws_same_numbers(value)]:
        found[_SAME_NUMBERS] = generators
    return tuple(_sentence(sorted(paths), reason) for reason, paths in sorted(found.items()))


def _sentence(paths: list[str], reason: str) -> str:
    *most, last = paths
    return f"{', '.join(most)}{' and ' * bool(most)}{last} {reason.format(**(_SEVERAL if most else _ONE))}"


def _first_parts(variables: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The variables, and what functions among them use: not all that these lead to, which may take a millisecond."""
    for name, value in variables.items():
        yield name, value
        if type(value) is FunctionType:
            yield from ((name + step, part) for step, part in parts(value))


def _draws_same_numbers(value: Any) -> bool:
    """Is it a generator of numpy that was made without a seed? One with a seed does what it would under torchrun."""
    random: Any = sys.modules.get("numpy.random")
    if type(value) is not getattr(random, "Generator", None):
        return False
    seeds = getattr(value.bit_generator, "seed_seq", None)
    return isinstance(entropy := getattr(seeds, "entropy", None), int) and entropy >= 1 << 64


def _reason(value: Any) -> str | None:
    packages = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    for base, package in zip(type(value).__mro__, packages, strict=True):
        if package in _LIGHTNING and base.__name__ in ("Trainer", "Fabric"):
            return _ALONE
        if package == "transformers" and base.__name__ == "Trainer" and getattr(value.args, "data_seed", None) is None:
            return _SHUFFLES
        if package == "accelerate" and base.__name__ == "Accelerator":
            if value._models or value._optimizers or value._dataloaders:
                return _HAS_PREPARED
            if any(os.environ.get(plugin) == "true" for plugin in _PLUGINS):
                return _NO_PLUGIN
    if attributes(value).get("_is_accelerate_prepared"):  # accelerate would not prepare it again
        return _PREPARED
    # A LightningModule that was fitted holds on to its Trainer. The one that fits it in the cell takes its place.
    return None if any(package in _LIGHTNING for package in packages) else ""
