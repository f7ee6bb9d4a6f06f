"""Payloads, through real processes: a rank here is a child that maps the file and answers with a Value."""

from __future__ import annotations

import gc
import io
import multiprocessing.pool
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from textwrap import dedent
from typing import Any

import pytest
from kernels import Kernel, ok

from nbspawn._accelerators import kinds
from nbspawn._payload import pickler
from nbspawn._payload.packing import Packed, UnpicklableError, Value, load, pack, pack_variables, track_classes
from nbspawn._protocol import shared_memory
from nbspawn._protocol.messages import Result, Returned
from nbspawn._protocol.wire import Decoder, encode_event, load_event

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("torch.multiprocessing")

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["torch.multiprocessing", "cloudpickle"])
spawn = multiprocessing.get_context("spawn")

Check = Callable[[Any, dict[str, Any]], object]


class Fd:
    """An int on this side; on the other side, the descriptor's number there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return detach, (reduction.DupFd(self.fd),)


def detach(dup: Any) -> int:
    return int(dup.detach())


def rank_main(
    fds: tuple[int, ...], sizes: tuple[int, ...], spawn_arguments: tuple[object, ...], check: Check, answer: Any
) -> None:
    namespace = {"__name__": "__main__", "rank": 0}
    obj = load(fds, sizes, spawn_arguments, namespace)
    shared_memory.close(fds)
    answer.send(Value.of(check(obj, namespace)))


def ask_rank(packed: Packed, check: Check, context: Any = forkserver) -> Any:
    """What ``check`` says of the loaded object in a new process."""
    receiver, sender = context.Pipe(duplex=False)
    args = (tuple(map(Fd, packed.fds)), packed.sizes, packed.spawn_arguments, check, sender)
    process = context.Process(target=rank_main, args=args, daemon=True)
    process.start()
    sender.close()
    try:
        with receiver:
            return receiver.recv().get()
    finally:
        process.join()


def notebook(source: str, **variables: object) -> dict[str, Any]:
    """The namespace of a notebook in which ``source`` was run."""
    namespace: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(compile(dedent(source), "<notebook>", "exec"), namespace)
    return namespace


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def whole(obj: Any, namespace: dict[str, Any]) -> Any:
    return obj


# ---------------------------------------------------------------- tensors and arrays


def tensors() -> dict[str, Any]:
    base = torch.arange(40_000, dtype=torch.float32)
    linear = torch.nn.Linear(200, 200)
    tied = torch.nn.Sequential(linear, torch.nn.Linear(200, 200))
    tied[1].weight = linear.weight
    complex_ = torch.randn(3, 4, dtype=torch.complex64)
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    parameter.note = "kept"
    return {
        "base": base,
        "view": base[100:300].view(20, 10).t(),
        "bits": base.view(torch.int32),
        "tied": tied,
        "parameter": parameter,
        "leaf": torch.ones(2, requires_grad=True),
        "bf16": torch.randn(50_000).bfloat16(),
        "uint16": torch.arange(5).to(torch.uint16),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "coo": torch.eye(300).to_sparse(),
        "csr": torch.eye(30).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(7),
        "expanded": torch.ones(1).expand(100_000),
        "meta": torch.empty(10, device="meta"),
        "storage": base.untyped_storage(),
        "array": numpy.arange(100_000),
        "small_array": numpy.arange(10.0)[::2],
        "fortran": numpy.asfortranarray(numpy.ones((200, 300))),
        "strings": numpy.array(["a", None], dtype=object),
        "bytes": bytearray(100_000),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.nn.Module):
        return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    if isinstance(a, torch.Tensor):
        if any(getattr(a, what) != getattr(b, what) for what in ("shape", "dtype", "layout", "requires_grad")):
            return False
        if a.is_meta:
            return b.is_meta
        if a.layout is torch.strided and not a.is_quantized:
            return torch.equal(a, b) and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
        dense = torch.Tensor.dequantize if a.is_quantized else torch.Tensor.to_dense
        return same(dense(a), dense(b))
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all()) and a.dtype == b.dtype and b.flags.writeable
    return a == b if isinstance(a, bytearray) else a.tolist() == b.tolist()


def poke(obj: dict[str, Any], namespace: dict[str, Any]) -> list[str]:
    """Aliasing and writing, in the rank. Returns what is wrong."""
    checks = {}
    obj["base"][100] = -1.0
    checks["a view sees its base"] = obj["view"][0, 0].item() == -1.0
    checks["a view of another dtype, too"] = obj["bits"].view(torch.float32)[100].item() == -1.0
    checks["a storage, too"] = obj["storage"].data_ptr() == obj["base"].data_ptr()
    checks["strides stay"] = obj["view"].stride() == (1, 10) and obj["expanded"].stride() == (0,)
    checks["tied weights"] = obj["tied"][0].weight is obj["tied"][1].weight
    checks["attributes of a Parameter"] = obj["parameter"].note == "kept"
    checks["aligned"] = all(obj[name].data_ptr() % 64 == 0 for name in ("base", "bf16"))
    for name in ("bf16", "array", "fortran", "small_array", "bytes"):
        obj[name][0] = 5
    obj["tied"](torch.ones(200)).sum().backward()
    checks["gradients"] = obj["tied"][0].weight.grad is not None
    return [what for what, right in checks.items() if not right]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize", "ignore:TypedStorage")
@pytest.mark.parametrize(
    "context", [forkserver, pytest.param(spawn, marks=pytest.mark.extended)], ids=["forkserver", "spawn"]
)
def test_tensors_and_arrays_travel_and_stay_the_ranks_own(context: Any) -> None:
    sent = tensors()
    with pack(sent) as packed:
        assert ask_rank(packed, poke, context) == []
        assert sent["base"][100] == 100 and sent["array"][0] == 0  # the notebook's are untouched ...
        for back in (ask_rank(packed, whole, context), load(packed.fds, packed.sizes)):
            wrong = [name for name in sent if not same(sent[name], back[name])]
            assert wrong == []  # ... and so are those of other ranks


def test_large_buffers_are_out_of_band_and_small_ones_are_not() -> None:
    with pack([torch.zeros(100_000), torch.zeros(10)]) as packed:
        stream, *large = packed.sizes
        assert large == [400_000] and stream < 2_000


def test_views_travel_once() -> None:
    base = torch.zeros(1000, 1000)
    with pack([base, *base.unbind()]) as packed:
        assert sum(packed.sizes) < 1.2 * base.nbytes


def double(obj: Any, namespace: dict[str, Any]) -> bool:
    for tensor in obj["shared"]:
        tensor.mul_(2)
    return obj["shared"][0].untyped_storage().data_ptr() == obj["shared"][1].untyped_storage().data_ptr()


class OnCuda(torch.UntypedStorage):
    """Memory that says it is on a GPU. (A mock: there is none here.)"""

    device = torch.device("cuda:3")


def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process be the fourth rank of a machine with two GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")


def test_a_numbered_gpu_is_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tensors are that are on it; with all ranks on one GPU, NCCL hangs."""
    names = ["cuda:0", "cuda:3", "cuda", "cpu", "meta"]
    devices = {name: torch.device(name) for name in names}
    with pack(devices) as packed:
        gpus(monkeypatch)
        there = load(packed.fds, packed.sizes)
        monkeypatch.setattr(kinds, "_ranks_are_for", "cpu")
        on_cpu = load(packed.fds, packed.sizes)
    assert [str(there[name]) for name in names] == ["cuda:1", "cuda:1", "cuda", "cpu", "meta"]
    assert str(on_cpu["cuda:0"]) == "cpu"
    assert Value.of(devices).get() == devices


