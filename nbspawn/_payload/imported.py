"""Which modules a job will import: those that its code names, those of what it is sent, and those that torch imports
at the first use of something."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType

from nbspawn._payload import importable

_LATE = "torch._dynamo"
_LATE_NAMES = {"optim", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "distribute_tensor"}
_LATE_MODULES = (
    *("torch._dynamo", "torch.optim", "torch.nn.parallel.distributed", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.distributed.pipelining", "torch.distributed.checkpoint"),
    *("torch.distributed.optim", "torch.distributed._composable", "torch.distributed.algorithms"),
    *("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers"),
)
"""What has torch import ``_LATE``, and much else with it."""


def by_source(text: str, flags: int = 0) -> frozenset[str]:
    """The modules that a cell's ``text`` imports; none if it is no Python, which its ranks will say."""
    try:
        code = compile(text, "<cell>", "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(by_code(code))


def by_code(code: CodeType) -> Iterator[str]:
    """The modules that the code imports, and that of what torch imports when the code uses it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval
    if not _LATE_NAMES.isdisjoint(code.co_names):
        yield _LATE
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from by_code(constant)


def with_late(modules: Iterable[str]) -> frozenset[str]:
    """These modules, with what they have torch import. The user's own modules are looked into."""
    modules = set(modules)
    for name in filter(importable.own_file, list(modules)):
        for value in list(vars(sys.modules[name]).values()):
            kind = type(value)  # not isinstance, which asks a proxy for its class
            attribute = "__name__" if issubclass(kind, ModuleType) else "__module__"
            if issubclass(kind, (ModuleType, type, FunctionType)):
                with suppress(Exception):  # a lazy module, or a metaclass, may raise at any attribute
                    modules.add(str(getattr(value, attribute)))
    late = any(f"{name}.".startswith(f"{one}.") for name in modules for one in _LATE_MODULES)
    return frozenset(modules | {_LATE} if late else modules)
