"""A rank's report of its memory: what is found, for which variable it is counted, and no code of a class is run."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from nbspawn._protocol import plain
from nbspawn._protocol.memory import Held, Memory
from nbspawn._rank.report import memory, naming

MB = 250_000  # float32 elements


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """What tests/conftest.py has frozen, for the sake of the tests' time, a report unfreezes."""
    yield
    gc.freeze()


def reported(**variables: Any) -> dict[str, Held]:
    """What each variable holds."""
    return {held.name: held for held in memory.of(variables).variables}


def sizes(**variables: Any) -> dict[str, int]:
    """In MB."""
    return {name: held.size // 1_000_000 for name, held in reported(**variables).items()}


def ones(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB)


# ---------------------------------------------------------------- what is found


def test_a_storage_is_counted_once_for_the_first_variable() -> None:
    whole = ones(8)
    found = reported(whole=whole, part=whole[:MB], again=[whole.view(-1, 2)], own=ones(2))
    assert {name: held.size for name, held in found.items()} == {"whole": 8_000_000, "own": 2_000_000}
    assert found["whole"].what == "float32[2000000], also in part, again"


def test_a_view_says_how_much_it_keeps() -> None:
    assert reported(row=ones(8).view(1000, -1)[0])["row"].what == "float32[2000], a view of 8 MB"


def test_a_model_and_its_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.Linear(500, 1000))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    found = reported(model=model, optimizer=optimizer)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert found["model"].size == 2 * parameters
    assert found["model"].what == (
        "8 tensors, largest .0.weight float32[500, 1000], 4 MB of it gradients, also in optimizer"
    )
    assert found["optimizer"].size == 2 * parameters + 4 * 4, "its two averages, and the steps"
    assert "12 tensors, largest .state[…]['exp_avg'] float32[500, 1000]" in found["optimizer"].what


@dataclasses.dataclass
class Settings:
    rate: float
    table: torch.Tensor


class Slotted:
    __slots__ = ("data",)

    def __init__(self, data: object) -> None:
        self.data = data


class Cache:
    items: list[torch.Tensor] = []


def closure(data: torch.Tensor) -> Any:
    def function(more: torch.Tensor | None = None) -> object:
        return data, more

    function.__defaults__ = (ones(2),)
    return function


def generator(data: torch.Tensor) -> Iterator[int]:
    yield 1
    del data


def raised() -> BaseException:
    def failing(data: torch.Tensor) -> None:
        raise ValueError

    try:
        failing(ones(3))
    except ValueError as error:
        return error
    raise AssertionError


def test_the_ways_to_a_tensor() -> None:
    cycle: list[Any] = [ones(3)]
    cycle.append(cycle)
    started = generator(ones(3))
    next(started)
    a_class = type("Cached", (), {"items": [ones(3), ones(3)]})
    ways = {
        "attribute": (Settings(0.1, ones(3)), 3, ".table float32[750000]"),
        "slot": (Slotted(ones(3)), 3, "float32[750000]"),
        "nested": ({"a": [0, (ones(3),)]}, 3, "['a'][1][0] float32[750000]"),
        "cycle": (cycle, 3, "[0] float32[750000]"),
        "closure": (closure(ones(3)), 5, "2 tensors, largest"),
        "generator": (started, 3, "float32[750000]"),
        "error": (raised(), 3, "float32[750000]"),
        "class_": (a_class, 6, "2 tensors float32[750000] in a list"),
        "key": ({Slotted(ones(3)): 1}, 3, "float32[750000]"),
        "history": ([ones(1) for _ in range(5)], 5, "5 tensors float32[250000] in a list"),
        "mixed": ([ones(1), ones(1), ones(2)], 4, "3 tensors, largest [2] float32[500000]"),
        "sums": ([torch.ones(1, requires_grad=True) * 2 for _ in range(3)], 0, "3 with an autograd graph"),
        "shared": (ones(3).share_memory_(), 3, "float32[750000], in shared memory"),
        "array": (numpy.ones((3, 1000)), 0, "float64[3, 1000]"),
    }
    found = reported(**{name: value for name, (value, *_) in ways.items()})
    for name, (_, size, what) in ways.items():
        assert found[name].size // 1_000_000 == size, name
        assert what in found[name].what, name