def test_cuda_memory_goes_through_the_cpu_to_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = OnCuda(200_000)
    packed = pack({"a": storage, "b": storage})
    storage.fill_(7)  # it is copied when it is written: a copy that waits would be a second one
    with packed:
        assert packed.spawn_arguments == () and packed.sizes[1:] == (200_000,), "as bytes, once"
        here = load(packed.fds, packed.sizes)["a"]
        assert here.device.type == "cpu" and here.tolist()[:3] == [7, 7, 7], "where CUDA does not work"
        asked: list[object] = []
        gpus(monkeypatch)
        monkeypatch.setattr(torch.UntypedStorage, "to", lambda self, *, device: asked.append(device) or self)
        there = load(packed.fds, packed.sizes)
    assert asked == [torch.device("cuda:1")] and there["a"] is there["b"]
    back = Value.of(storage).get()
    assert back.device.type == "cpu" and back.tolist()[-1] == 7


def test_cuda_memory_is_copied_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the ranks, and back: also where the pieces are those of several files."""
    storage = torch.arange(200_000, dtype=torch.int32).untyped_storage()
    sent = OnCuda(storage.nbytes()).copy_(storage)
    copied: list[tuple[int, int]] = []
    copy = pickler._copied
    monkeypatch.setattr(pickler, "_copied", lambda *part: copied.append(part[1:]) or copy(*part))
    monkeypatch.setattr(shared_memory, "_PIECE", 70_000)
    monkeypatch.setattr(shared_memory, "_STRIPE", 300_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def pieces() -> tuple[int, int]:
        found = [end - start for start, end in copied]
        copied.clear()
        return sum(found), max(found)

    packed = pack([b"before", sent])
    assert copied == []
    with packed:
        assert len(packed.fds) == 2 and pieces() == (800_000, 70_000)
        assert load(packed.fds, packed.sizes)[1].tolist() == storage.tolist()

    event = Returned(0, 0.0, Value.of([torch.ones(100_000), sent, sent]).result, 0)
    attached: list[int] = []
    assert copied == []
    frame = encode_event(event, 1, attached)
    assert pieces() == (800_000, 70_000)
    decoder = Decoder(load_event)
    decoder.attached.extend(attached)
    ((_, arrived),) = decoder.feed(frame)
    ones, back, again = Value(arrived.value).get()
    assert ones.sum() == 100_000 and back.tolist() == storage.tolist() and again is back


def test_a_class_and_a_result_that_is_pickled_again_have_cuda_memory_too() -> None:
    storage = OnCuda(300_000).fill_(7)
    space = notebook("class C:\n    pass", storage=storage)
    space["C"].held = storage
    assert Value.of(space["C"]).get().held.tolist()[-1] == 7
    for protocol in (4, 5):
        assert pickle.loads(pickle.dumps(Value.of(storage), protocol)).get().tolist()[-1] == 7


def test_tensors_in_shared_memory_stay_shared() -> None:
    tensor = torch.ones(1000).share_memory_()
    for _ in range(2):
        with pack({"shared": [tensor, tensor[10:20], tensor.view(torch.int32).view(torch.float32)[:0]]}) as packed:
            assert len(packed.spawn_arguments) == 1
            assert ask_rank(packed, double)
    assert tensor[0] == 4 and tensor[15] == 16


def test_a_tensor_with_a_history_is_refused() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    with pytest.raises(UnpicklableError, match="detach") as caught:
        pack_variables({"fine": 1, "history": {"loss": [loss]}})
    assert caught.value.path == "history['loss'][0]"


# ---------------------------------------------------------------- what only the start of a process can carry


def use_everything(obj: dict[str, Any], namespace: dict[str, Any]) -> object:
    for queue in (obj["queue"], obj["simple"], obj["torch_queue"]):
        queue.put("hello")
    obj["event"].set()
    with obj["lock"], obj["condition"], obj["semaphore"]:
        obj["value"].value += 1
        obj["array"][1] += 1
        obj["raw"][2] += 1
        obj["raw_value"].value += 1
    obj["connection"].send("hi")
    obj["socket"].sendall(b"hey")
    for queue in (obj["queue"], obj["torch_queue"]):
        queue.close()
        queue.join_thread()
    return obj["again"]() is obj["lock"], obj["ctypes"].value, type(obj["context"]).__name__


def test_objects_of_multiprocessing_travel_beside() -> None:
    all_of_multiprocessing_travels()  # what the process opens once, such as the resource tracker's pipe, stays
    before = open_fds()
    all_of_multiprocessing_travels()
    assert open_fds() <= before


def all_of_multiprocessing_travels() -> None:
    receiver, sender = spawn.Pipe(duplex=False)
    ours, theirs = socket.socketpair()
    raw_value = spawn.RawValue("d", 1.5)
    lock = spawn.Lock()
    things: dict[str, Any] = {
        "queue": spawn.Queue(),
        "simple": spawn.SimpleQueue(),
        "torch_queue": torch.multiprocessing.get_context("spawn").Queue(),
        "event": spawn.Event(),
        "lock": lock,
        "again": (lambda held: lambda: held)(lock),
        "condition": spawn.Condition(),
        "semaphore": spawn.Semaphore(2),
        "barrier": spawn.Barrier(2),
        "value": spawn.Value("i", 1),
        "array": spawn.Array("i", 3),
        "raw": spawn.RawArray("d", 3),
        "raw_value": raw_value,
        "ctypes": type(raw_value)(2.5),
        "connection": sender,
        "socket": theirs,
        "context": spawn,
        "partial": partial(lambda x: x, 1),
        "keys": {}.keys(),
    }
    with pack_variables(things) as packed:
        assert sum(thing is lock for thing in packed.spawn_arguments) == 1
        assert ask_rank(packed, use_everything) == (True, 2.5, "SpawnContext")
    assert [things[name].get() for name in ("queue", "simple", "torch_queue")] == ["hello"] * 3
    assert things["event"].is_set()
    assert (things["value"].value, things["array"][1], things["raw"][2], raw_value.value) == (2, 1, 1.0, 2.5)
    assert receiver.recv() == "hi" and ours.recv(3) == b"hey"
    for name in ("queue", "torch_queue"):
        things[name].close()
        things[name].join_thread()
    for end in (receiver, sender, ours, theirs):
        end.close()


@pytest.mark.skipif(sys.version_info < (3, 11, 5), reason="this Python's semaphores do not know what they are for")
def test_a_queue_that_was_made_for_fork_is_named_before_anything_starts() -> None:
    with pytest.raises(UnpicklableError, match="get_context.'spawn'.") as caught:
        pack_variables({"x": 1, "queue": multiprocessing.get_context("fork").Queue()})
    assert caught.value.variable == "queue"
    assert multiprocessing.context.get_spawning_popen() is None


# ---------------------------------------------------------------- functions and their namespace


def rebind(train: Any, namespace: dict[str, Any]) -> object:
    outcome = [train.__globals__ is namespace, namespace["lr"], train()]
    namespace["lr"] = 5
    return [*outcome, train(), namespace["rank"], "unused" in namespace, train.__module__]


def test_functions_live_in_the_ranks_namespace() -> None:
    space = notebook(
        """
        lr = 1
        unused = 2
        def helper(): return lr
        def outer(k):
            def inner(): return helper() * k
            return inner
        train = outer(10)
        """
    )
    with pack(space["train"], space) as packed:
        assert ask_rank(packed, rebind) == [True, 1, 10, 50, 0, False, "__main__"]
        assert load(packed.fds, packed.sizes)() == 10  # with no namespace: one of its own


def test_functions_keep_the_name_of_their_cell() -> None:
    space = notebook("def outer():\n    def inner(): pass\n    return inner\ninner = outer()")
    with pack([space["outer"], space["inner"]], space) as packed:
        outer, inner = load(packed.fds, packed.sizes, (), {})
    codes = outer.__code__, outer().__code__, inner.__code__
    assert [code.co_filename for code in codes] == ["<notebook>"] * 3


def test_methods_live_in_the_ranks_namespace_too() -> None:
    space = notebook("class C:\n    def get(self): return x\nx = 1\nc = C()")
    rank: dict[str, Any] = {}
    with pack(space["c"], space) as packed:
        c = load(packed.fds, packed.sizes, (), rank)
    assert c.get() == 1
    assert type(c).get.__globals__ is rank


def test_a_function_with_a_magic_gets_the_ranks_own_shell() -> None:
    from IPython import get_ipython
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.__new__(InteractiveShell)  # what user_ns holds is a bound method of the shell
    shell.user_ns = {}
    space = notebook("def f(): return get_ipython", get_ipython=shell.get_ipython)
    with pack(space["f"], space) as packed:
        assert load(packed.fds, packed.sizes, (), {})() is get_ipython


# ---------------------------------------------------------------- what says a wrong name of itself; streams


def use_backends(obj: dict[str, Any], namespace: dict[str, Any]) -> object:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(obj["value"]):
        assert torch.backends.cuda.math_sdp_enabled()
    checks = obj["class"] is SDPBackend, obj["value"] == SDPBackend.MATH, type(obj["value"]) is SDPBackend
    return [*checks, obj["in a function"]() == SDPBackend.MATH, obj["value"], SDPBackend]


def test_a_class_of_c_code_travels_under_the_name_that_a_module_has_for_it() -> None:
    from torch.nn.attention import SDPBackend

    space = notebook("def use(): return SDPBackend.MATH", SDPBackend=SDPBackend)
    sent = {"class": SDPBackend, "value": SDPBackend.MATH, "in a function": space["use"]}
    with pack(sent, space) as packed:
        *checks, value, cls = ask_rank(packed, use_backends, spawn)
    assert checks == [True] * 4 and value == SDPBackend.MATH and type(value) is cls is SDPBackend


def use_streams(obj: dict[str, Any], namespace: dict[str, Any]) -> object:
    return [obj["out"] is sys.stdout, obj["err"]["stream"] is sys.stderr, obj["text"].read()]


def test_the_standard_streams_are_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are no files, as in a kernel."""
    for stream in (sys.stdout, Outstream()):
        monkeypatch.setattr(sys, "stdout", stream)
        with pack({"out": sys.stdout, "err": {"stream": sys.stderr}, "text": io.StringIO("text")}) as packed:
            assert ask_rank(packed, use_streams) == [True, True, "text"]


