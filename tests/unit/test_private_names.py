"""Private and undocumented names of other packages: docs/private_names.md lists them, and each is as nbspawn needs it.

A release that changes one fails here, with its name, and not as a rank that hangs. The checks of a package run in a
process of their own: some of them leave traces where they are imported (threads, hooks, a trace function).
"""

from __future__ import annotations

import ast
import ctypes
import functools
import http
import importlib
import inspect
import io
import json
import os
import pickle
import queue
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "private_names.md"
PACKAGE = ROOT / "nbspawn"


class Name(NamedTuple):
    """``name`` is as on the page, ``check`` raises if what is found there is not what nbspawn relies on. Only with
    these ``versions`` of its distribution. ``find`` gets what no import leads to: an attribute of instances."""

    name: str
    check: Callable[[Any], object]
    versions: str = ""
    find: Callable[[], Any] | None = None


def found(name: str) -> Any:
    """What a dotted name is. A module goes before an attribute of its name (``torch.multiprocessing.spawn``)."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def takes(*args: Any, **kwargs: Any) -> Callable[[Any], object]:
    """A function that can be called like this."""
    return lambda function: inspect.signature(function).bind(*args, **kwargs)


def parameters(*names: str) -> Callable[[Any], None]:
    """A function whose first parameters have these names."""

    def check(function: Any) -> None:
        assert list(inspect.signature(function).parameters)[: len(names)] == list(names)

    return check


def is_a(kind: Any) -> Callable[[Any], None]:
    def check(thing: Any) -> None:
        assert isinstance(thing, kind), thing

    return check


def is_in(source: Any, *texts: str) -> Callable[[Any], None]:
    """Holds for what is found at all, if these texts are in the source of ``source``, given by its dotted name."""

    def check(thing: Any) -> None:
        text = inspect.getsource(found(source))
        assert all(part in text for part in texts), [part for part in texts if part not in text]

    return check


def equals(value: Any) -> Callable[[Any], None]:
    def check(thing: Any) -> None:
        assert thing == value, thing

    return check


def is_there(thing: Any) -> None:
    """Nothing more is asked of it."""


def has(*names: str) -> Callable[[Any], None]:
    def check(thing: Any) -> None:
        assert not [name for name in names if not hasattr(thing, name)]

    return check


# ---------------------------------------------------------------- torch


def default_device() -> Any:
    import torch

    torch.set_default_device("cpu")
    return torch._GLOBAL_DEVICE_CONTEXT.device_context.device  # type: ignore[attr-defined]


@functools.cache
def busy_executor() -> tuple[Any, Any]:
    """One that has a thread, and that."""
    executor = ThreadPoolExecutor(1)
    executor.submit(int).result()
    (thread,) = executor._threads
    return executor, thread


def scheduled() -> Any:
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).optimizer


def wrapped_step() -> Any:
    return scheduled().step._wrapped_by_lr_sched


def has_stepped() -> Any:
    optimizer = scheduled()
    optimizer.step()
    return optimizer._opt_called


def reduced_float8() -> Any:
    import torch

    return torch.empty(1, dtype=torch.float8_e4m3fn).__reduce_ex__(5)


def is_rebuilt_from_a_storage(reduced: Any) -> None:
    import torch

    assert reduced[0] is torch._utils._rebuild_tensor_v3  # type: ignore[attr-defined]
    assert isinstance(reduced[1][0], torch.UntypedStorage)


def print_options(options: Any) -> None:
    assert {"precision", "threshold", "edgeitems", "linewidth", "sci_mode"} <= vars(options).keys()


def pool_of_threads(pool: Any) -> None:
    assert pool.cache_info().currsize == 0


def precision(get: Any) -> None:
    assert isinstance(get("cuda", "matmul"), str)


def set_precision(put: Any) -> None:
    import torch

    put("cuda", "matmul", torch._C._get_fp32_precision_getter("cuda", "matmul"))


def dumps(dump: Any) -> None:
    """A call of gloo is recorded, with all that is read of it."""
    import torch
    import torch.distributed as dist

    os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))
    [entry] = pickle.loads(dump(True, True, False))["entries"]
    [status] = pickle.loads(dump(False, False, False))["pg_status"].values()
    assert status["last_enqueued_collective"] == 1 and status["last_completed_collective"] in (-1, 1)
    dist.destroy_process_group()
    read = {
        "process_group",
        "pg_id",
        "is_p2p",
        "p2p_seq_id",
        "collective_seq_id",
        "profiling_name",
        "state",
        "retired",
        "frames",
    }
    assert read | {"input_sizes", "input_dtypes", "output_sizes", "output_dtypes"} <= entry.keys()
    assert entry["profiling_name"] == "gloo:all_reduce" and entry["input_dtypes"] == ["Float"]
    assert {"filename", "line", "name"} <= entry["frames"][0].keys()


def of_cuda(name: str) -> Any:
    """What only a build for CUDA has below torch._C."""
    import torch

    return attrgetter(name)(torch._C) if torch.version.cuda else print


def in_one_file(all_reduce: Any) -> None:
    file = inspect.unwrap(all_reduce).__code__.co_filename
    assert file.endswith(os.path.join("torch", "distributed", "distributed_c10d.py"))


def typed_storage(kind: Any) -> None:
    import torch

    memory = torch.ones(2).untyped_storage()
    made = kind(wrap_storage=memory, dtype=torch.float32, _internal=True)
    assert made._untyped_storage is memory and isinstance(memory._cdata, int)


def without_torch_function(context: Any) -> None:
    import torch

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object) -> object:
            raise AssertionError

    tensor = torch.ones(2).as_subclass(Refusing)
    with context():
        assert torch.Tensor.untyped_storage(tensor).nbytes() == 8


def asynchronous() -> Any:
    return found("torch.distributed._functional_collectives.AsyncCollectiveTensor")


def context_of_processes(kind: Any) -> None:
    made = kind([], ["file"])
    assert (made.processes, made.error_files, made.sentinels) == ([], ["file"], {})


TORCH = (
    Name("torch.cuda._raw_device_count_nvml", takes()),
    Name("torch.cuda._raw_device_count_amdsmi", takes()),
    Name("torch._C._cuda_getDeviceCount", callable, find=lambda: of_cuda("_cuda_getDeviceCount")),
    Name("torch.xpu._is_compiled", takes()),
    Name("torch.cuda._is_in_bad_fork", lambda function: equals(False)(function())),
    Name("torch._tensor_str.PRINT_OPTS", print_options),
    Name(
        "torch._GLOBAL_DEVICE_CONTEXT.device_context",
        lambda device: equals("cpu")(str(device)),
        find=default_device,
    ),
    Name("torch._C._get_fp32_precision_getter", precision, ">=2.9"),
    Name("torch._C._set_fp32_precision_setter", set_precision, ">=2.9"),
    Name("torch._C.DisableTorchFunction", without_torch_function),
    Name("torch.optim.lr_scheduler.LRScheduler.optimizer.step._wrapped_by_lr_sched", equals(True), find=wrapped_step),
    Name("torch.optim.Optimizer._opt_called", equals(True), find=has_stepped),
    Name(
        "torch.utils.data.DataLoader._iterator",
        equals(None),
        find=lambda: found("torch.utils.data.DataLoader")([])._iterator,
    ),
    Name("torch._utils._rebuild_tensor_v3", is_rebuilt_from_a_storage, find=reduced_float8),
    Name(
        "torch.storage.TypedStorage._untyped_storage", typed_storage, find=lambda: found("torch.storage.TypedStorage")
    ),
    Name("torch.UntypedStorage._cdata", is_there),
    Name("torch._C.DisableTorchFunctionSubclass", lambda context: context().__enter__),
    Name(
        "torch.nn.Parameter._fsdp_flattened",
        equals("_fsdp_flattened"),
        find=lambda: found("torch.distributed.fsdp._common_utils.FSDP_FLATTENED"),
    ),
    Name("torch.Tensor.__tensor_flatten__", takes(None), find=lambda: asynchronous().__tensor_flatten__),
    Name(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor.trigger_wait",
        takes(None),
        find=lambda: asynchronous().trigger_wait,
    ),
    Name("torch.multiprocessing.spawn.ProcessContext", context_of_processes),
    Name(
        "torch.multiprocessing.spawn.tempfile",
        is_in("torch.multiprocessing.spawn.start_processes", "tempfile.NamedTemporaryFile("),
    ),
    Name("torch.multiprocessing.start_processes", takes(print, (), 2, join=False, daemon=True, start_method="spawn")),
    Name("torch._inductor.async_compile.AsyncCompile.pool", pool_of_threads),
    Name("torch._C._distributed_c10d._dump_fr_trace", dumps, ">=2.8"),
    Name(
        "torch._C._distributed_c10d._dump_nccl_trace",
        callable,
        find=lambda: of_cuda("_distributed_c10d._dump_nccl_trace"),
    ),
    Name("torch._inductor", is_there),
    Name("torch.distributed.distributed_c10d._world", has("pg_names", "pg_group_ranks")),
    Name("torch.distributed.distributed_c10d._world.group_count", is_a(int)),
    Name("torch.distributed.ProcessGroup._get_backend", is_there),
    Name("torch.distributed.distributed_c10d._abort_process_group", parameters("group"), ">=2.6"),
    Name("torch.cuda._lazy_call", parameters("callable")),
    Name("torch._C._cuda_hasPrimaryContext", callable, find=lambda: of_cuda("_cuda_hasPrimaryContext")),
    Name("torch.distributed.ProcessGroup._get_sequence_number_for_group", is_there),
    Name("torch.distributed.distributed_c10d.all_reduce", in_one_file),
    Name("torch.distributed.distributed_c10d.destroy_process_group", parameters("group")),
    Name(
        "torch.distributed.rendezvous._create_c10d_store",
        parameters("hostname", "port", "rank", "world_size", "timeout"),
    ),
    Name(
        "torch.nn.parallel.distributed.DistributedDataParallel.__setstate__",
        is_in("torch.nn.parallel.distributed.DistributedDataParallel.__setstate__", "process_group"),
    ),
    Name(
        "torch.nn.parallel.distributed.DistributedDataParallel._comm_hooks",
        is_in("torch.nn.parallel.distributed.DistributedDataParallel.register_comm_hook", "_comm_hooks.append("),
        find=lambda: found("torch.nn.parallel.distributed"),
    ),
    Name("torch.nn.parallel.distributed.DistributedDataParallel._get_ddp_logging_data", takes(None)),
    Name(
        "torch.nn.parallel.distributed.DistributedDataParallel._static_graph_delay_allreduce_enqueued",
        is_in("torch.nn.parallel.distributed", "_static_graph_delay_allreduce_enqueued = False"),
        find=lambda: found("torch.nn.parallel.distributed"),
    ),
    Name(
        "torch.distributed.distributed_c10d._rank_not_in_group",
        is_in("torch.distributed.distributed_c10d.all_reduce", "if _rank_not_in_group(group)"),
    ),
    Name(
        "torch.ops.c10d._allgather_base_",
        lambda operator: equals("c10d::_allgather_base_")(operator._qualified_op_name),
        find=lambda: found("torch.distributed") and found("torch").ops.c10d._allgather_base_,
    ),
    Name("torch_xla._internal.pjrt.initialize_multiprocess", takes(0, 2)),
    Name("torch_xla._internal.pjrt.initialize_singleprocess", takes()),
    Name("torch_xla.runtime._init_world_size_ordinal", takes()),
    Name(
        "_XLAC._xla_runtime_is_initialized",
        lambda function: is_a(bool)(function()),
        find=lambda: found("torch_xla") and found("_XLAC._xla_runtime_is_initialized"),
    ),
    Name("jax._src.xla_bridge.backends_are_initialized", takes()),
)

# ---------------------------------------------------------------- multiprocessing


def server() -> Any:
    return found("multiprocessing.forkserver").ForkServer()


def serves(main: Any) -> None:
    takes(3, 4, [])(main)
    assert sys.version_info < (3, 14) or takes(3, 4, [], authkey_r=5)(main)


def sends_few(most: int) -> None:
    assert 16 < most <= 256


def in_a_spawn(popen: Any) -> None:
    assert popen.method == "forkserver"
    source = inspect.getsource(popen)
    assert (
        "self._fds" in source and "self.sentinel" in source and "self._launch(" in inspect.getsource(popen.__bases__[0])
    )
    takes(object())(popen._launch.__get__(object()))


def lock_of_processes() -> Any:
    return found("multiprocessing").get_context("fork").RLock()


def lock_parts(lock: Any) -> None:
    semlock = lock._semlock
    lock._make_methods()
    assert lock.acquire == semlock.acquire


def shared_number() -> Any:
    return found("multiprocessing.sharedctypes").RawValue("i", 5)


MULTIPROCESSING = (
    Name("multiprocessing.forkserver.ForkServer", is_a(type)),
    Name("multiprocessing.forkserver.ForkServer.connect_to_new_process", parameters("self", "fds")),
    Name("multiprocessing.forkserver.ForkServer.ensure_running", parameters("self")),
    Name(
        "multiprocessing.forkserver.ForkServer._forkserver_address",
        equals(None),
        find=lambda: server()._forkserver_address,
    ),
    Name(
        "multiprocessing.forkserver.ForkServer._forkserver_alive_fd",
        equals(None),
        find=lambda: server()._forkserver_alive_fd,
    ),
    Name("multiprocessing.forkserver.read_signed", takes(0)),
    Name("multiprocessing.forkserver.MAXFDS_TO_SEND", sends_few),
    Name(
        "multiprocessing.forkserver.ForkServer._forkserver_authkey",
        equals(None),
        versions=">=3.14",
        find=lambda: server()._forkserver_authkey,
    ),
    Name("multiprocessing.forkserver.main", serves),
    Name(
        "multiprocessing.resource_tracker.util",
        is_in("multiprocessing.resource_tracker.ResourceTracker", "util.spawnv_passfds(exe, args, fds_to_pass)"),
    ),
    Name("multiprocessing.resource_tracker.ensure_running", takes()),
    Name("multiprocessing.util.spawnv_passfds", parameters("path", "args", "passfds")),
    Name("multiprocessing.util._args_from_interpreter_flags", takes()),
    Name("multiprocessing.spawn.get_executable", takes()),
    Name("multiprocessing.util.Finalize", takes(None, print, ())),
    Name("multiprocessing.util._exit_function", takes()),
    Name("multiprocessing.context._concrete_contexts", lambda known: is_a(dict)(known) or known["spawn"]),
    Name("multiprocessing.context._default_context._actual_context", is_there),
    Name("multiprocessing.context._default_context._default_context", has("get_context")),
    Name(
        "multiprocessing.process.BaseProcess._identity",
        is_a(tuple),
        find=lambda: found("multiprocessing").current_process()._identity,
    ),
    Name("multiprocessing.process._parent_process", equals(None)),
    Name("multiprocessing.context.set_spawning_popen", takes(None)),
    Name("multiprocessing.context.get_spawning_popen", takes()),
    Name("multiprocessing.process.BaseProcess._Popen", is_there, find=lambda: found("multiprocessing").Process._Popen),
    Name(
        "multiprocessing.process.BaseProcess._popen",
        equals(None),
        find=lambda: found("multiprocessing").Process()._popen,
    ),
    Name("multiprocessing.process.BaseProcess._name", is_a(str), find=lambda: found("multiprocessing").Process()._name),
    Name("multiprocessing.popen_forkserver.Popen", in_a_spawn),
    Name("multiprocessing.popen_spawn_posix.Popen._launch", parameters("self", "process_obj")),
    Name("multiprocessing.spawn.get_preparation_data", takes("name")),
    Name("multiprocessing.reduction.dump", parameters("obj", "file")),
    Name("multiprocessing.reduction.ForkingPickler.dumps", takes("obj", 5)),
    Name("multiprocessing.reduction.DupFd", takes(0)),
    Name("multiprocessing.reduction.ForkingPickler._extra_reducers", is_a(dict)),
    Name("multiprocessing.synchronize.RLock._semlock", lock_parts, find=lock_of_processes),
    Name("multiprocessing.synchronize.RLock._make_methods", lock_parts, find=lock_of_processes),
    Name("multiprocessing.sharedctypes.RawValue()._wrapper", is_there, find=lambda: shared_number()._wrapper),
)

# ---------------------------------------------------------------- Python's own


def debugger() -> Any:
    return found("pdb").Pdb()


def in_pdb(*names: str) -> Callable[[Any], None]:
    return lambda method: parameters("self", *names)(method)


def policies(function: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        type(function())()


def finalizers() -> Any:
    weakref.finalize(finalizers, print)
    return weakref.finalize._registry  # type: ignore[attr-defined]


PYTHON = (
    Name("asyncio._set_running_loop", takes(None)),
    Name("asyncio.events.get_event_loop_policy", policies, "<3.14"),
    Name("asyncio.events._get_event_loop_policy", policies, ">=3.14"),
    Name("asyncio.events.set_event_loop_policy", takes(None), "<3.14"),
    Name("asyncio.events._set_event_loop_policy", takes(None), ">=3.14"),
    Name("threading._shutdown", takes()),
    Name("concurrent.futures.thread._threads_queues", is_a(weakref.WeakKeyDictionary)),
    Name("threading.Thread._args", lambda args: is_a(weakref.ref)(args[0]), find=lambda: busy_executor()[1]._args),
    Name("concurrent.futures.thread.ThreadPoolExecutor._threads", is_a(set), find=lambda: busy_executor()[0]._threads),
    Name(
        "concurrent.futures.thread.ThreadPoolExecutor._work_queue",
        is_a(queue.SimpleQueue),
        find=lambda: busy_executor()[0]._work_queue,
    ),
    Name(
        "concurrent.futures.thread.ThreadPoolExecutor._idle_semaphore",
        is_a(threading.Semaphore),
        find=lambda: busy_executor()[0]._idle_semaphore,
    ),
    Name(
        "concurrent.futures.thread.ThreadPoolExecutor._shutdown_lock",
        has("acquire", "release"),
        find=lambda: busy_executor()[0]._shutdown_lock,
    ),
    Name("enum.Enum._member_type_", equals(int), find=lambda: http.HTTPStatus._member_type_),  # type: ignore[attr-defined]
    Name("enum.Enum._value_", equals(200), find=lambda: http.HTTPStatus.OK._value_),
    Name("typing._TypedDictMeta", is_a(type)),
    Name("threading.RLock()._at_fork_reinit", lambda reset: reset(), find=lambda: threading.RLock()._at_fork_reinit),  # type: ignore[attr-defined]
    Name("pickle._Unpickler", lambda kind: equals(30)(kind(io.BytesIO(pickle.dumps(30))).load())),
    Name("pickle._Stop", lambda kind: equals(30)(kind(30).value)),
    Name("pickle._Unpickler.dispatch", lambda table: callable(table[ord(pickle.MEMOIZE)])),
    Name("atexit._clear", callable),
    Name("atexit._run_exitfuncs", callable),
    Name("weakref.finalize._registry", is_a(dict), find=finalizers),
    Name("weakref.finalize._registered_with_atexit", is_a(bool)),
    Name("weakref.finalize._index_iter", lambda numbers: is_a(int)(next(numbers))),
    Name("logging._handlerList", is_a(list)),
    Name("logging._levelToName", lambda names: equals("INFO")(names[20])),
    Name("logging._warnings_showwarning", equals(None)),
    Name("logging.Formatter._fmt", equals("%(message)s"), find=lambda: found("logging").Formatter("%(message)s")._fmt),
    Name("ctypes._SimpleCData", lambda kind: equals(True)(issubclass(found("ctypes").c_int, kind))),
    Name("ctypes.pythonapi.PyFrame_LocalsToFast", is_there, "<3.13"),
    Name(
        "argparse.ArgumentParser._actions",
        lambda actions: equals(["-h", "--help"])(actions[0].option_strings),
        find=lambda: found("argparse").ArgumentParser()._actions,
    ),
    Name("pdb.Pdb.interaction", in_pdb("frame")),
    Name("pdb.Pdb.cmdloop", in_pdb("intro")),
    Name("pdb.Pdb.set_trace", in_pdb("frame")),
    Name("pdb.Pdb.get_stack", in_pdb("f", "t")),
    Name("pdb.Pdb.format_stack_entry", takes(None, (None, 1))),
    Name("pdb.Pdb.stop_here", in_pdb("frame")),
    Name("pdb.Pdb.user_call", in_pdb("frame")),
    Name("pdb.Pdb.user_return", in_pdb("frame")),
    Name("pdb.Pdb.do_interact", in_pdb("arg")),
    Name("pdb.Pdb.nosigint", is_a(bool), find=lambda: debugger().nosigint),
    Name("pdb.Pdb.completekey", is_there, find=lambda: debugger().completekey),
    Name("pdb.Pdb.curframe", is_in("pdb.Pdb.setup", "self.curframe = "), find=lambda: None),
    Name("pdb.Pdb.quitting", is_in("bdb.Bdb._set_stopinfo", "self.quitting = False"), find=lambda: None),
    Name("pdb.Pdb.stoplineno", is_in("bdb.Bdb._set_stopinfo", "self.stoplineno = stoplineno"), find=lambda: None),
    Name("pdb.Pdb.breaks", is_a(dict), find=lambda: debugger().breaks),
    Name("pdb.Pdb.displayhook", takes(None, None)),
)

# ---------------------------------------------------------------- IPython, ipykernel, ipywidgets


@functools.cache
def shell() -> Any:
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()


def compiles_as(cache: Any) -> None:
    name = cache("a = 5", 3)
    assert "".join(found("linecache").cache[name][2]).strip() == "a = 5"


def runs_in_one_file(run_code: Any) -> None:
    assert run_code.__code__.co_filename.endswith(os.path.join("IPython", "core", "interactiveshell.py"))


def replaces_pdb(debugger_of_kernel: Any) -> None:
    source = inspect.getsource(found("ipykernel.kernelapp.IPKernelApp.init_pdb"))
    assert "pdb.Pdb = debugger.Pdb" in source and issubclass(debugger_of_kernel, found("IPython.core.debugger.Pdb"))


def front_end_debugger() -> Any:
    return found("ipykernel.debugger.Debugger")


def of_debugger(text: str) -> Callable[[Any], None]:
    return is_in("ipykernel.debugger.Debugger", text)


def zmq_stream() -> Any:
    return found("zmq.eventloop.zmqstream.ZMQStream")


def box() -> Any:
    return found("ipywidgets").VBox([])


def counts(widget: Any) -> None:
    widget._view_count = 0
    widget._view_count = None
    assert widget.model_id


def autoreload() -> Any:
    return found("nbspawn._rank.edit.autoreload").autoreload  # which Python 3.12 cannot import from IPython 7 as it is


def updates(function: Any) -> None:
    class Old:
        def value(self) -> int:
            return 1

    class New:
        def value(self) -> int:
            return 2

    made = Old()
    function(Old, New)
    assert (made.value(), type(made)) == (2, New)


def rules(pairs: Any) -> None:
    found("nbspawn._rank.edit.autoreload")
    kinds = [([], []), (print, print), (updates, updates)]
    assert [any(applies(*pair) for applies, _ in pairs) for pair in kinds] == [False, False, True]


IPYTHON = (
    Name("IPython.core.debugger.Pdb", has("interaction", "stop_here", "format_stack_entry", "get_stack")),
    Name("IPython.core.debugger.InterruptiblePdb", replaces_pdb),
    Name(
        "IPython.core.compilerop.CachingCompiler._filename_map",
        is_a(dict),
        ">=8",
        lambda: found("IPython.core.compilerop.CachingCompiler")()._filename_map,
    ),
    Name("IPython.core.compilerop.CachingCompiler.get_code_name", in_pdb("raw_code", "transformed_code", "number")),
    Name(
        "IPython.core.compilerop.CachingCompiler.cache",
        compiles_as,
        find=lambda: found("IPython.core.compilerop.CachingCompiler")().cache,
    ),
    Name(
        "linecache._ipython_cache",
        is_a(dict),
        "<8",
        lambda: found("IPython.core.compilerop.CachingCompiler")() and found("linecache")._ipython_cache,
    ),
    Name("IPython.core.interactiveshell.InteractiveShell._showtraceback", in_pdb("etype", "evalue", "stb")),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.showtraceback",
        is_in("IPython.core.interactiveshell.InteractiveShell.showtraceback", "self._showtraceback(etype, value, stb)"),
    ),
    Name("IPython.core.interactiveshell.InteractiveShell._tee", in_pdb("channel"), ">=9"),
    Name("IPython.core.interactiveshell.InteractiveShell.init_user_ns", in_pdb()),
    Name("IPython.core.interactiveshell.InteractiveShell.init_hooks", in_pdb()),
    Name("IPython.core.interactiveshell.InteractiveShell.init_virtualenv", in_pdb()),
    Name("IPython.core.interactiveshell.InteractiveShell.system_raw", in_pdb("cmd")),
    Name("IPython.core.interactiveshell.InteractiveShell.transform_cell", in_pdb("raw_cell")),
    Name("IPython.core.interactiveshell.InteractiveShell.atexit_operations", in_pdb()),
    Name("IPython.core.interactiveshell.InteractiveShell.run_code", runs_in_one_file),
    Name("IPython.core.interactiveshell.InteractiveShell.user_global_ns", is_a(property)),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.custom_exceptions",
        is_a(tuple),
        find=lambda: shell().custom_exceptions,
    ),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.display_trap.hook",
        lambda hook: equals(hook)(shell().displayhook),
        find=lambda: shell().display_trap.hook,
    ),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.history_manager.enabled",
        is_a(bool),
        find=lambda: shell().history_manager.enabled,
    ),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.InteractiveTB.structured_traceback",
        takes(ValueError, ValueError(), None),
        find=lambda: shell().InteractiveTB.structured_traceback,
    ),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.SyntaxTB.structured_traceback",
        takes(SyntaxError, SyntaxError(), []),
        find=lambda: shell().SyntaxTB.structured_traceback,
    ),
    Name(
        "IPython.core.interactiveshell.InteractiveShell.strdispatchers",
        lambda table: is_a(dict)(table["complete_command"].strs),
        find=lambda: shell().strdispatchers,
    ),
    Name(
        "IPython.extensions.autoreload.AutoreloadMagics._reloader",
        has("enabled", "check_all", "modules", "skip_modules"),
        find=lambda: autoreload().AutoreloadMagics(shell())._reloader,
    ),
    Name(
        "IPython.extensions.autoreload.superreload",
        parameters("module", "reload", "old_objects"),
        find=lambda: autoreload().superreload,
    ),
    Name("IPython.extensions.autoreload.update_generic", updates, find=lambda: autoreload().update_generic),
    Name("IPython.extensions.autoreload.update_class", updates, find=lambda: autoreload().update_class),
    Name("IPython.extensions.autoreload.UPDATE_RULES", rules, find=lambda: autoreload().UPDATE_RULES),
    Name(
        "IPython.core.displayhook.DisplayHook",
        has(
            *("quiet", "write_output_prompt", "write_format_data", "update_user_ns", "log_output"),
            *("fill_exec_result", "finish_displayhook"),
        ),
    ),
    Name("IPython.core.displaypub.DisplayPublisher.publish", takes(None, {}, {}, transient={}, update=False)),
    Name("ipykernel.kernelbase.Kernel._allow_stdin", is_there),
    Name("ipykernel.kernelbase.Kernel._publish_status", in_pdb("status", "channel", "parent")),
    Name(
        "ipykernel.kernelbase.Kernel.shell_handlers",
        is_in("ipykernel.kernelbase.Kernel.__init__", "self.shell_handlers = {}"),
        find=lambda: None,
    ),
    Name("ipykernel.kernelbase.Kernel.shell_stream", is_there, "<7"),
    Name("ipykernel.kernelbase.Kernel.shell_channel_thread", is_there, ">=7"),
    Name(
        "ipykernel.subshell_manager.SubshellManager._shell_channel_to_main",
        is_in(
            "ipykernel.subshell_manager.SubshellManager.__init__",
            'self._shell_channel_to_main = SocketPair(self._context, "main")',
        ),
        ">=7",
        lambda: None,
    ),
    Name("ipykernel.socket_pair.SocketPair.to_stream", is_there, ">=7"),
    Name(
        "ipykernel.iostream.OutStream.pub_thread",
        is_in("ipykernel.iostream.OutStream", "self.pub_thread = pub_thread"),
        find=lambda: found("ipykernel.iostream.OutStream"),
    ),
    Name("ipykernel.zmqshell", is_there),
    Name("jupyter_client.session.Session.feed_identities", in_pdb("msg_list")),
    Name("jupyter_client.session.Session.deserialize", in_pdb("msg_list")),
    Name(
        "jupyter_client.session.Session.unpack",
        lambda unpack: equals({"a": 1})(unpack(b'{"a": 1}')),
        find=lambda: found("jupyter_client.session").Session().unpack,
    ),
    Name(
        "zmq.eventloop.zmqstream.ZMQStream._recv_callback",
        is_in("zmq.eventloop.zmqstream.ZMQStream._handle_recv", "self._recv_callback"),
        find=zmq_stream,
    ),
    Name("zmq.eventloop.zmqstream.ZMQStream._run_callback", in_pdb("callback")),
    Name("zmq.eventloop.zmqstream.ZMQStream.flush", in_pdb("flag")),
    Name("ipywidgets.VBox._view_count", counts, find=box),
)

# ---------------------------------------------------------------- what a payload is made by


def mapping() -> Any:
    with tempfile.NamedTemporaryFile() as file:
        return found("numpy").memmap(file.name, shape=(8,), mode="w+")._mmap


def openblas() -> Any:
    found("numpy")
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line)
    return ctypes.c_int.in_dll(ctypes.CDLL(path), "blas_cpu_number")


def found_closure() -> Callable[[], int]:
    shared = 1
    return lambda: shared


def shares_cells(reduced: Any) -> None:
    _, (*_, closure), (_, slots), *_ = reduced
    assert len(closure) == 1
    assert len(slots["__closure__"]) == 1


CLOUDPICKLE = (
    Name("cloudpickle.Pickler.reducer_override", in_pdb("obj")),
    Name(
        "cloudpickle.Pickler.globals_ref",
        equals({}),
        find=lambda: found("cloudpickle").Pickler(found("io").BytesIO(), protocol=5, buffer_callback=print).globals_ref,
    ),
    Name(
        "cloudpickle.Pickler._dynamic_function_reduce",
        shares_cells,
        find=lambda: found("cloudpickle").Pickler(found("io").BytesIO())._dynamic_function_reduce(found_closure()),
    ),
    Name("cloudpickle.cloudpickle._lookup_class_or_track", takes("id", type)),
    Name(
        "cloudpickle.cloudpickle._should_pickle_by_reference",
        lambda by_name: equals((True, False))((by_name(Path), by_name(type("Local", (), {})))),
    ),
    Name("cloudpickle.cloudpickle._get_or_create_tracker_id", lambda make: is_a(str)(make(type("Local", (), {})))),
    Name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS", is_a(weakref.WeakKeyDictionary)),
    Name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID", is_a(weakref.WeakValueDictionary)),
)

# ---------------------------------------------------------------- other libraries of a notebook


def state() -> Any:
    return found("accelerate.state").PartialState(cpu=True)


def states_share(made: Any) -> None:
    kind = type(made)
    assert vars(made) == kind._shared_state and kind.__getattr__ and "device" in kind._known_attrs
    assert kind._shared_state["_cpu"] is True
    kind._shared_state.clear()
    assert not vars(kind(cpu=True)).get("unknown")


def made_of_both(kind: Any) -> None:
    assert isinstance(kind._shared_state, dict) and "_from_accelerator" in inspect.signature(kind.__init__).parameters
    assert "_mixed_precision" in inspect.getsource(kind)


def accelerator() -> Any:
    return found("accelerate").Accelerator(cpu=True)


def has_prepared_nothing(made: Any) -> None:
    assert (made._models, made._optimizers, made._dataloaders) == ([], [], [])


def training_arguments() -> Any:
    return found("transformers").TrainingArguments(output_dir="out", use_cpu=True, report_to=[])


def knows_its_devices(made: Any) -> None:
    assert made.device is not None  # makes it look
    assert {"_n_gpu", "_setup_devices"} <= vars(made).keys()


def bar() -> Any:
    made = found("tqdm.std").tqdm(range(3), file=found("io").StringIO())
    assert made in type(made)._instances
    return made


def draws_to(made: Any) -> None:
    assert hasattr(made.fp, "_wrapped") and callable(made.sp) and made.status_printer(made.fp)


def inherits(kind: Any) -> None:
    assert issubclass(kind, found("tqdm.std").tqdm)
    assert {"__init__", "display", "close", "reset", "__iter__", "update"} <= vars(kind).keys()


def console() -> Any:
    return found("rich.console").Console(file=found("io").StringIO())


def setters_are_enough(made: Any) -> None:
    assert {"is_jupyter", "is_interactive"} <= vars(made).keys()  # plain attributes, which properties stand in for


def options(registered: Any) -> None:
    assert registered["display.max_rows"].defval == 60


OTHERS = (
    Name("accelerate.state.PartialState._shared_state", states_share, find=state),
    Name("accelerate.state.PartialState._known_attrs", states_share, find=state),
    Name(
        "accelerate.state.AcceleratorState._shared_state",
        made_of_both,
        find=lambda: found("accelerate.state.AcceleratorState"),
    ),
    Name("accelerate.state.GradientState._shared_state", lambda shared: is_a(dict)(shared)),
    *(
        Name(f"accelerate.Accelerator.{prepared}", has_prepared_nothing, find=accelerator)
        for prepared in ("_models", "_optimizers", "_dataloaders")
    ),
    Name(
        "accelerate.Accelerator._is_accelerate_prepared",
        is_in("accelerate.Accelerator.prepare", "._is_accelerate_prepared = True"),
        find=lambda: None,
    ),
    Name("transformers.TrainingArguments._n_gpu", knows_its_devices, find=training_arguments),
    Name("transformers.TrainingArguments._setup_devices", knows_its_devices, find=training_arguments),
    Name("lightning.fabric.utilities.imports._IS_INTERACTIVE", is_a(bool)),
    Name("lightning_utilities.core.rank_zero.rank_zero_only", callable),
    Name("tqdm.std.tqdm._instances", draws_to, find=bar),
    Name("tqdm.std.TqdmDefaultWriteLock", has("th_lock", "create_mp_lock")),
    Name("tqdm.notebook.tqdm_notebook", inherits),
    Name("tqdm.utils.ObjectWrapper._wrapped", draws_to, find=bar),
    Name("hydra._internal.utils.is_notebook", takes()),
    Name("joblib.externals.loky.reusable_executor._executor", equals(None)),
    Name("joblib.externals.loky.reusable_executor._executor_kwargs", equals(None)),
    Name("rich.console.Console.is_jupyter", setters_are_enough, find=console),
    Name("rich.console.Console.is_interactive", setters_are_enough, find=console),
    Name("pydantic._internal._generics.get_cached_generic_type_early", takes(type, int)),
    Name("pydantic._internal._generics.set_cached_generic_type", takes(type, (int,), type, type, (int,))),
    Name("numpy.blas_cpu_number", lambda size: equals(True)(size.value > 0), find=openblas),
    Name("numpy.memmap._mmap", has("__len__"), find=mapping),
    Name("ray.experimental.internal_kv._internal_kv_get", takes(b"key")),
    Name("pandas._config.config._registered_options", options),
    Name("pandas._config.config._deprecated_options", is_a(dict)),
    Name(
        "pydevd.PyDB._WaitForConnectionThread",
        lambda kind: equals(True)("create_server_socket" in kind.run.__code__.co_names),
    ),
    Name("pydevd.create_server_socket", parameters("host", "port")),
    Name("pydevd.SetupHolder", has("setup")),
    Name("pydevd.skip_subprocess_arg_patch", takes()),
    Name(
        "_pydev_bundle.pydev_monkey._get_apply_arg_patching",
        is_in("_pydev_bundle.pydev_monkey", "if _get_apply_arg_patching():"),
        find=lambda: found("pydevd") and found("_pydev_bundle.pydev_monkey._get_apply_arg_patching"),
    ),
    Name("pydevd.get_global_debugger", takes()),
    Name("pydevd.PyDB._files_filtering", is_in("pydevd.PyDB", "self._files_filtering = FilesFiltering()"), find=bool),
    Name(
        "_pydevd_bundle.pydevd_filtering.FilesFiltering._exclude_filters",
        is_in("_pydevd_bundle.pydevd_filtering.FilesFiltering", "self._exclude_filters = exclude_filters"),
        find=bool,
    ),
    Name("_pydevd_bundle.pydevd_filtering.ExcludeFilter", takes("/nbspawn/**", True, True)),
    Name("ipykernel.debugger.Debugger._forward_message", parameters("self", "msg")),
    Name(
        "ipykernel.debugger.Debugger.breakpoint_list", of_debugger("self.breakpoint_list = {}"), find=front_end_debugger
    ),
    Name("ipykernel.debugger.Debugger.process_request", parameters("self", "message")),
    Name(
        "ipykernel.debugger.Debugger.event_callback",
        of_debugger("self.event_callback = event_callback"),
        find=front_end_debugger,
    ),
    Name("ipykernel.debugger.Debugger.is_started", of_debugger("self.is_started = False"), find=front_end_debugger),
    Name(
        "ipykernel.debugger.Debugger.stopped_threads",
        of_debugger("self.stopped_threads = set()"),
        find=front_end_debugger,
    ),
    Name("ipykernel.debugger.Debugger.accept_variable", parameters("self", "variable_name")),
    Name("ipykernel.kernelbase.Kernel.control_thread", is_there),
    Name("pydevd._is_attached", lambda function: is_there(function())),
    Name(
        "pydevd.settrace",
        takes(suspend=False, patch_multiprocessing=False, wait_for_ready_to_run=False, notify_stdin=False),
    ),
    Name("pydevd.stoptrace", takes()),
    Name(
        "pydevd.PyDB.check_alive_thread",
        is_in("pydevd.PyDB", "self.check_alive_thread = CheckAliveThread(self)"),
        find=bool,
    ),
    Name("pydevd.PyDB.connect", parameters("self", "host", "port")),
    Name("pydevd.PyDB.initialize_network", takes(None, None, terminate_on_socket_close=False)),
    Name("pydevd.PyDB.on_initialize", takes(None)),
    Name("pydevd.PyDB.block_until_configuration_done", takes(None, cancel=None)),
    Name(
        "pydevd.PyDB.trace_dispatch",
        is_in("pydevd.PyDB", "self.trace_dispatch = partial(_trace_dispatch, self)"),
        find=bool,
    ),
    Name("pydevd.PyDB.enable_tracing", takes(None, None, apply_to_all_threads=True)),
    Name("pydevd.PyDB.disable_tracing", takes(None)),
    Name("pydevd.PyDB.set_tracing_for_untraced_contexts", takes(None)),
    Name("pydevd.PyDB.do_wait_suspend", parameters("self", "thread", "frame", "event", "arg", "exception_type")),
    Name("pydevd.PyDB.set_suspend", takes(None, None, 0)),
    Name("pydevd.PyDB.do_stop_on_unhandled_exception", parameters("self", "thread", "frame", "frames_byid", "arg")),
    Name("_pydevd_bundle.pydevd_comm_constants.CMD_SET_BREAK", is_a(int)),
    Name("_pydevd_bundle.pydevd_comm_constants.CMD_THREAD_SUSPEND", is_a(int)),
    Name("_pydevd_bundle.pydevd_thread_lifecycle.resume_threads", takes("*")),
    Name("_pydevd_bundle.pydevd_constants.STATE_RUN", is_a(int)),
    Name("_pydevd_bundle.pydevd_constants.GlobalDebuggerHolder", has("global_dbg")),
    Name("_pydevd_bundle.pydevd_extension_api.StrPresentationProvider", has("can_provide", "get_str")),
    Name("_pydevd_bundle.pydevd_extension_api.TypeResolveProvider", has("can_provide")),
    Name("_pydevd_bundle.pydevd_extension_utils.EXTENSION_MANAGER_INSTANCE", has("get_extension_classes")),
    Name("_pydevd_sys_monitoring.pydevd_sys_monitoring.reset_thread_local_info", takes()),
    Name("pydevd_tracing.restore_sys_set_trace_func", takes()),
)

# ---------------------------------------------------------------- the tests

DISTRIBUTIONS = {  # of a name's first part, where it has another name
    "_XLAC": "torch_xla",
    "_pydev_bundle": "debugpy",
    "_pydevd_bundle": "debugpy",
    "_pydevd_sys_monitoring": "debugpy",
    "pydevd": "debugpy",
    "pydevd_tracing": "debugpy",
    "lightning_utilities": "lightning-utilities",
    "zmq": "pyzmq",
    "jupyter_client": "jupyter-client",
    "linecache": "IPython",
}
TABLE = (*TORCH, *MULTIPROCESSING, *PYTHON, *IPYTHON, *CLOUDPICKLE, *OTHERS)


def distribution(name: str) -> str:
    """Whose name it is; 'python' for Python's own."""
    top = name.partition(".")[0]
    return DISTRIBUTIONS.get(top, "python" if top in sys.stdlib_module_names else top)