def test_arrays_and_tensors_of_one_memory() -> None:
    array = numpy.ones(1_000_000)
    tensor = ones(4)
    found = reported(
        array=array, part=array[10:], tensor_of_it=torch.from_numpy(array), tensor=tensor, back=tensor.numpy()
    )
    assert {name: held.size for name, held in found.items()} == {"array": 8_000_000, "tensor": 4_000_000}
    assert found["array"].what == "float64[1000000], also in part, tensor_of_it"


def test_a_mapped_file_takes_no_memory(tmp_path: Path) -> None:
    mapped = numpy.memmap(tmp_path / "data", dtype="float32", mode="w+", shape=(MB,))
    assert reported(mapped=mapped, part=mapped[3:]) == {}


def test_tensors_without_memory_of_their_own() -> None:
    assert reported(meta=torch.ones(10, device="meta"), empty=torch.ones(0), sparse=torch.eye(3).to_sparse()) == {}


def test_a_shared_object_without_tensors_is_nobodys_alias() -> None:
    settings = {"lr": [0.1]}
    assert "also" not in reported(a=[settings, ones(1)], b=[settings])["a"].what


def test_ipythons_own_variables_come_last() -> None:
    found = reported(**{"_": [last := ones(2)], "result": last, "_oh": {3: ones(1)}})
    assert found["result"].what == "float32[500000]" and found["_oh"].size == 1_000_000 and "_" not in found


def elsewhere() -> str:
    return memory.of({}).elsewhere.what


def test_what_no_variable_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "_SCANNED", sys.maxsize)  # all tests of a run together have imported much
    gc.collect()
    gc.freeze()  # as a rank does with what it inherits, such as the list of this class
    before = memory.of({}).elsewhere.size
    Cache.items += [ones(40), ones(40)]
    try:
        found = memory.of({}).elsewhere
        assert found.size - before == 80_000_000
        assert "in a list in class Cache" in found.what
    finally:
        del Cache.items[:]
    module = types.ModuleType("mylib")
    module.store = {"x": Slotted([ones(50)])}  # type: ignore[attr-defined]
    sys.modules["mylib"] = module
    try:
        assert "float32[12500000] in a list in an object of class Slotted" in elsewhere()
        module.store = {"x": ones(50)}  # type: ignore[attr-defined]
        assert "float32[12500000] in a dict in mylib.store" in elsewhere()
    finally:
        del sys.modules["mylib"]
    held = generator(ones(60))
    next(held)
    assert "generator()" in elsewhere()
    del held
    sys.last_value = raised()
    sys.last_value.data = ones(70)  # type: ignore[attr-defined]
    try:
        assert "in an object of class ValueError" in elsewhere()
    finally:
        del sys.last_value


def test_local_variables_of_functions_that_run() -> None:
    ready, end = threading.Event(), threading.Event()

    def train() -> None:
        batch = [ones(2)]
        ready.set()
        end.wait()
        del batch

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    try:
        found = memory.of({})
    finally:
        end.set()
        thread.join()
    if sys.version_info >= (3, 12):
        assert [held.what for held in found.variables if held.name == "batch in train()"] == ["[0] float32[500000]"]
    else:
        assert found.elsewhere.size >= 2_000_000


# ---------------------------------------------------------------- what it must not do


class Meta(type):
    """A metaclass like Armed."""

    __name__ = __mro__ = property(lambda cls: pytest.fail("looked up"))  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        raise SystemError

    def __hash__(cls) -> int:
        raise SystemError


def refuse(*_: object) -> Any:
    raise SystemError


REFUSED = "repr eq hash len iter bool getitem contains getattribute getattr instancecheck reduce_ex sizeof".split()
Armed = Meta("Armed", (), {f"__{name}__": refuse for name in REFUSED} | {"__dict__": property(refuse)})
ArmedList = Meta("ArmedList", (list,), {f"__{name}__": refuse for name in REFUSED} | {"__class__": property(refuse)})
ArmedDict = Meta("ArmedDict", (dict,), {f"__{name}__": refuse for name in REFUSED} | {"__class__": property(refuse)})