class Outstream(io.TextIOBase):
    """As ipykernel's, which cannot be pickled either."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def write(self, text: str) -> int:
        return len(text)


# ---------------------------------------------------------------- what cannot travel

NOTEBOOK = """
import threading, types
lock = threading.Lock()
cfg = {"n": 1, "lock": lock}
def direct(): return lock
def by_config(): return cfg["lock"]
def indirect(): return direct()
def outer(hidden):
    def inner(): return hidden
    return inner
closure = outer(lock)
def default(x=lock): pass
lambda_ = lambda: [lock for _ in range(3)]
class Model:
    def __init__(self): self.parts = [1, (lock,)]
    def forward(self): pass
class Uses:
    def go(self): return lock
    @staticmethod
    def still(): pass
model = Model()
options = types.SimpleNamespace(lock=lock)
forward = model.forward
uses = Uses()
generator = (x for x in [1])
event = threading.Event()
loop = [lock]
loop.insert(0, loop)
async def coro(): pass
def attribute_only(): return event_like.event
"""


@pytest.mark.parametrize(
    ("name", "path", "reason", "remedy"),
    [
        ("lock", "lock", "lock is a _thread.lock", "locks belong to one process"),
        ("cfg", "cfg['lock']", "cfg['lock'] is a _thread.lock", "inside the cell"),
        ("direct", "direct -> lock", "it uses lock, a _thread.lock", "inside the cell"),
        ("by_config", "by_config -> cfg['lock']", "it uses cfg['lock'], a _thread.lock", "inside the cell"),
        ("indirect", "indirect -> direct -> lock", "it uses direct -> lock, a _thread.lock", "inside the cell"),
        ("closure", "closure -> hidden", "it uses hidden, a _thread.lock", "inside the cell"),
        ("default", "default -> x", "it uses x, a _thread.lock", "inside the cell"),
        ("options", "options.lock", "options.lock is a _thread.lock", "inside the cell"),
        ("lambda_", "lambda_ -> lock", "it uses lock, a _thread.lock", "inside the cell"),
        ("model", "model.parts[1][0]", "model.parts[1][0] is a _thread.lock", "inside the cell"),
        ("forward", "forward -> Model.parts[1][0]", "a _thread.lock", "inside the cell"),
        ("uses", "uses -> Uses.go -> lock", "it uses Uses.go -> lock, a _thread.lock", "inside the cell"),
        ("generator", "generator", "generator is a generator", "Make a list of it"),
        ("event", "event", "event is a threading.Event", "threads"),
        ("loop", "loop[1]", "loop[1] is a _thread.lock", "inside the cell"),
        ("file", "file", "file is an _io.TextIOWrapper", "Open it inside the cell"),
        ("read", "read", "read is an _io.TextIOWrapper", "Open it inside the cell"),
        ("thread", "thread", "thread is a threading.Thread", "threads"),
        ("pool", "pool", "pool is a multiprocessing.pool.ThreadPool", "pools belong to one process"),
        ("loader", "loader", "DataLoaderIter", "iter()"),
        ("picky", "picky", "picky is a test_payload.Picky (ValueError: not me)", "-m fork"),
    ],
)
def test_the_culprit_is_named(name: str, path: str, reason: str, remedy: str, tmp_path: Any) -> None:
    space = notebook(NOTEBOOK, thread=threading.Thread(), picky=Picky())
    if name in ("file", "read"):
        space[name] = open(tmp_path / "log", "w" if name == "file" else "a+")
    elif name == "pool":
        space["pool"] = multiprocessing.pool.ThreadPool(1)
    elif name == "loader":
        space["loader"] = iter(torch.utils.data.DataLoader([1, 2]))
    try:
        with pytest.raises(UnpicklableError) as caught:
            pack_variables({"fine": 1, name: space[name], "also": [2]}, namespace=space)
    finally:
        if name in ("file", "read"):
            space[name].close()
        elif name == "pool":
            space["pool"].terminate()
            space["pool"].join()
    error = caught.value
    assert (error.variable, error.others) == (name, ())
    assert error.path == path
    assert reason in error.reason
    assert remedy in error.remedy
    assert str(error).startswith(f"{name} cannot travel to another process: ")
    assert pickle.loads(pickle.dumps(error)).path == error.path


class Picky:
    def __reduce__(self) -> Any:
        raise ValueError("not\nme")


def test_several_culprits_are_all_named() -> None:
    with pytest.raises(UnpicklableError, match=r"Neither can b\[0\]") as caught:
        pack_variables({"a": threading.Lock(), "x": 1, "b": [threading.Lock()]})
    assert [other.variable for other in caught.value.others] == ["b"]


def test_optional_variables_stay_behind_without_a_word() -> None:
    with pack_variables({"x": 1, "lock": threading.Lock(), "y": 2}, optional={"lock", "y"}) as packed:
        assert load(packed.fds, packed.sizes) == {"x": 1, "y": 2}


def test_the_search_for_the_culprit_is_bounded() -> None:
    deep: Any = threading.Lock()
    for _ in range(40):
        deep = [deep]
    with pytest.raises(UnpicklableError) as caught:
        pack_variables({"deep": deep, "long": [*range(10_000), threading.Lock()]})
    assert caught.value.path == "deep" + "[0]" * 12
    assert caught.value.others[0].path == "long"


# ---------------------------------------------------------------- values back


def test_values_are_writable_and_cached_and_travel_themselves() -> None:
    value = Value.of({"array": numpy.zeros(100_000), "small": numpy.zeros(3), "tensor": torch.zeros(100_000)})
    value = pickle.loads(pickle.dumps(value, protocol=5))
    got = value.get()
    for array in got.values():
        array[0] = 1
    assert value.get() is got
    assert pickle.loads(pickle.dumps(value)).get()["tensor"].sum() == 1
    assert "tensor" in value.text()


def test_values_come_by_value() -> None:
    batch = torch.zeros(1000, 1000)
    weight = torch.ones(2, requires_grad=True)
    shared = torch.zeros(3).share_memory_()
    value = Value.of([batch[0], (weight * 2).sum(), weight, shared])
    sent = value.result
    row, loss, leaf, copy = value.get()
    shared += 1
    assert len(sent.data) + sum(map(len, sent.buffers)) < 100_000  # a row does not take its batch along
    assert row.shape == (1000,) and loss.item() == 4 and not loss.requires_grad and leaf.requires_grad
    assert copy.tolist() == [0, 0, 0] and not copy.is_shared()


@pytest.mark.parametrize(
    "make", [threading.Lock, spawn.Lock, lambda: spawn.Pipe()[0], lambda: socket.socket(), lambda: (i for i in ())]
)
def test_what_must_stay_leaves_its_repr_and_a_reason(make: Callable[[], Any]) -> None:
    thing = make()
    value = pickle.loads(pickle.dumps(Value.of({"it": thing})))
    assert value.text() == value.result.repr == repr({"it": thing})
    with pytest.raises(UnpicklableError) as caught:
        value.get()
    assert repr(thing) in str(caught.value) and "the result['it'] is " in str(caught.value)
    if hasattr(thing, "close"):
        thing.close()


def test_text_is_bounded_and_never_raises() -> None:
    assert len(Value.of("x" * 5000).text()) == 2000
    assert "RuntimeError: no" in Value.of(Shy()).text()
    with pytest.raises(UnpicklableError, match="ModuleNotFoundError"):
        Value(Result(b"cgone_module\nx\n.")).get()


class Counted:
    shown = 0

    def __repr__(self) -> str:
        Counted.shown += 1
        return "counted"


def test_text_is_made_once_and_no_more_of_it_than_is_shown() -> None:
    assert Value.of(Counted()).text() == "counted" and Counted.shown == 1
    assert len(Value.of({"many": [Counted()] * 1_000_000}).text()) == 2000
    assert Counted.shown <= 1 + 2000
    for value in ([1, ("a",), {"b": ()}], (1,), (), {}, [], {1: [2]}, "a'b", b"c", bytearray(b"d"), [[[[[["deep"]]]]]]):
        assert Value.of(value).text() == repr(value)


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __reduce__(self) -> Any:
        raise RuntimeError("no")


CLASS = """
import enum
scale = 1
class Point:
    def __init__(self, x): self.x = x
    def scaled(self): return self.x * scale
