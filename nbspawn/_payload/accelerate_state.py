"""accelerate's states of a process (PartialState and the like): those of the notebook's objects made anew in a rank.

All objects of such a class share one dict. It is filled when the first of them is made, in the notebook with "one
process" and its device. In a rank it is emptied, and filled again when one of them is first asked for something. So an
Accelerator, TrainingArguments or a Trainer of the notebook speaks of the rank that it is used in; without that, N ranks
would each train alone, silently. Nothing here imports accelerate: a process without it has none of its objects.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

_MODULE = "accelerate.state"
_OF_PROCESS = ("PartialState", "AcceleratorState")
_OF_GRADIENTS = "GradientState"
_SETTINGS = {  # what the user has asked for: the attribute that holds it, and the argument
    "_cpu": "cpu",
    "_mixed_precision": "mixed_precision",
    "dynamo_plugin": "dynamo_plugin",
    "deepspeed_plugins": "deepspeed_plugin",
    "parallelism_config": "parallelism_config",
}
_made_anew: set[type] = set()


def forget() -> None:
    """In a rank that was forked from the notebook: forget the notebook's state."""
    accelerate = sys.modules.get(_MODULE)
    if accelerate is None:
        return
    for name in _OF_PROCESS:
        cls = getattr(accelerate, name)
        if cls._shared_state:
            _make_anew_when_asked(cls, _settings(cls))
    for name in _OF_PROCESS:
        getattr(accelerate, name)._shared_state.clear()
    gradients = getattr(accelerate, _OF_GRADIENTS)
    if gradients._shared_state:
        plugin = gradients._shared_state.get("plugin_kwargs", {})
        gradients._shared_state.clear()
        _gradient_state(plugin)


def is_state(kind: type) -> bool:
    """Are objects of this class such states?"""
    return kind.__module__ == _MODULE and kind.__name__ in (*_OF_PROCESS, _OF_GRADIENTS)


def reduce_state(state: Any) -> Any:
    """The pickle of such an object: what the user has asked for, without what was found out."""
    cls = type(state)
    if cls.__name__ == _OF_GRADIENTS:
        return _gradient_state, (cls._shared_state.get("plugin_kwargs", {}),)
    return _state, (cls.__name__, _settings(cls))


def is_training_arguments(kind: type) -> bool:
    """Is this transformers' class, or a subclass?"""
    return any(
        (base.__module__, base.__name__) == ("transformers.training_args", "TrainingArguments") for base in kind.__mro__
    )


def reduce_training_arguments(arguments: Any) -> Any:
    """Pickle transformers' arguments without the device, and the number of GPUs, that they have found: in the rank they
    look again."""
    make, what, state, *rest = arguments.__reduce_ex__(5)
    found = ("_setup_devices", "_n_gpu")
    return make, what, {name: value for name, value in state.items() if name not in found}, *rest


def _settings(cls: Any) -> dict[str, Any]:
    state = cls._shared_state
    return {argument: state[name] for name, argument in _SETTINGS.items() if state.get(name) is not None}


def _state(name: str, settings: dict[str, Any]) -> Any:
    cls = getattr(importlib.import_module(_MODULE), name)
    _make_anew_when_asked(cls, settings)
    state = object.__new__(cls)
    state.__dict__ = cls._shared_state
    return state


def _gradient_state(plugin: dict[str, Any]) -> Any:
    state = getattr(importlib.import_module(_MODULE), _OF_GRADIENTS)()
    state.plugin_kwargs = plugin
    return state


def _make_anew_when_asked(cls: Any, settings: dict[str, Any]) -> None:
    """Have the state made when it is asked for: that makes a process group, as under torchrun, and a cell may not use
    it at all."""
    if cls in _made_anew:
        return
    _made_anew.add(cls)
    make, missing = cls.__init__, cls.__getattr__
    if cls.__name__ == "AcceleratorState":
        settings = {**settings, "_from_accelerator": True}

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not (args or kwargs or cls._shared_state):
            kwargs = settings
        make(self, *args, **kwargs)

    def __getattr__(self: Any, name: str) -> Any:
        if cls._shared_state or (name.startswith("_") and name not in cls._known_attrs):
            return missing(self, name)
        cls()
        return getattr(self, name)

    cls.__init__, cls.__getattr__ = __init__, __getattr__
