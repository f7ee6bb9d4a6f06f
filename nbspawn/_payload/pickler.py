"""How one object becomes a pickle stream and its large buffers, and an object again in another process.

Functions, classes and the like of the notebook travel by value (_payload/by_value.py). Besides:

- memory of tensors goes out of band, as numpy's does by itself. Torch's tensors of every layout take themselves apart
  into storages and only the storages are done here, so that whatever torch adds to tensors goes on working.
- CUDA, XLA and TPU tensors travel as copies in CPU memory. In a rank they are on the device of that rank, whichever
  they were on in the kernel; in the kernel they stay on the CPU, for a kernel that has initialised CUDA or XLA can fork
  no rank, and one that has initialised a TPU holds it. Those of CUDA are copied when the buffers are written, piece by
  piece: a large model has room in the host's memory once, but often not twice.
- what can be pickled only while a process is being started (multiprocessing's queues and locks, tensors that the
  user moved to shared memory) becomes one of the *spawn arguments*, and the stream holds its index.
- an array or a tensor that is a file's contents is that in the rank (_payload/mapped_files.py); those that lie over
  one memory lie over one memory there (_payload/one_memory.py).
- an open text file does not travel, where cloudpickle sends a copy of its text.
- what each process has of its own (``sys.stdout``, the shell) is the rank's there (_payload/own.py).
- what accelerate and transformers know of their process they find out anew in the rank (_payload/accelerate_state.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import context, reduction
from typing import Any

from nbspawn._accelerators import kinds
from nbspawn._payload import accelerate_state, mapped_files, originals, own
from nbspawn._payload.by_value import ByValue, WithAnnotated, loading
from nbspawn._payload.cloudpickle_adapter import Reducer
from nbspawn._payload.one_memory import Memories, Region
from nbspawn._protocol import shared_memory

OUT_OF_BAND = 64 * 1024  # bytes from which a buffer is worth a place of its own

_WITHOUT_STORAGE = ("xla", "tpu")  # nothing of these can be taken apart; torch pickles a copy that remembers the device

# Their reducers in multiprocessing are only there because plain pickle once could not do these types; cloudpickle can.
_ORDINARY_MODULES = {"builtins", "functools", "array"}


class Pickler(ByValue):
    """Pickles one object. ``returning`` is the way from a rank to the kernel: all by value, in the kernel's CPU memory.

    After ``dump``, ``buffers`` and ``spawn_arguments`` belong to the stream. The buffers are views of the object's
    memory, or stand for it on a GPU, and keep it. ``descriptors`` is how many go with the spawn arguments.
    """

    def __init__(
        self, namespace: dict[str, Any] | None, returning: bool = False, regions: Sequence[Region] = ()
    ) -> None:
        super().__init__(namespace, _digest if returning else None)
        self.memories = Memories(regions)
        self.buffers: list[shared_memory.Large] = []
        self.spawn_arguments: list[object] = []
        self._returning = returning
        self._mappings = mapped_files.Mappings()
        self._storages: dict[int, Any] = {}
        self._shared_storages = 0
        self._fds: set[int] = set()

    @property
    def descriptors(self) -> int:
        return self._shared_storages + len(self._fds)

    def keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = shared_memory.raw(buffer)
        if raw.nbytes < OUT_OF_BAND:
            return True
        self.buffers.append(raw)
        return False

    def reducer(self, kind: type) -> Reducer | None:
        chosen = self._by_kind(kind)
        if not originals.replaced:
            return chosen

        def reduce(obj: Any) -> Any:
            reduced = originals.reduce(obj)
            return chosen(obj) if reduced is NotImplemented and chosen is not None else reduced

        return reduce

    def _by_kind(self, kind: type) -> Reducer | None:
        if reducer := own.reducer(kind, self._returning) or self._torch_reducer(kind):
            return reducer
        if not self._returning:
            if accelerate_state.is_state(kind):
                return accelerate_state.reduce_state
            if accelerate_state.is_training_arguments(kind):
                return accelerate_state.reduce_training_arguments
            if mapped_files.is_array(kind):
                return self._mappings.reduce_array
            if kind is getattr(sys.modules.get("numpy"), "ndarray", None):
                return self.memories.reduce_array
            if kind.__module__.partition(".")[0] == "pandas":
                return self.memories.reduce_of_pandas
        return self._process_bound if _needs_process_start(kind) else super().reducer(kind)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        reduced = own.builtin(function)
        return super()._reduce_function(function) if reduced is NotImplemented else reduced

    def is_by_value(self, function: types.FunctionType) -> bool:
        return originals.is_wrapper(function)

    def _torch_reducer(self, kind: type) -> Reducer | None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if issubclass(kind, torch.Tensor):
            return self._tensor
        if kind is torch.device:
            return None if self._returning else _device
        if issubclass(kind, torch.storage.TypedStorage):
            return lambda typed: (_typed_storage, (typed._untyped_storage, typed.dtype))
        return self._storage if issubclass(kind, torch.UntypedStorage) else None

    def _tensor(self, tensor: Any) -> Any:
        torch = sys.modules["torch"]
        if self._returning:
            tensor = _worth_returning(tensor, torch)
        elif tensor.requires_grad and not tensor.is_leaf:
            raise TypeError("a tensor that autograd computed cannot leave the process that has its history")
        reduced = tensor.__reduce_ex__(5)
        if type(tensor) is torch.Tensor and reduced[0].__name__ == "_rebuild_tensor_v3":
            # uint16, float8: torch writes an untyped storage and, by way of torch.load, expects a typed one.
            storage, *rest = reduced[1]
            return reduced[0], (_typed_storage(storage, torch.uint8), *rest)
        return reduced

    def _storage(self, storage: Any) -> Any:
        first = self._storages.setdefault(storage._cdata, storage)
        if first is not storage:  # two handles of one memory: one memory in the rank, too
            return _itself, (first,)
        device = storage.device.type
        if device == "cpu" and not self._returning and (reduced := mapped_files.reduce_storage(storage)):
            return reduced
        if device == "cpu" and (self._returning or not storage.is_shared()):
            shared = None if self._returning else self.memories.reduce_storage(storage)
            return shared or (_load_storage, (_memory(storage),))
        if self._returning or device in kinds.GPU_TYPES:
            late = device in kinds.GPU_TYPES and storage.nbytes() >= OUT_OF_BAND
            memory = _memory_of_device(storage) if late else _memory(storage.cpu())
            return _load_storage if self._returning else _load_on_own_device, (memory,)
        if device != "cpu":
            return NotImplemented
        # As a tensor of bytes, because torch.multiprocessing knows how to share tensors.
        torch = sys.modules["torch"]
        argument = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        try:
            _rehearse(argument)
        except OSError:  # torch.from_file(..., shared=False) says that it is shared, and has no descriptor
            return _load_storage, (_memory(storage),)
        self._shared_storages += torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
        return _storage_of_argument, self._spawn_argument(argument)

    def _process_bound(self, obj: Any) -> Any:
        if isinstance(obj, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)):
            if not hasattr(obj, "_wrapper"):  # of a type that is somewhere in shared memory; this one is not
                return NotImplemented
        if self._returning:
            raise TypeError(f"a {type(obj).__name__} can only be handed to a process that is being started")
        self._fds |= _rehearse(obj)
        return _argument, self._spawn_argument(obj)

    def _spawn_argument(self, obj: object) -> tuple[int]:
        self.spawn_arguments.append(obj)
        return (len(self.spawn_arguments) - 1,)


def _digest(obj: object) -> str:
    """A digest of what is pickled of an object on the way back from a rank."""
    digest = hashlib.sha256()
    pickler = Pickler(None, returning=True)
    pickler.dump(obj, _Sink(digest.update))
    for buffer in pickler.buffers:
        digest.update(buffer[:])
    return digest.hexdigest()


class _Sink:
    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.write = write


def _worth_returning(tensor: Any, torch: Any) -> Any:
    """A result as plain values: the history stays in the rank, and `batch[0]` does not take the whole batch along."""
    if not tensor.is_leaf:
        tensor = tensor.detach()
    if type(tensor) is torch.Tensor and tensor.device.type in _WITHOUT_STORAGE:
        tensor = tensor.cpu()
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad:
        if tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size() + OUT_OF_BAND:
            return tensor.clone()
    return tensor


def _memory(storage: Any) -> pickle.PickleBuffer:
    memory: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # which may be a copy that nothing else keeps
    return pickle.PickleBuffer(memory)


def _memory_of_device(storage: Any) -> pickle.PickleBuffer:
    # Other threads will read it, and would wait for their own stream: this waits for what this thread's computes.
    storage[:1].cpu()
    return pickle.PickleBuffer(shared_memory.DeviceBuffer(storage.nbytes(), partial(_copied, storage)))


def _copied(storage: Any, start: int, end: int) -> memoryview:
    torch = sys.modules["torch"]
    copy = mmap.mmap(-1, end - start, mmap.MAP_PRIVATE)  # malloc keeps much of what it has freed, of each thread
    torch.frombuffer(copy, dtype=torch.uint8).untyped_storage().copy_(storage[start:end])
    return memoryview(copy)


def _needs_process_start(kind: type) -> bool:
    module = str(kind.__module__)
    if module.startswith(("multiprocessing.", "torch.multiprocessing.")) or module == "multiprocessing":
        return not issubclass(kind, BaseException)
    return kind in reduction.ForkingPickler._extra_reducers and module not in _ORDINARY_MODULES  # type: ignore[attr-defined]


def _rehearse(obj: object) -> set[int]:
    """Pickle ``obj`` as the start of a process would: now, while an error can still be put down to a variable. Returns
    the descriptors that the process would get.

    A queue that was made for fork, for one, is refused only there.
    """
    before = context.get_spawning_popen()
    process = _StandIn()
    context.set_spawning_popen(process)  # type: ignore[arg-type]
    try:
        reduction.ForkingPickler.dumps(obj)
    finally:
        context.set_spawning_popen(before)
    return process.fds


class _StandIn:
    """A process about to be started, as far as reducers ask."""

    DupFd = int

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.add(fd)
        return fd


# ---------------------------------------------------------------- loading: what the stream calls

_current = threading.local()  # the load that this thread is in


def loads(
    stream: bytes | memoryview,
    buffers: Iterable[bytearray | memoryview],
    spawn_arguments: Sequence[object] = (),
    namespace: dict[str, Any] | None = None,
) -> Any:
    """The object again; functions of the notebook get ``namespace`` (an empty one for None) as their globals."""
    before = getattr(_current, "spawn_arguments", ())
    _current.spawn_arguments, _current.name = spawn_arguments, ""
    try:
        with loading({"__name__": "__main__"} if namespace is None else namespace):
            return pickle.loads(stream, buffers=buffers)
    finally:
        _current.spawn_arguments = before


def by_name(variables: Mapping[str, object]) -> WithAnnotated:
    """The variables, to be pickled under their names: while they are loaded ``being_loaded`` tells which one is."""
    return WithAnnotated(variables, {_Name(name): value for name, value in variables.items()})


def being_loaded() -> str:
    """The variable that this thread has begun to load last."""
    return getattr(_current, "name", "")


class _Name:
    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _begin, (self._name,)


def _begin(name: str) -> str:
    _current.name = name
    return name


def _argument(index: int) -> object:
    return _current.spawn_arguments[index]


def _storage_of_argument(index: int) -> Any:
    return _current.spawn_arguments[index].untyped_storage()


def _load_storage(buffer: bytearray | memoryview) -> Any:
    import torch

    # frombuffer refuses an empty buffer
    bytes_ = (
        torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return bytes_.untyped_storage()


def _device(device: Any) -> Any:
    """``cuda:0`` is the notebook's GPU, as its tensors are on that: with all ranks on one GPU, NCCL would hang."""
    return (kinds.own_gpu, ()) if device.type in kinds.GPU_TYPES and device.index is not None else NotImplemented


def _load_on_own_device(buffer: bytearray | memoryview) -> Any:
    """In the rank: load a storage on its own device. Where CUDA does not work (``--env CUDA_VISIBLE_DEVICES=``) that is
    the CPU."""
    return _load_storage(buffer).to(device=kinds.own_gpu())


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _itself(obj: object) -> object:
    return obj