class Color(enum.Enum):
    RED = 1
"""


def make_points(classes: Any, namespace: dict[str, Any]) -> object:
    point, color = classes
    own = notebook("class Own: pass")["Own"]
    return [point(2), color.RED, point, own()]


def test_classes_of_the_notebook_come_back_as_themselves() -> None:
    space = notebook(CLASS)
    method = space["Point"].scaled
    with pack((space["Point"], space["Color"]), space) as packed:
        point, red, cls, own = ask_rank(packed, make_points)
    assert type(point) is cls is space["Point"] and red is space["Color"].RED
    assert cls.scaled is method  # the rank's copies did not replace the notebook's own methods
    space["scale"] = 10
    assert point.scaled() == 20
    assert type(own).__name__ == "Own"


def test_a_class_that_was_defined_anew_is_said_to_be_gone() -> None:
    space = notebook(CLASS)
    with pack(space["Point"], space) as packed:
        answer = ask_rank(packed, value_of_point)
    del space, packed
    gc.collect()
    with pytest.raises(UnpicklableError, match="no longer the class Point"):
        answer.get()


def value_of_point(cls: Any, namespace: dict[str, Any]) -> Value:
    return Value.of(cls(1))


def test_forked_ranks_return_instances_of_the_notebooks_classes() -> None:
    space = notebook(CLASS)
    track_classes(space)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            own = notebook("class Own: pass")["Own"]
            os.write(writer, pickle.dumps(Value.of([space["Point"](3), space["Color"].RED, own()])))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        point, red, own = pickle.load(pipe).get()
    os.waitpid(pid, 0)
    assert type(point) is space["Point"] and red is space["Color"].RED
    assert type(own).__name__ == "Own"


OWN = """
import dataclasses
@dataclasses.dataclass
class Report:
    rank: int
    limit = {limit}
    def late(self): return self.rank > self.limit
