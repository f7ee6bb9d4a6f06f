"""Which of the notebook's objects were made for one process, and stay so in ranks; and what to do about it.

What a rank can make its own there needs no word: accelerate's states, and with them TrainingArguments and transformers'
Trainer (_payload/accelerate_state.py), if the order of its data does not come from the random numbers that its process
has.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nbspawn._payload.diagnosis import parts

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_PLUGINS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


def notes(variables: Mapping[str, object]) -> tuple[str, ...]:
    """A sentence for each of these variables, and of those that functions among them use, that is such an object."""
    used = dict(variables)
    for function in variables.values():
        if issubclass(type(function), types.FunctionType):
            used.update((step.removeprefix(" -> "), part) for step, part in parts(function))
    told = []
    for name in sorted(used):
        with suppress(Exception):  # a proxy may raise whatever it is asked, and is none of these objects
            told.append(_note(name, used[name]))
    return tuple(filter(None, told))


def _note(name: str, value: Any) -> str:
    for base in type(value).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _LIGHTNING and base.__name__ in ("Trainer", "Fabric"):
            return (
                f"{name} was made in the notebook, for one process: each rank would train alone. Make it in the cell."
            )
        if package == "transformers" and base.__name__ == "Trainer" and getattr(value.args, "data_seed", None) is None:
            return f"{name} was made in the notebook: ranks would shuffle its data differently. Make it in the cell."
        if package == "accelerate" and base.__name__ == "Accelerator":
            if value._models or value._optimizers or value._dataloaders:
                return f"{name} has prepared things in the notebook, for one process: call prepare() in the cell."
            if any(os.environ.get(plugin) == "true" for plugin in _PLUGINS):
                return f"{name} was made in the notebook, where it kept no plugin: make it in the cell."
    return ""