def version(of: str) -> str | None:
    """The installed one, None if there is none."""
    if of == "python":
        return ".".join(map(str, sys.version_info[:3]))
    try:
        return metadata.version(of)
    except metadata.PackageNotFoundError:
        return None


def applies(name: Name) -> bool:
    """Not installed counts: then the test says so, by a skip."""
    installed = version(distribution(name.name))
    return installed is None or not name.versions or SpecifierSet(name.versions, prereleases=True).contains(installed)


def check(of: str) -> dict[str, str]:
    """In a child: what is wrong with each name of a distribution, by name; '' for nothing."""
    errors = {}
    if of == "debugpy":
        importlib.import_module("debugpy.server")  # which has pydevd in its folder
    for name in TABLE:
        if distribution(name.name) == of and applies(name):
            try:
                name.check(name.find() if name.find is not None else found(name.name))
                errors[name.name] = ""
            except Exception as error:
                errors[name.name] = f"{type(error).__name__}: {error}"
    return errors


@functools.cache
def errors(of: str) -> dict[str, str]:
    text = f"import json, test_private_names as here; print('FOUND', json.dumps(here.check({of!r})), flush=True)"
    text += "; import os; os._exit(0)"
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = next((line for line in child.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, child.stderr
    read: dict[str, str] = json.loads(line.removeprefix("FOUND "))
    return read


@pytest.mark.extended
@pytest.mark.parametrize("name", [name.name for name in TABLE if applies(name)])
def test_the_name_is_as_nbspawn_needs_it(name: str) -> None:
    of = distribution(name)
    if version(of) is None:
        pytest.skip(f"{of} is not installed")
    assert errors(of)[name] == ""


def rows() -> dict[str, list[str]]:
    """The page's: name -> the files that use it."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            name, used, *_ = (cell.strip() for cell in line.strip("|").split(" | "))
            found[name.strip("`")] = re.findall(r"`([\w/.]+\.py)`", used)
    return found


def test_the_page_lists_the_names_that_are_tested() -> None:
    assert sorted(rows()) == sorted(name.name for name in TABLE)


def test_the_page_tells_where_each_is_used() -> None:
    for name, files in rows().items():
        assert files, name
        last = re.split(r"\W+", name)[-1].lstrip("_")  # which Python 3.14 may have put before it
        for file in files:
            assert re.search(rf"{last}\b", (PACKAGE / file).read_text()), f"{file} does not use {name}"


DOCUMENTED = {"_exit", "_getframe", "_current_frames", "_replace", "_asdict", "_fields"}
"""By Python itself, for all their underscore."""


def private(tree: ast.AST) -> Iterator[str]:
    """Private attributes that the code asks of anything but ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nbspawn"):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant))


def own(tree: ast.AST) -> Iterator[str]:
    """What the code names itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def test_the_page_is_complete() -> None:
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    folders = {folder.name for folder in PACKAGE.iterdir() if folder.is_dir()}
    known = DOCUMENTED | folders | {name for tree in trees.values() for name in own(tree)}
    known |= {part for name in rows() for part in re.split(r"\W+", name)}
    for file, tree in trees.items():
        used = {name for name in private(tree) if name.startswith("_") and not name.startswith("__") and name != "_"}
        assert used <= known, (
            f"{file.relative_to(PACKAGE)} uses {sorted(used - known)}: docs/private_names.md lists them"
        )


def test_a_replaced_name_leaves_the_rest_and_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own resource tracker, or fork server, may be started while nbspawn's begins."""
    from multiprocessing import forkserver, resource_tracker, util

    from nbspawn._engine.start.multiprocessing_adapter import in_own_group

    started: list[list[str]] = []
    monkeypatch.setattr(util, "spawnv_passfds", lambda path, arguments, fds: started.append(arguments))
    tracker: Any = resource_tracker
    with in_own_group():
        module = tracker.util
        assert module is not util and vars(module).keys() == vars(util).keys()
        assert vars(forkserver)["util"] is util
        module.spawnv_passfds(b"python", ["python", "-c", "main()"], [])
        other = threading.Thread(target=module.spawnv_passfds, args=(b"python", ["python", "-c", "main()"], []))
        other.start()
        other.join()
    assert tracker.util is util
    assert started == [
        ["python", "-c", "import sys; sys.path[:1] = []; import os; os.setpgid(0, 0); main()"],
        ["python", "-c", "main()"],
    ]
