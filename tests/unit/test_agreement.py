"""Values of several ranks, taken apart and compared, in one process: what is equal, what differs, how that reads."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import pickle
import random
import re
import threading
from collections.abc import Mapping
from datetime import date
from pathlib import PurePosixPath
from typing import Any

import numpy
import pytest
import torch

from nbspawn._protocol.value_digests import CHUNK, Entries
from nbspawn._rank.compare import flatten
from nbspawn._session.comparison import Difference, checked, conversation, parse
from nbspawn._session.tensor_diff import Tolerance
from nbspawn.errors import UsageError


class Ranks:
    """What _rank/compare/compared.py does in each of several processes."""

    def __init__(self, values: Mapping[int, Any]) -> None:
        self.values = values
        self.found: dict[int, list[flatten.Leaf]] = {}
        self.sent = 0

    def answer(self, rank: int, name: str, *arguments: Any) -> Any:
        if name == "report":
            with torch.no_grad():
                self.found[rank] = list(flatten.leaves(self.values[rank]))
            return Entries(tuple(entry for entry, _ in self.found[rank]), False)
        if name == "chunks":
            data = {entry.path: data for entry, data in self.found[rank]}
            chunks = [bytearray(data[path].chunk(number)) for path, number in arguments[0]]
            self.sent += sum(map(len, chunks))
            return chunks
        return None


def diff(*values: Any, rtol: float = 0.0, atol: float = 0.0, ranks: Ranks | None = None) -> Difference:
    """Of a value for each rank."""
    ranks = ranks or Ranks(dict(enumerate(values)))
    talk = conversation("v", tuple(ranks.values), len(ranks.values), Tolerance(rtol, atol))
    answers = None
    while True:
        try:
            question = talk.send(answers) if answers else next(talk)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answers = {rank: ranks.answer(rank, question.name, *question.arguments) for rank in question.ranks}


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float
    layers: list[int]


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@dataclasses.dataclass(slots=True)
class Slotted:
    lr: float
    weight: Any


class Both(Slotted):
    """With ``__slots__``, and a ``__dict__`` beside them."""


class Items(list):  # type: ignore[type-arg]
    """With attributes."""


class Table(dict):  # type: ignore[type-arg]
    """With attributes."""


class Stateful(torch.nn.Linear):
    step = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_extra_state(self, state: Any) -> None:
        self.step = state["step"]


class Key:
    def __init__(self, name: Any) -> None:
        self.name = name


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _seeded(value: Any) -> Any:
    torch.nn.init.ones_(value.weight)
    torch.nn.init.ones_(value.bias)
    return value


def _closure(last: Any) -> Any:
    return lambda: last


def _default(last: Any) -> Any:
    return lambda x=last: x


Point = collections.namedtuple("Point", "x y")
NAN = float("nan")


def _cycle(number: int) -> list[Any]:
    found: list[Any] = [number]
    found.append({"again": found})
    return found


def _inner_cycle(outer: bool) -> list[Any]:
    found: list[Any] = [[]]
    found[0].append(found if outer else found[0])
    return found


def _cached(last: Any) -> Any:
    return functools.lru_cache(lambda: last)


class Bits(enum.IntFlag):
    A = 1


class Silent(enum.Enum):
    A = 1
    B = 2

    def __str__(self) -> str:
        return "silent"


class Proxy:
    """Has every method that it is asked for."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda: None