report = Report({rank})
"""


def make_report(numbers: Any, namespace: dict[str, Any]) -> object:
    rank, limit = numbers
    return notebook(OWN.format(rank=rank, limit=limit))["report"]


def test_a_class_that_ranks_define_alike_is_one_in_the_kernel() -> None:
    def message(rank: int, limit: int) -> Any:
        with pack((rank, limit)) as packed:
            return ask_rank(packed, make_report)

    first, second, other, same = message(1, 5), message(2, 5), message(1, 0), message(1, 5)
    assert type(first) is type(second) and first == same and first != second
    assert type(other) is not type(first), "its limit is another"
    assert (first.late(), other.late()) == (False, True)


# ---------------------------------------------------------------- in a notebook


def test_sdpa_backends_streams_and_files_of_a_notebook(kernel: Kernel) -> None:
    ok(kernel.execute("import os, sys\nfrom torch.nn.attention import SDPBackend, sdpa_kernel"))
    ok(kernel.execute("best, out, file = SDPBackend.MATH, sys.stdout, open(os.devnull)"))
    cell = "with sdpa_kernel([best, SDPBackend.MATH]):\n    print('said', file=out)\n"
    reply = ok(kernel.execute(f"%%spawn 2 -m forkserver\n{cell}best == SDPBackend.MATH, out is sys.stdout"))
    assert reply.result == "[0-1] (True, True)" and reply.of(0) == reply.of(1) == ["said"]
    reply = kernel.execute("%%spawn 2 -m forkserver\nfile.fileno()")
    assert reply.ename == "PayloadError" and "Open it inside the cell" in reply.traceback
    reply = ok(kernel.execute("%%spawn 2\nfile.fileno() > 2"))
    assert reply.result == "[0-1] True" and "file cannot travel, and fork is safe here" in reply.table["text/plain"]


def test_a_dataclass_of_the_cell_is_one_for_all_ranks(kernel: Kernel, method: str) -> None:
    cell = "from dataclasses import dataclass\n@dataclass\nclass Report:\n    loss: float\nReport(0.5)"
    ok(kernel.execute(f"%%spawn 2 -m {method} -o reports\n{cell}"))
    assert kernel.value("reports[0] == reports[1], type(reports[0]) is type(reports[1])") == (True, True)


# ---------------------------------------------------------------- nothing is left behind


def test_no_descriptor_is_left() -> None:
    before = open_fds()
    for _ in range(3):
        with pack(numpy.zeros(100_000)) as packed:
            loaded = load(packed.fds, packed.sizes)
        packed.close()  # twice does no harm
        assert loaded.sum() == 0  # what was loaded outlives the file's descriptor
        del loaded
        with pytest.raises(UnpicklableError):
            pack(threading.Lock())
    assert open_fds() == before


def test_what_was_packed_is_not_kept_alive() -> None:
    model = torch.nn.Linear(3, 3)
    gone = weakref.ref(model)
    gc.disable()
    try:
        pack(model).close()
        Value.of(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_importing_payload_imports_neither_torch_nor_cloudpickle() -> None:
    code = "import sys, nbspawn._payload.packing; print({'torch', 'cloudpickle', 'numpy', 'IPython'} & {*sys.modules})"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


def test_what_is_not_sent_twice() -> None:
    """Elements that are repeated, views of an array that is sent, and a tensor over it."""
    array = numpy.arange(10**6)
    repeated = numpy.broadcast_to(numpy.zeros(1000), (10**6, 1000))
    for obj in ([array, array[10:], torch.from_numpy(array), array[::-1]], [array, repeated]):
        with pack(obj) as packed:
            assert array.nbytes <= sum(packed.sizes) < array.nbytes + 100_000


def test_memory_that_is_made_to_be_pickled() -> None:
    """It is made anew, where all is pickled again."""

    class Made:
        def __reduce__(self) -> Any:
            made = numpy.full(10**5, 3.0)
            return list, ([made, made[1:]],)

    array = numpy.zeros(10**5)
    with pack([Made(), array, array[5:], Made()]) as packed:
        loaded = load(packed.fds, packed.sizes)
    loaded[1][6] = 1
    assert loaded[2][1] == 1 and all(part.sum() == 3.0 * len(part) for made in (loaded[0], loaded[3]) for part in made)