class ArmedTensor(torch.Tensor):
    __torch_function__ = classmethod(refuse)  # type: ignore[assignment]
    shape = dtype = device = grad = is_leaf = property(refuse)  # type: ignore[assignment]
    untyped_storage = refuse


class Wrapper(torch.Tensor):
    """As DTensor: the memory is another tensor's."""

    inner: torch.Tensor
    __torch_dispatch__ = classmethod(refuse)  # type: ignore[assignment]

    @staticmethod
    def around(inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made


def test_no_code_of_a_class_runs() -> None:
    armed = object.__new__(Armed)
    many, keyed = ArmedList(), ArmedDict()
    list.append(many, ones(2))
    dict.update(keyed, armed=ones(3))
    array = type("ArmedArray", (numpy.ndarray,), {"shape": property(refuse), "base": property(refuse)})
    found = sizes(
        armed=armed,
        many=many,
        keyed=keyed,
        tensor=torch.Tensor._make_subclass(ArmedTensor, ones(4)),  # type: ignore[attr-defined]
        wrapper=Wrapper.around(ones(5)),
        array=numpy.ones(1_000_000).view(array),
    )
    assert found == {"many": 2, "keyed": 3, "tensor": 4, "wrapper": 5, "array": 8}


def test_large_lists_are_looked_at_in_part() -> None:
    numbers = memory.of({"numbers": [*range(300_000)], "model": ones(1)})
    assert not numbers.partial and [held.name for held in numbers.variables] == ["model"]
    data = [[[number], {"text": [str(number)]}] for number in range(120_000)]
    found = memory.of({"data": data, "more": [*map(list, data)], "model": torch.nn.Linear(1000, 1000)})
    assert found.partial and [held.name for held in found.variables] == ["model"], "those that come later too"
    assert found.elsewhere.size == 0, "it is not known what leads to the others"


def test_a_report_leaves_nothing_behind() -> None:
    """No reference to what it has seen, and no cycle, in which that would stay for a while."""
    data = ones(1)
    gone = weakref.ref(data)
    holder = [data]
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    memory.of({})  # makes what stays
    gc.collect()
    gc.disable()
    try:
        memory.of({"data": data, "holder": holder})
        memory.of({})
        assert gc.collect() == 0
        del data, holder
        assert gone() is None and not gc.isenabled()
    finally:
        gc.enable()
        end.set()
        thread.join()
    assert memory.of({}) and gc.isenabled()


def test_no_warning_reaches_the_user(recwarn: pytest.WarningsRecorder) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(10)
    result = torch.ones(3, requires_grad=True) * 2
    memory.of({"fake": fake, "result": result})
    assert not recwarn.list


def test_a_report_is_bounded_and_plain() -> None:
    many = {f"{'n' * 100}{number}": ones(1) for number in range(150)}
    found = memory.of(many)
    assert len(found.variables) == 100 and found.others == Held("", 50_000_000, "50 variables")
    assert all(len(held.name) <= 60 for held in found.variables)
    deep: Any = ones(1)
    for _ in range(500):
        deep = {"k" * 30: deep}
    assert len(reported(deep=deep)["deep"].what) <= 300
    assert json.loads(json.dumps(found)) and plain.copy(Memory, found) == found
    assert found.resident > 0 and found.peak >= found.resident and found.tensors >= 150_000_000


def test_what_torch_has_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two; the second is not used."""
    used = {0: 300, 1: 0}
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda device: used[device],
        max_memory_allocated=lambda device: used[device] * 3,
        memory_reserved=lambda device: used[device] * 2,
        memory_summary=lambda device, abbreviated: f"{device} {abbreviated}" + "|" * 100_000,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    (device,) = memory._devices()
    assert (
        device[:4] == ("cuda:0", 300, 900, 300) and device.summary.startswith("0 True|") and len(device.summary) < 9000
    )
    assert memory._pinned() == 0, "older ones do not tell"
    cuda.host_memory_stats = lambda: {"allocated_bytes.current": 7}
    assert memory._pinned() == 7
    cuda.is_initialized = lambda: False
    assert memory._devices() == () and memory._pinned() == 0