class Untouchable:
    """Refuses whatever it has not."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("do not touch")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _numbers(kind: torch.dtype, last: float) -> torch.Tensor:
    return torch.tensor([0.0, 1.0, last]).to(kind)


PAIRS = {
    "int": (lambda last: last, 1, 2),
    "large int": (lambda last: 10**30 + last, 1, 2),
    "float": (lambda last: last, 0.5, 0.25),
    "complex": (lambda last: complex(1, last), 0.0, 1.0),
    "bool": (lambda last: last, True, False),
    "str": (lambda last: "x" * 1000 + last, "a", "b"),
    "bytes": (lambda last: b"x" * CHUNK + last, b"a", b"b"),
    "enum": (lambda last: last, Color.RED, 1),
    "none": (lambda last: last, None, 0),
    "dtype": (lambda last: {"dtype": last}, torch.float32, torch.float64),
    "function": (lambda last: {"activation": last}, torch.relu, torch.tanh),
    "partial": (lambda last: functools.partial(max, last), 1, 2),
    "set": (lambda last: {"a", "b", (1, last)}, 1, 2),
    "dict": (lambda last: {"a": {"b": [1, last]}}, 1, 2),
    "namedtuple": (lambda last: Point(1, last), 1, 2),
    "dataclass": (lambda last: Settings(0.1, [1, last]), 1, 2),
    "object": (lambda last: Plain(a=1, b=Plain(c=last)), 1, 2),
    "deque": (lambda last: collections.deque([1, last]), 1, 2),
    "deque of tensors": (lambda last: collections.deque([torch.ones(2), torch.tensor([0, last])]), 1, 2),
    "deque of a length": (lambda last: collections.deque([1], last), 1, 2),
    "attribute of a dataclass": (lambda last: _with(Settings(0.1, []), other=last), 1, 2),
    "slots": (lambda last: Slotted(0.1, torch.tensor([0, last])), 1, 2),
    "slots beside attributes": (lambda last: _with(Both(0.1, last), x=1), 1, 2),
    "attributes beside slots": (lambda last: _with(Both(0.1, 1), x=last), 1, 2),
    "attribute of a list": (lambda last: _with(Items([1]), x=last), 1, 2),
    "attribute of a dict": (lambda last: _with(Table(a=1), x=last), 1, 2),
    "attribute of a string": (lambda last: _with(type("Name", (str,), {})("a"), x=last), 1, 2),
    "default of a dict": (lambda last: collections.defaultdict(last, a=1), int, list),
    "dict with keys that are objects": (lambda last: {Key(last): 1, Key(0): 2}, 1, 2),
    "dict of a library's class": (lambda last: collections.UserDict(a=last), 1, 2),
    "bound method": (lambda last: Plain(a=last).__init__, 1, 2),
    "bound method in C": (lambda last: [last].append, 1, 2),
    "closure": (_closure, 1, 2),
    "default of a function": (_default, 1, 2),
    "code": (lambda last: last, lambda x: x + 1, lambda x: x + 2),
    "extra state": (lambda last: _with(_seeded(Stateful(1, 1)), step=last), 1, 2),
    "extra state of a part": (lambda last: torch.nn.Sequential(_with(_seeded(Stateful(1, 1)), step=last)), 1, 2),
    "regular expression": (re.compile, "a", "b"),
    "exception": (ValueError, "a", "b"),
    "masked array": (lambda last: numpy.ma.array([1, 2], mask=[False, last]), True, False),
    "values of a masked array": (lambda last: numpy.ma.array([1, last], mask=[True, False]), 1, 2),
    "attribute of an array": (lambda last: _with(numpy.ones(2).view(type("A", (numpy.ndarray,), {})), u=last), 1, 2),
    "very large integers": (lambda last: torch.tensor([2**60, last]), 2**60 + 1, 2**60 + 2),
    "very large integer": (lambda last: last, 2**60 + 1, 2**60 + 2),
    "very large unsigned integers": (lambda last: numpy.array([last], dtype="u8"), 2**63 + 1, 2**63 + 2),
    "date": (lambda last: date(2026, 1, last), 1, 2),
    "buffer": (lambda last: [io.BytesIO(last)], b"a", b"b"),
    "buffer of text": (io.StringIO, "a", "b"),
    "signature": (lambda last: last, lambda a: a, lambda *a: a),
    "signature by name": (lambda last: last, lambda a, b: a, lambda a, *, b: a),
    "cached function": (_cached, 1, 2),
    "flags without a name": (Bits, 8, 16),
    "keys that are written alike": (lambda last: {float("nan"): last, float("nan"): 2}, 1, 5),
    "members as keys": (lambda last: {last: 1}, Silent.A, Silent.B),
    "attribute of an item's name": (lambda last: last, _with(Table(x=1), x=1), Table(x=1)),
    "cycle or another": (_inner_cycle, True, False),
    "object with every method": (Proxy, 1, 2),
    "object that refuses": (Untouchable, 1, 2),
    "path": (lambda last: PurePosixPath("a", last), "b", "c"),
    "random": (random.Random, 1, 2),
    "cycle": (_cycle, 1, 2),
    "generator": (_generator, 1, 2),
    "array": (lambda last: numpy.arange(6.0).reshape(2, 3) * last, 1, 2),
    "array of strings": (lambda last: numpy.array(["abc", last]), "x", "y"),
    "array of objects": (lambda last: numpy.array([None, last], dtype=object), "x", "y"),
    "array with fields": (lambda last: numpy.array([(1, last)], dtype=[("a", "i4"), ("b", "f8")]), 1, 2),
    "array of the other byte order": (lambda last: numpy.array([1.0, last], dtype=">f4"), 1, 2),
    "array backwards": (lambda last: numpy.array([1.0, last])[::-1], 1, 2),
    "scalar of numpy": (numpy.float32, 1, 2),
    "module": (torch.nn.BatchNorm1d, 3, 4),
    "sparse": (lambda last: torch.tensor([[0.0, last]]).to_sparse(), 1.0, 2.0),
    "csr": (lambda last: torch.tensor([[0.0, last]]).to_sparse_csr(), 1.0, 2.0),
    "nested": (lambda last: torch.nested.nested_tensor([torch.ones(last), torch.ones(1)], layout=torch.jagged), 2, 3),
    "quantized": (lambda last: torch.quantize_per_tensor(torch.tensor([0.5, last]), 0.1, 0, torch.qint8), 1.0, 2.0),
    "conjugate": (lambda last: torch.tensor([complex(1, last)]).conj(), 1.0, 2.0),
    "no elements": (lambda last: torch.empty(0, last), 1, 2),
}
KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
KINDS += [torch.uint8, torch.bool, torch.complex64, torch.complex128]
KINDS += [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32") if hasattr(torch, name)]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.filterwarnings("ignore")  # torch's, of layouts that are beta
def test_every_type_is_compared(name: str) -> None:
    make, one, other = PAIRS[name]
    found = diff(make(one), make(one), make(one))
    assert found.equal and not found, found
    assert "ot compared" not in str(found) and "nothing" not in str(found)
    found = diff(make(one), make(one), make(other))
    assert found and found.differing[0]["groups"] == [[0, 1], [2]], found


HOLDERS = [
    lambda value: [0, value],
    lambda value: {("k", 1): value},
    lambda value: {Key(value): 1},
    lambda value: Point(value, 1),
    lambda value: Settings(value, []),
    lambda value: Plain(a=value),
    lambda value: Slotted(1, value),
    lambda value: _with(Both(1, 2), x=value),
    lambda value: _with(Items([1]), x=value),
    lambda value: _with(Table(a=1), x=value),
    lambda value: collections.deque([value]),
    lambda value: collections.UserDict(a=value),
    lambda value: collections.ChainMap({"a": value}),
    lambda value: functools.partial(max, key=value),
    lambda value: Plain(a=value).__init__,
    lambda value: ValueError("a", value),
    lambda value: iter([value]),
    _closure,
    _default,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_type_is_compared_wherever_it_is(first: int) -> None:
    """In random nestings."""
    for seed in range(first, first + 50):
        chance = random.Random(seed)
        name, holders = chance.choice([*PAIRS]), chance.choices(HOLDERS, k=chance.randint(1, 6))
        make, *values = PAIRS[name]
        one, same, other = (
            functools.reduce(lambda value, hold: hold(value), holders, make(value)) for value in (values[0], *values)
        )
        for found, equal in ((diff(one, same), True), (diff(one, other), False)):
            assert found.equal == equal and "ot compared" not in str(found), f"{name}, seed {seed}: {found}"


def test_masked_elements_are_not_compared() -> None:
    one, other = (numpy.ma.array([1.0, hidden], mask=[False, True]) for hidden in (1, 2))
    assert diff(one, other).equal


@pytest.mark.parametrize("make", [torch.tensor, lambda numbers: numpy.array(numbers, dtype="u8")])
def test_large_integers_are_compared_as_integers(make: Any) -> None:
    one, other = make([2**60, 7]), make([2**60 + 3, 7])
    (closer,) = diff(one, other).differing[0]["closer"]
    assert closer["largest"] == 3 and closer["count"] == 1 and closer["values"] == (2**60, 2**60 + 3)
    assert diff(one, other, atol=3).equal and not diff(one, other, atol=2).equal
    assert diff(one, other, rtol=1e-17).equal and not diff(one, other, rtol=1e-18).equal


def test_a_set_whose_elements_cannot_be_read_is_not_called_equal() -> None:
    assert str(diff({threading.Lock()}, {threading.Lock()})).startswith("v: nothing in it is compared by its contents.")


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")

    def frame(last: str) -> Any:
        return pandas.DataFrame({"a": [1, 2], "b": ["x", last]})

    assert diff(frame("y"), frame("y")).equal and diff(frame("y").b, frame("y").b).equal
    (one,) = diff(frame("y"), frame("z")).differing
    assert one["path"] == "['b']" and one["kinds"][0].startswith("Series ")
    (one,) = diff(pandas.DataFrame(index=[1, 2]), pandas.DataFrame(index=[1, 3])).differing
    assert one["path"] == ".index"
    assert diff(frame("y"), frame("y").iloc[:1]).differing[0]["kinds"] == ["DataFrame[2, 2]", "DataFrame[1, 2]"]


def test_all_of_pandas_is_compared() -> None:
    pd = pytest.importorskip("pandas")
    ab, ba = (pd.CategoricalDtype(categories, ordered=True) for categories in (["a", "b"], ["b", "a"]))
    levels = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)])
    days = (pd.to_datetime(["2020-01-01", day]) for day in ("2020-01-02", "2021-01-02"))
    pairs = [
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), pd.DataFrame([[5, 2]], columns=["a", "a"])),
        [pd.DataFrame([[1, 2]], columns=names) for names in days],
        (pd.DataFrame({"a": [1], "b": [2]}), pd.DataFrame({"b": [2], "a": [1]})),
        (pd.Series([1, 2], name="a"), pd.Series([1, 2], name="b")),
        (pd.Series([1, 2]), pd.Series([1, 2], index=[1, 2])),
        (pd.Index([1, 2], name="a"), pd.Index([1, 2])),
        (levels, levels.rename(["x", "y"])),
        (levels, pd.MultiIndex.from_tuples([("a", 1), ("b", 3)])),
        *(
            (pd.Series([one, "x"], dtype=object), pd.Series([other, "x"], dtype=object))
            for one, other in [(1, "1"), (True, "True"), (None, NAN), (torch.tensor(0.12345678), torch.tensor(0.12345))]
        ),
        [pd.Series(["a", "b"], dtype=kind) for kind in (ab, ba)],
        [pd.Series(["a", "b"], dtype=kind) for kind in (pd.CategoricalDtype(["a", "b", "c"]), "category")],
    ]
    for one, other in pairs:
        assert diff(one, pickle.loads(pickle.dumps(one))).equal and not diff(one, other).equal, (one, other)
    one, other = pd.Series([1]), pd.Series([1])
    other.attrs["unit"] = "m"
    assert not diff(one, other).equal


def test_what_was_sent_is_equal() -> None:
    """Numbers that were one object are two then."""
    settings = Table(lr=0.1, weight=0.2)
    settings.saved, settings.lr = dict(settings), settings["lr"]
    assert diff(settings, pickle.loads(pickle.dumps(settings))).equal


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_dtype_is_compared(kind: torch.dtype) -> None:
    assert diff(_numbers(kind, 1), _numbers(kind, 1)).equal
    (one,) = diff(_numbers(kind, 1), _numbers(kind, 0)).differing
    (closer,) = one["closer"]
    assert closer["count"] == 1 and closer["largest"] == 1 and closer["index"] == (2,)
    assert closer["values"] == (1, 0)


def test_zeros_nan_and_memory_layout_make_no_difference() -> None:
    columns = torch.arange(6.0).reshape(2, 3)
    assert diff(columns, columns.T.contiguous().T).equal
    assert diff(torch.tensor([0.0, NAN]), torch.tensor([-0.0, -NAN])).equal
    assert diff(0.0, -0.0).equal and diff(NAN, -NAN).equal
    assert diff(torch.tensor([complex(NAN, -0.0)]), torch.tensor([complex(NAN, 0.0)])).equal
    assert diff({"a": 1, "b": 2}, {"b": 2, "a": 1}).equal
    assert diff(torch.ones(3, requires_grad=True) * 2, torch.full((3,), 2.0)).equal


@pytest.mark.parametrize("shape", [(3, 1000, 700), (700, 3000), (5, 2, 3, CHUNK // 8)])
def test_a_large_tensor_that_is_not_contiguous(shape: tuple[int, ...]) -> None:
    tensor = (
        torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
        .reshape(shape[::-1])
        .permute(*reversed(range(len(shape))))
    )
    other = tensor.contiguous()
    assert not tensor.is_contiguous() and diff(tensor, other).equal
    index = tuple(length - 2 if length > 2 else 0 for length in shape)
    other[index] += 1
    ranks = Ranks({0: tensor, 1: other})
    (one,) = diff(ranks=ranks).differing
    assert one["closer"][0]["index"] == index and one["closer"][0]["count"] == 1
    assert ranks.sent <= 2 * CHUNK, "only what differs travels"


def test_the_sentence_when_all_agree() -> None:
    model = torch.nn.Linear(1000, 500)
    assert str(diff(model, model)) == "v: 2 entries, 2 MB, are equal in both ranks."
    assert str(diff(1, 1, 1)) == "v is equal in all 3 ranks."


def test_one_weight() -> None:
    models = [torch.nn.Linear(8, 4) for _ in range(4)]
    for model in models:
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
    with torch.no_grad():
        models[1].weight[3, 7] += 0.5
    found = diff(*models)
    assert str(found).splitlines() == [
        "v: 1 of 2 entries differs between the ranks.",
        "  .weight (float32[4, 8]): ranks 0 and 2-3 agree, rank 1 differs",
        "    rank 1: 1 of 32 elements differ, largest difference 0.5 (relative 0.5), first at [3, 7]: 1.5, not 1",
    ]
    assert found.differing[0]["statistics"] == [(1.0, 1.0, 0, 0), (1.0, 1.5, 0, 0)]


def test_an_optimizer() -> None:
    def trained(lr: float, steps: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return optimizer

    assert diff(trained(0.1, 1), trained(0.1, 1)).equal
    text = str(diff(trained(0.1, 2), trained(0.2, 1)))
    assert ".param_groups[0]['lr'] (float): 0.1 in rank 0, 0.2 in rank 1, largest difference 0.1 (relative 1)" in text
    assert ".state[0]['step'] (float32[]): 2.0 in rank 0, 1.0 in rank 1" in text
    assert ".state[1]['exp_avg'] (float32[2])" in text


def test_what_is_not_of_one_kind() -> None:
    base = {"a": torch.ones(3), "b": torch.ones(3), "c": [1], "d": "x", "e": 1}
    other = {
        "a": torch.ones(3).bfloat16(),
        "b": torch.ones(4),
        "c": (1,),
        "d": "y",
        "e": 1.0,
        "f": {"g": torch.ones(2), "h": 1},
    }
    assert str(diff(base, other, base)).splitlines() == [
        "v: 6 of 6 entries differ between the ranks.",
        "  ['a']: float32[3] in ranks 0 and 2, bfloat16[3] in rank 1",
        "  ['b']: float32[3] in ranks 0 and 2, float32[4] in rank 1",
        "  ['c']: list in ranks 0 and 2, tuple in rank 1",
        "  ['d'] (str): 'x' in ranks 0 and 2, 'y' in rank 1",
        "  ['e']: int in ranks 0 and 2, float in rank 1",
        "  ['f']: dict in rank 1, missing in ranks 0 and 2",
    ]
    assert "It: list in rank 0, tuple in rank 1" in str(diff([1, 2], (1, 3)))
    assert "[1]: int in rank 1, missing in rank 0" in str(diff([1], [1, 3]))


def test_nan_and_infinity() -> None:
    whole, broken = torch.ones(4), torch.tensor([1.0, NAN, float("inf"), 2.0])
    text = str(diff(whole, whole, broken))
    assert "3 of 4 elements differ, largest difference 1 (relative 1), first at [1]: nan, not 1" in text
    assert "; 1 NaN (not 0), 1 inf (not 0)" in text
    assert diff(broken, broken.clone()).equal
    assert not diff(torch.full((3,), NAN), torch.tensor([NAN, NAN, 1.0])).equal


def test_tolerance_is_that_of_allclose() -> None:
    one = torch.tensor([1.0, 100.0, NAN, float("inf")])
    other = torch.tensor([1.0, 100.01, NAN, float("inf")])
    for rtol, atol in ((1e-3, 0.0), (1e-5, 0.0), (0.0, 0.02), (0.0, 0.001)):
        close = torch.allclose(other, one, rtol, atol, equal_nan=True)
        assert diff(one, other, rtol=rtol, atol=atol).equal == close
    assert not diff(one, torch.tensor([1.0, 100.0, 1.0, float("inf")]), rtol=1.0).equal
    assert not diff(one, torch.tensor([1.0, 100.0, NAN, 1.0]), rtol=1.0).equal
    text = str(diff({"a": one, "b": 1}, {"a": other, "b": 1}, rtol=1e-3))
    assert text == "v: 2 entries are equal in both ranks within rtol 0.001 (1 of them not exactly)."


def test_with_a_tolerance_all_that_differ_are_looked_at_and_without_the_first_ten() -> None:
    values = [{f"p{number}": torch.full((3,), number + rank * 1e-6) for number in range(150)} for rank in range(3)]
    values[2]["p149"] += 1
    found = diff(*values, rtol=1e-3, atol=1e-3)
    assert [one["path"] for one in found.differing] == ["['p149']"]
    found = diff(*values)
    lines = str(found).splitlines()
    assert lines[-1].endswith("more entries differ.") and len(lines) < 50
    assert sum(bool(one["closer"]) for one in found.differing) == 10


def test_many_ranks_that_all_differ() -> None:
    text = str(diff(*(torch.tensor([float(rank), 0.0]) for rank in range(64))))
    assert "ranks 0-63 all differ" in text and len(text) < 1000


def test_what_cannot_be_compared_is_said() -> None:
    class Broken:
        def __init__(self) -> None:
            self.x = 1

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise RuntimeError("do not touch")

    value = {"lock": threading.Lock(), "meta": torch.ones(3, device="meta"), "broken": Broken(), "x": 1}
    text = str(diff(value, value))
    assert text.startswith("v is equal in both ranks.")
    assert "Not compared: ['lock'] (TypeError: cannot pickle" in text
    assert "Not compared: ['meta'] (on the meta device, without contents)." in text
    assert "Not compared: ['broken'] (RuntimeError: do not touch)." in text
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert "nested more than 32 levels deep" in str(diff(deep, deep))
    assert str(diff(threading.Lock(), threading.Lock())).startswith("v: nothing in it is compared by its contents.")


def test_what_one_rank_cannot_read_is_not_called_different() -> None:
    text = str(diff({"a": torch.ones(3), "b": 1}, {"a": threading.Lock(), "b": 1}))
    assert text.startswith("v is equal in both ranks.\nNot compared: ['a'] (TypeError")


def test_text_is_bounded() -> None:
    long = {"k" * 1000 + str(number): "v" * 10_000 + str(number) for number in range(100)}
    other = {key: value + "!" for key, value in long.items()}
    assert len(str(diff(long, other))) < 5000


@pytest.mark.parametrize(
    ("text", "expression", "rtol", "atol"),
    [
        ("model.state_dict()", "model.state_dict()", 0, 0),
        (" --rtol 1e-5 d['a b'] ", "d['a b']", 1e-5, 0),
        ("x - y --atol=3 --rtol 1", "x - y", 1, 3),
        ("a--b", "a--b", 0, 0),
        ("f('--rtol 1')", "f('--rtol 1')", 0, 0),
    ],
)
def test_the_line(text: str, expression: str, rtol: float, atol: float) -> None:
    assert parse(text) == (expression, Tolerance(rtol, atol))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "diff needs an expression, which each rank evaluates"),
        ("x --rtol", "--rtol needs a number: `--rtol 1e-6`"),
        ("--rtol 1e-5", "diff needs an expression, which each rank evaluates"),
        ("x = 1", "invalid syntax"),
        ("model --rtol much", "rtol is a number of 0 or more, got 'much'"),
        ("model --atol -1", "atol is a number of 0 or more, got '-1'"),
        ("model --rtol nan", "rtol is a number of 0 or more, got 'nan'"),
    ],
)
def test_bad_lines(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)
    with pytest.raises(UsageError, match="needs an expression"):
        checked(3)  # type: ignore[arg-type]
