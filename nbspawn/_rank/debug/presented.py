"""How the front end's debugger lists tensors, arrays and modules: in one line, with the parts of tensors and modules.

pydevd alone gives a tensor's repr, of which JupyterLab shows the type only, and below it all of its attributes, to read
some of which prints warnings.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from nbspawn._rank.report import variables

_FEW = 8  # values that are listed, where a tensor has no more
_MOST = 20  # parts of a tensor
_ATTRIBUTES = "shape", "dtype", "device", "requires_grad"


def present() -> None:
    """Have pydevd, which is loaded, list them so."""
    with suppress(KeyError, AttributeError):  # another pydevd
        api: Any = sys.modules["_pydevd_bundle.pydevd_extension_api"]
        manager: Any = sys.modules["_pydevd_bundle.pydevd_extension_utils"].EXTENSION_MANAGER_INSTANCE
        manager.get_extension_classes(api.StrPresentationProvider).insert(0, _Line())
        manager.get_extension_classes(api.TypeResolveProvider).insert(0, _Parts())


class _Line:
    """A StrPresentationProvider of pydevd's."""

    def can_provide(self, kind: type, name: str) -> bool:
        return _is_one(kind, ("torch", "Tensor"), ("torch.nn", "Module"), ("numpy", "ndarray"), ("pandas", "DataFrame"))

    def get_str(self, value: Any) -> str:
        text = variables.summary(value)
        what, colon, values = text.partition(": ")  # without it, its values may not be looked at
        if colon and _is_one(type(value), ("torch", "Tensor")):
            value = value.detach()
            if not value.dim():
                return what.replace("scalar", values, 1)  # it comes first: JupyterLab cuts the line off
            few = 1 < value.numel() <= _FEW
        else:
            few = bool(colon) and _is_one(type(value), ("numpy", "ndarray")) and 1 < value.size <= _FEW
        return f"{what}: {' '.join(repr(value).split())}" if few else text

    def get_str_in_context(self, value: Any, context: str) -> str:
        return self.get_str(value) if context in ("hover", "watch") else repr(value)


class _Parts:
    """A TypeResolveProvider of pydevd's."""

    def can_provide(self, kind: type, name: str) -> bool:
        return _is_one(kind, ("torch", "Tensor"), ("torch.nn", "Module"))

    def get_contents_debug_adapter_protocol(self, value: Any, fmt: object = None) -> list[tuple[str, Any, str]]:
        return _of_tensor(value) if _is_one(type(value), ("torch", "Tensor")) else _of_module(value)


def _of_tensor(value: Any) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    for name in _ATTRIBUTES:
        with suppress(Exception):  # a nested tensor has no shape
            found.append((name, getattr(value, name), f".{name}"))
    if value.is_leaf and value.grad is not None:
        found.append(("grad", value.grad, ".grad"))
    torch: Any = sys.modules["torch"]
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_nested:
        rows = range(min(len(value), _MOST)) if value.dim() else ()
        found += [(f"[{row}]", value[row], f"[{row}]") for row in rows]
    return found


def _of_module(value: Any) -> list[tuple[str, Any, str]]:
    """Its submodules, parameters, buffers and other attributes."""
    named: list[tuple[str, Any]] = []
    with suppress(AttributeError):  # its class has not called super().__init__()
        named += [*value.named_children(), *value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
    named += [(name, one) for name, one in vars(value).items() if not name.startswith("_")]
    return [(name, one, f".{name}" if name.isidentifier() else f".get_submodule({name!r})") for name, one in named]


def _is_one(kind: type, *names: tuple[str, str]) -> bool:
    """Is it one of these classes, or a subclass? Their modules may not be imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return any(isinstance(one, type) and issubclass(kind, one) for one in found)
