"""The process group made anew in a kept rank: models follow it, and what else was made with the old one is refused.

After an error, or Stop, one rank may have made collective calls that others have not. gloo's groups go on working when
they are destroyed, if something holds them: its next call would be matched with a peer's earlier one.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any, NoReturn

from nbspawn._protocol.messages import Regroup
from nbspawn._rank.group import device_groups, environment, stores
from nbspawn._rank.program import in_thread
from nbspawn._rank.program.info import RankInfo

_ABORTED = 10.0  # seconds
_NAMES = 1000  # groups that are made between two Stops or errors: more than anyone makes
_WHY = "ranks were stopped, or one of them failed, and all process groups have been made anew"


def regroup(info: RankInfo, command: Regroup) -> None:
    """Make the group anew, with every other rank, and have the models that used the old one use it."""
    info.regrouped = command.number
    if not command.grouped:
        return
    import torch.distributed as dist

    models, old = [], None
    if dist.is_initialized():
        kind = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
        models = [model for model in found if "_lazy_init_ran" in vars(model)]  # else Stop came while it was made
        old = dist.group.WORLD
        _end_groups(dist)
    _refuse_ended_groups(dist.distributed_c10d)
    environment.make_group(info, stores.store(info.launch, str(command.number), command.store))
    # Groups are named by their number, which torch begins anew. By its name an old one is found still (by a mesh, and
    # functional collectives), and would be another now.
    world = dist.distributed_c10d._world
    world.group_count = max(world.group_count, _NAMES * command.number)
    for model in models:
        _refuse_backward(model)
        if model.process_group is old:
            _renew(model, old)
        elif model.process_group is not dist.group.WORLD:
            model.register_forward_pre_hook(_refuse)
    del old
    gc.collect()  # the old group, with a thread and its sockets, is in a cycle with the traceback of what broke it


def _end_groups(dist: Any) -> None:
    """NCCL's are aborted: to destroy them would wait for their calls, which do not end. Raises RuntimeError if that
    hangs (https://github.com/pytorch/pytorch/issues/149153)."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is None or not device_groups.exist():
        dist.destroy_process_group()
    elif not in_thread.ends_within(_ABORTED, abort):
        raise RuntimeError(f"NCCL does not end the old process group within {_ABORTED:.0f} s")


def _renew(model: Any, old: Any) -> None:
    """Make a model's reducer anew: it is in C++, and holds the group that it was made with. Another one is made when a
    model is unpickled; what pickling leaves out is done here."""
    import torch.distributed as dist

    if str(model._get_ddp_logging_data().get("comm_hook", "")).startswith("BuiltinCommHook"):
        model.register_forward_pre_hook(_refuse)  # which is nowhere but in the old reducer
        return
    hooks, model._comm_hooks = model._comm_hooks, []
    model.process_group = dist.group.WORLD
    model.__setstate__(model.__getstate__())
    model._static_graph_delay_allreduce_enqueued = False  # the old reducer's: with a static graph nothing was reduced
    for hook, state in hooks:
        if getattr(state, "process_group", None) is old:
            state.process_group = dist.group.WORLD
        model.register_comm_hook(dist.group.WORLD if state is old else state, hook)


def _refuse_backward(model: Any) -> None:
    """Have a backward raise for what a forward has computed before: the new reducer waits for a forward, and would
    reduce nothing."""
    import torch

    name, parts, there = type(model).__name__, set(map(id, model.modules())), weakref.ref(model)

    def too_late(_: Any) -> NoReturn:
        raise RuntimeError(f"the forward of this {name} came before its process group ended: {_WHY}. Run it again.")

    def begin(part: Any, _: Any) -> None:
        if there() is None or (id(part) in parts and torch.is_grad_enabled()):
            for hook in hooks:
                hook.remove()

    too_late.__torch_unserialize__ = True  # type: ignore[attr-defined]  # the model may be saved: without a warning
    hooks = [parameter.register_hook(too_late) for parameter in model.parameters() if parameter.requires_grad]
    hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(begin))


def _refuse(module: Any, _: Any) -> NoReturn:
    name = type(module).__name__
    raise RuntimeError(f"this {name} was made with a process group that has ended: {_WHY}. Make it anew, too.")


def _refuse_ended_groups(c10d: Any) -> None:
    """Have each collective call of torch.distributed's refuse a group that is none of the present ones."""
    asks = c10d._rank_not_in_group
    if hasattr(asks, "__wrapped__"):
        return

    @functools.wraps(asks)
    def rank_not_in_group(group: Any) -> bool:
        if isinstance(group, c10d.ProcessGroup) and group not in c10d._world.pg_map:
            raise RuntimeError(
                f"the process group of this call has ended: {_WHY}. Make anew what holds it, too (a group of "
                "new_group(), FSDP, an optimizer)."
            )
        return bool(asks(group))

    c10d._rank_not_in_group = rank_not_in_group
