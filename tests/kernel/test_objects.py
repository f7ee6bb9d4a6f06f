"""Functions, classes and other objects of the notebook are in a rank what they are in the notebook, by every method.

``HOLDS`` is the table in docs/guide/what_a_rank_finds.md, a row for each kind of object. Its checks run in ranks, once
for each method and twice in kept ranks; what they return to the notebook is checked there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import Kernel, ok, who_said
from methods import EVERY_METHOD

ROOT = Path(__file__).parents[2]

NOTEBOOK = """
import abc, collections, dataclasses, datetime, enum, functools, multiprocessing, os, pickle, sys, typing, warnings
import numpy as np, torch
sys.path.insert(0, os.getcwd())
import registered
from torch.utils.data import DataLoader, Dataset

@functools.lru_cache(maxsize=None)
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
def calls(n): return fibonacci(n)
class Lazy:
    @functools.cached_property
    def once(self): return 42
    @functools.cache
    def cached(self): return 43

UserId, P, T = typing.NewType("UserId", int), typing.ParamSpec("P"), typing.TypeVar("T", bound=int)
def of_user(user: UserId) -> UserId: return user
class Box(typing.Generic[T]):
    def put(self, item: T) -> T: return item
class Options(typing.TypedDict, total=False):
    lr: float
class Row(typing.NamedTuple):
    x: int = 3
    def double(self): return 2 * self.x

@functools.singledispatch
def shown(value): return "object"
@shown.register
def _(value: int): return "int"
class _Nothing:
    __slots__ = ("label",)
    def __init__(self): self.label = "nothing"
    def __reduce__(self): return "NOTHING"
NOTHING = _Nothing()
class _Missing:
    def __reduce__(self): return "MISSING"
MISSING = _Missing()
def is_missing(value=MISSING): return value is MISSING

class Planet(enum.Enum):
    EARTH, MARS, RED = (5.9, 6.3), (6.4, 3.3), (6.4, 3.3)
    def __init__(self, mass, radius): self.mass, self.radius = mass, radius
class Level(int, enum.Enum):
    def __new__(cls, value, label):
        self = int.__new__(cls, value)
        self._value_, self.label = value, label
        return self
    LOW, HIGH = (1, "low"), (2, "high")
class Day(datetime.date, enum.Enum):
    NEW_YEAR = 2020, 1, 1
class Limits(dict, enum.Enum):
    SMALL = {"steps": 1}
class Access(enum.Flag):
    READ, WRITE, BOTH = 1, 2, 3

class Base:
    known = {}
    def __init_subclass__(cls, key=None):
        if not hasattr(cls, "name"): raise TypeError("a subclass needs a name")
        Base.known[cls.name] = cls
class First(Base, key=1): name = "first"
class Second(First): name = "second"
class Meta(type):
    made = []
    def __new__(mcs, name, bases, body):
        Meta.made.append(name)
        return super().__new__(mcs, name, bases, {**body, "tag": name.lower()})
class Made(metaclass=Meta): pass
class Plugin(registered.Plugin):
    name = "mine"
    def run(self): return 1
class Abstract(abc.ABC):
    @abc.abstractmethod
    def run(self): ...

class Shape:
    sides = None
class Square(Shape):
    sides = None
@dataclasses.dataclass
class Training:
    steps: list = dataclasses.field(default_factory=list)

class Config:
    class Optim:
        lr = 0.1
        class Kind(enum.Enum):
            ADAM = 1
@dataclasses.dataclass(frozen=True)
class Token:
    text: str
    known: typing.ClassVar[dict] = {}
class Grade(enum.Enum):
    GOOD, BAD = 1, 2
    def __hash__(self): return self.value
for _each in (*map(Token, "abcdef"), *Grade):
    Token.known[_each] = _each
Grade.words = {Grade.GOOD: "good", Grade.BAD: "bad"}
class Slots:
    __slots__ = ("a", "__hidden")
    def __init__(self): self.a, self.__hidden = 1, 2
    def hidden(self): return self.__hidden

def counter():
    n = 0
    def up():
        nonlocal n
        n += 1
        return n
    def get(): return n
    return up, get
up, get = counter()

executed = {}
exec("lr = 0.1\\ndef rate(): return lr", executed)
manager = multiprocessing.Manager()
shared = manager.dict()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
shell = get_ipython()

import array, logging, operator, types
from contextlib import contextmanager
half = lambda x: x / 2
def outer(a):
    def middle(b):
        def inner(c): return a + b + c
        return inner
    return middle
nested = outer(1)(2)
def unbound():
    def reads(): return never
    if False: never = 1
    return reads
reads_unbound = unbound()
def make_even():
    def even(n): return True if n == 0 else odd(n - 1)
    def odd(n): return False if n == 0 else even(n - 1)
    return even
even = make_even()
def countdown(n):
    while n: n -= (yield n) or 1
async def answer(): return 42
@contextmanager
def tagged(tag): yield f"<{tag}>"
def described(a, b: int = 2, *rest, c="c", **more) -> str:
    "What it does."
    return a, b, rest, c, more
described.calls, described.itself = 7, described
class Animal:
    kinds = []
    def __init__(self, name): self.name = name
    def speak(self): return f"{self.name} speaks"
    @property
    def loud(self): return self.name.upper()
    @loud.setter
    def loud(self, value): self.name = value.lower()
    @classmethod
    def named(cls, name): return cls(name)
    @staticmethod
    def legs(): return 4
    def __eq__(self, other): return type(self) is type(other) and self.name == other.name
    __hash__ = None
class Dog(Animal):
    def speak(self): return super().speak() + " loudly"
    def me(self): return __class__
Animal.kinds.append(Dog)
dog, speak = Dog("rex"), Dog("rex").speak
class Node:
    def __init__(self): self.me, self.parts = self, [self]
node = Node()
class Reduced:
    def __init__(self, x): self.x = x
    def __reduce__(self): return Reduced, (self.x * 2,)
class Stated:
    def __init__(self): self.x, self.lock = 1, None
    def __getstate__(self): return {"x": self.x}
    def __setstate__(self, state): self.x, self.restored = state["x"], True
reduced, stated = Reduced(2), Stated()
class Failing(Exception):
    def __init__(self, code, *, why):
        super().__init__(code)
        self.code, self.why = code, why
    def __reduce__(self): return _failing, (self.code, self.why)
def _failing(code, why): return Failing(code, why=why)
failing = Failing(3, why="no reason")
module = types.ModuleType("made_here")
exec("base = 10\\ndef plus(x): return base + x", module.__dict__)
letters = collections.OrderedDict(a=1, b=2)
Point = collections.namedtuple("Point", "x y", defaults=[5])
odds = [letters.keys(), letters.values(), letters.items(), types.MappingProxyType({"a": 1}), NotImplemented, ...,
    range(3), slice(1, 2), types.SimpleNamespace(a=1), array.array("i", [1, 2]), bytearray(b"ab"),
    memoryview(b"xy"), Point(1), operator.itemgetter(1), operator.attrgetter("name"), functools.partial(pow, 2),
    len, str.upper, [].append, logging.getLogger("mine"), collections.defaultdict(lambda: 3),
    collections.Counter("aab"), type(None), dict[str, int], typing.Optional[int], typing.Callable[[int], str],
    int | None, compile("1 + 1", "code", "eval"), 1j, frozenset([1])]

mapped = np.memmap("mapped", dtype=np.int64, mode="w+", shape=(4, 8))
part = mapped[1:3, ::-2]
mapped.flush()
read_only = np.memmap("mapped", dtype=np.int64, mode="r", offset=8)
views = [mapped[0, i % 8 :] for i in range(1500)]
tensor_of_file = torch.from_file("tensor", shared=True, size=16, dtype=torch.int64)
own_copy = torch.from_file("tensor", shared=False, size=16, dtype=torch.int64)
os.makedirs("other", exist_ok=True)
open("other/tensor", "wb").write(bytes(range(128)))
%cd -q other
"""

HOLDS = {
    "functions with `functools.cache` or `lru_cache`": """
assert fibonacci(20) == calls(20) == 6765 and calls.__globals__["fibonacci"] is fibonacci
assert pickle.loads(pickle.dumps(fibonacci)) is fibonacci
""",
    "`cached_property` and cached methods": "assert Lazy().once == 42 and Lazy().cached() == 43",
    "`NewType`, `TypeVar`, `ParamSpec`, generic classes": """
assert of_user.__annotations__["user"] is UserId and UserId.__supertype__ is int
assert pickle.loads(pickle.dumps([UserId, P, T])) == [UserId, P, T] and T.__bound__ is int
assert Box[int]().put(3) == 3 and Box.__parameters__ == (T,)
""",
    "`NamedTuple`, `TypedDict`": """
assert Row().double() == 6 and pickle.loads(pickle.dumps(Row(5))) == Row(5)
assert Options(lr=0.1) == {"lr": 0.1} and Options.__total__ is False
""",
    "objects whose `__reduce__` gives a name": """
assert NOTHING.label == "nothing" and pickle.loads(pickle.dumps(NOTHING)) is NOTHING
assert is_missing() and is_missing(MISSING) and pickle.loads(pickle.dumps(MISSING)) is MISSING
""",
    "Enums, with attributes, aliases, mixed-in types; Flags": """
assert Planet.MARS.mass == 6.4 and Planet.RED is Planet.MARS and list(Planet) == [Planet.EARTH, Planet.MARS]
assert Level(2) is Level.HIGH == 2 and Level.HIGH.label == "high" and Day.NEW_YEAR.year == 2020
assert dict(Limits.SMALL) == {"steps": 1} and Limits({"steps": 1}) is Limits.SMALL
assert Access.READ | Access.WRITE is Access.BOTH
assert all(pickle.loads(pickle.dumps(each)) is each for each in (Planet.RED, Level.LOW, Day.NEW_YEAR, Access.READ))
""",
    "classes with `__init_subclass__` or a metaclass": """
assert Base.known == {"first": First, "second": Second} and Second.__mro__[1] is First
assert Meta.made == ["Made"] and Made.tag == "made" and type(Made) is Meta
assert registered.known == {"mine": Plugin} and Plugin().run() == 1
try: Abstract()
except TypeError: pass
else: raise AssertionError("Abstract can be made")
""",
    "dataclasses, and classes that repeat an attribute of a base": """
Shape.sides = 3
assert Square.sides is None and Training().steps == []
assert dataclasses.fields(Training)[0].default is dataclasses.MISSING
""",
    "nested classes": """
assert Config.Optim.__qualname__ == "Config.Optim"
assert type(pickle.loads(pickle.dumps(Config.Optim()))) is Config.Optim
assert pickle.loads(pickle.dumps(Config.Optim.Kind.ADAM)) is Config.Optim.Kind.ADAM
""",
    "classes with `__slots__`": """
slots = Slots()
assert slots.hidden() == 2 and not hasattr(slots, "__dict__")
""",
    "class attributes that are dicts of the class's objects": """
assert Token("a") in Token.known and Token.known[Token("b")] == Token("b") and len(Token.known) == 8
assert Grade.words[Grade(2)] == "bad"
""",
    "functions with `functools.singledispatch`": "assert shown(1) == 'int' and shown('') == 'object'",
    "functions that share a `nonlocal` variable": """
before = get()
assert up() == get() == before + 1
""",
    "namespaces that `exec` has filled": """
assert executed["rate"]() == 0.1 and callable(executed["__builtins__"]["input"])
""",
    "dicts and lists of a `multiprocessing.Manager`": "shared[rank] = 'seen'\nassert shared[rank] == 'seen'",
    "learning rate schedulers, with their optimizers": """
assert scheduler.optimizer is optimizer
with warnings.catch_warnings():
    warnings.simplefilter("error")
    optimizer.step()
    scheduler.step()
""",
    "the shell, `get_ipython()`": "assert shell is get_ipython() and shell.user_ns['rank'] == rank",
    "`np.memmap` and `torch.from_file(shared=True)`": """
mapped[0, rank] = part[0, rank] = tensor_of_file[rank] = 10 + rank
assert own_copy[15] == 0 and np.shares_memory(views[0], views[8]) and views[1499].base is not None
assert mapped[1, 7 - 2 * rank] == 10 + rank and not read_only.flags.writeable
""",
}

AS_BY_CLOUDPICKLE = {
    "lambdas and closures": "assert half(3) == 1.5 and nested(3) == 6 and even(10) and not even(3)",
    "closures over what is not bound": """
try: reads_unbound()
except NameError: pass
else: raise AssertionError("it is bound")
""",
    "generators, coroutines, context managers": """
assert list(countdown(3)) == [3, 2, 1]
try: answer().send(None)
except StopIteration as over: assert over.value == 42
with tagged("b") as tag: assert tag == "<b>"
""",
    "what a function has": """
import inspect
assert str(inspect.signature(described)) == "(a, b: int = 2, *rest, c='c', **more) -> str"
assert described(1, c=3, d=4) == (1, 2, (), 3, {"d": 4}) and described.__doc__ == "What it does."
assert described.calls == 7 and described.itself is described and "What it does" in inspect.getsource(described)
""",
    "methods, properties, super()": """
assert dog.speak() == speak() == "rex speaks loudly" and Dog.named("a") == Dog("a") and Dog.legs() == 4
dog.loud = "MAX"
assert dog.name == "max" and dog.me() is Dog and Animal.kinds == [Dog] and Dog.__hash__ is None
dog.name = "rex"
""",
    "objects in themselves": "assert node.me is node and node.parts[0] is node",
    "objects that pickle in their own way": """
assert stated.x == 1 and pickle.loads(pickle.dumps(failing)).why == "no reason"
assert type(failing) is Failing and failing.args == (3,) and reduced.x in (2, 4)
""",
    "modules that were made here": "assert module.plus(1) == 11 and module.__name__ == 'made_here'",
    "builtin kinds": """
keys, values, items, proxy, no, dots, some, cut, space, numbers, raw, view, point, *callables = odds
assert [*keys] == ["a", "b"] and [*values] == [1, 2] and [*items] == [("a", 1), ("b", 2)] and proxy["a"] == 1
assert no is NotImplemented and dots is ... and list(some) == [0, 1, 2] and cut == slice(1, 2) and space.a == 1
assert list(numbers) == [1, 2] and raw == b"ab" and bytes(view) == b"xy" and point == Point(1, 5)
item, name, part, length, upper, append, logger, default, counts, none, *types_ = callables
assert item("ab") == "b" and name(dog) == "rex" and part(3) == 8 and length("a") == 1 and upper("a") == "A"
assert append(1) is None and logger.name == "mine" and default[0] == 3 and counts["a"] == 2 and none is type(None)
assert types_[0] == dict[str, int] and types_[1] == typing.Optional[int]
assert eval(types_[4]) == 2 and types_[5:] == [1j, {1}]
""",
}
"""What cloudpickle's own tests have it do, through a kernel and two ranks."""

LIBRARY = """
known = {}
class Plugin:
    def __init_subclass__(cls):
        assert callable(cls.run), f"{cls.__name__} has no run()"
        known[cls.name] = cls
"""

ALL = {**HOLDS, **AS_BY_CLOUDPICKLE}
CHECKS = "".join(
    f"def check_{number}():\n{textwrap.indent(check.strip(), '    ')}\n" for number, check in enumerate(ALL.values())
)
CELL = f"""
def said(check):
    try:
        check()
    except BaseException as error:
        return f"{{type(error).__name__}}: {{error}}"
{CHECKS}
came_back = [fibonacci, UserId, P, T, MISSING, Planet.RED, Level.HIGH, Access.BOTH, First, Made, Config.Optim, Slots]
[said(check) for check in ({", ".join(f"check_{number}" for number in range(len(ALL)))})], came_back
"""


@pytest.fixture(params=[*EVERY_METHOD, "kept", "kept, later"], scope="module")
def kernel_and_said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kernel, list[list[str | None]]]]:
    """What each check says in each of two ranks, None if it holds."""
    method = "" if "kept" in request.param else f"-m {request.param}"
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        (kernel.folder / "registered.py").write_text(LIBRARY)
        (kernel.folder / "tensor").write_bytes(bytes(16 * 8))
        ok(kernel.execute("%load_ext nbspawn" + NOTEBOOK))
        for _ in range(2 if request.param == "kept, later" else 1):
            magic = "%%ranks" if kernel.value("'found' in globals()") else f"%%spawn 2 {method}"
            keep = "--keep" if "kept" in request.param and magic != "%%ranks" else ""
            ok(kernel.execute(f"{magic} {keep} -o found{CELL}"))
        yield kernel, kernel.value("[said for said, came_back in found]")


@pytest.mark.parametrize("kind", ALL)
def test_it_is_what_it_is_in_the_notebook(kernel_and_said: Any, kind: str) -> None:
    _, said = kernel_and_said
    assert [of_rank[list(ALL).index(kind)] for of_rank in said] == [None, None]


def test_what_comes_back_is_the_notebooks_own(kernel_and_said: Any) -> None:
    kernel, _ = kernel_and_said
    here = CELL.partition("came_back = ")[2].partition("\n")[0]
    same = f"[b is h for _, came_back in found for b, h in zip(came_back, {here})]"
    assert kernel.value(same) == [True] * 24
    assert kernel.value("mapped[0, :2].tolist(), tensor_of_file[:2].tolist()") == ([10, 11], [10, 11])


def test_the_guide_has_the_table() -> None:
    text = (ROOT / "docs" / "guide" / "what_a_rank_finds.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in HOLDS] == list(HOLDS)


def test_a_rank_pickles_them_itself(kernel: Kernel, method: str) -> None:
    """Plain pickle finds them by their names: in a file that the notebook reads, in an object collective."""
    ok(kernel.execute(DEFINED))
    cell = """
import torch.distributed as dist
dist.init_process_group("gloo")
gathered = [None] * 2
dist.all_gather_object(gathered, [Config.Optim.Kind.ADAM, UserId, cached, Config.Optim()])
torch.save(Config.Optim(), f"saved-{rank}")
[kind is Config.Optim.Kind.ADAM and user is UserId and one is cached and type(optim) is Config.Optim
 for kind, user, one, optim in gathered]
"""
    assert ok(kernel.execute(f"%%spawn 2 -m {method}{cell}")).result == "[0-1] [True, True]"
    assert kernel.value("type(torch.load('saved-1', weights_only=False)) is Config.Optim") is True


DEFINED = """
import enum, functools, typing, torch
class Config:
    class Optim:
        class Kind(enum.Enum):
            ADAM = 1
UserId = typing.NewType("UserId", int)
@functools.cache
def cached(): return scale * 2
scale = 3
"""


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_processes_of_a_rank_have_them(kernel: Kernel, method: str, start: str) -> None:
    """A script's children import the script again. What a pool is sent later has no name there either."""
    ok(kernel.execute(DEFINED))
    cell = f"""
import multiprocessing as mp
context = mp.get_context({start!r})
class OfTheCell:
    def __call__(self, queue): queue.put([self, Config.Optim.Kind.ADAM, cached()])
queue = context.Queue()
process = context.Process(target=OfTheCell(), args=(queue,))
process.start()
own, kind, number = queue.get()
process.join()
with context.Pool(1) as pool:
    doubled = pool.map(lambda x: x * cached(), range(3))
type(own) is OfTheCell, kind is Config.Optim.Kind.ADAM, number, doubled, process.exitcode
"""
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}{cell}"))
    assert reply.result == "[0-1] (True, True, 6, [0, 6, 12], 0)"


@pytest.mark.extended
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_workers_of_a_data_loader(kernel: Kernel, method: str, start: str) -> None:
    """pytorch.org/docs/stable/data.html#platform-specific-behaviors: "wrap your code in a main guard"; a notebook has
    none."""
    ok(
        kernel.execute(
            "import torch\nfrom torch.utils.data import DataLoader, Dataset\nscale = 3\n"
            "class Squares(Dataset):\n"
            "    def __len__(self): return 4\n"
            "    def __getitem__(self, i): return torch.tensor(i * i * scale)"
        )
    )
    cell = (
        f"loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context={start!r},\n"
        "                    worker_init_fn=lambda worker: None)\n[batch.tolist() for batch in loader]"
    )
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\n{cell}")).result == "[0-1] [[0, 3], [12, 27]]"


def test_a_file_that_has_been_replaced(kernel: Kernel) -> None:
    """Its mapping is of the old one, which no rank can map: it is inherited."""
    ok(
        kernel.execute(
            "import os\nimport numpy as np\nold = np.memmap('replaced', dtype='u1', mode='w+', shape=(4,))\n"
            "open('new', 'wb').write(bytes([9] * 4))\nos.replace('new', 'replaced')"
        )
    )
    assert "2 ranks · fork: old cannot travel" in ok(kernel.execute("%%spawn 2\nold.sum()")).table["text/plain"]
    reply = kernel.execute("%%spawn 2 -m forkserver\nold.sum()")
    assert reply.ename == "PayloadError" and "The file that it maps has gone." in reply.evalue


# ---------------------------------------------------------------- what travels, and does not load

NOT_LOADED = """
import os, sys, types
os.makedirs("relative", exist_ok=True)
os.makedirs("elsewhere", exist_ok=True)
with open("relative/of_relative_path.py", "w") as _file:
    _file.write("answer = 5\\ndef more(x): return x + answer\\nclass Made: pass\\nmade = Made()")
sys.path.append("relative")
import of_relative_path
stub = types.ModuleType("a_stub")
sys.modules["a_stub"] = stub
exec("class Made: pass", vars(stub))
made = stub.Made()
class Fragile:
    def __setstate__(self, state): raise ValueError("it breaks")
    def __init__(self): self.x = 1
fragile = Fragile()
%cd -q elsewhere
"""
REFUSED = {
    "made": "made cannot be loaded in a rank: ModuleNotFoundError: No module named 'a_stub'. The notebook has it from "
    "no file that a rank could find. Import it inside the cell, or run with -m fork.",
    "fragile.x": "fragile cannot be loaded in a rank: ValueError: it breaks. Create it inside the cell, or run with -m "
    "fork.",
}


@pytest.fixture(scope="module")
def not_loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        ok(kernel.execute("%load_ext nbspawn" + NOT_LOADED))
        yield kernel
        kernel.assert_no_rank()


@pytest.mark.parametrize("used", REFUSED)
def test_what_does_not_load_is_named(not_loaded: Kernel, used: str) -> None:
    reply = not_loaded.execute(f"%%spawn 2 -m forkserver\nprint('ran')\n{used}")
    assert reply.ename == "PayloadError" and reply.evalue == REFUSED[used]
    assert "ran" not in reply.text() and str(ROOT / "nbspawn") not in reply.traceback
    assert ("it breaks" in reply.traceback.partition("PayloadError")[0]) == (used == "fragile.x"), "the user's frames"


def test_a_module_that_a_new_process_does_not_find(not_loaded: Kernel, method: str) -> None:
    """It travels by value, with what is in it; and the notebook's cloudpickle does as it did."""
    cell = "import pickle\n(of_relative_path.more(1), type(of_relative_path.made) is of_relative_path.Made)"
    assert ok(not_loaded.execute(f"%%spawn 2 -m {method}\n{cell}")).result == "[0-1] (6, True)"
    ok(not_loaded.execute("from of_relative_path import more, made as own"))
    cell = "import pickle\nmore(2), pickle.loads(pickle.dumps(own)) is not own, own"
    ok(not_loaded.execute(f"%%spawn 2 -m {method} -o back\n{cell}"))
    assert not_loaded.value("back[1][:2], type(back[1][2]) is of_relative_path.Made") == ((7, True), True)
    assert not_loaded.value("import cloudpickle; cloudpickle.list_registry_pickle_by_value()") == set()


@pytest.mark.parametrize("keep", ["", "--keep"])
@pytest.mark.parametrize("used", REFUSED)
def test_what_does_not_load_is_inherited(not_loaded: Kernel, used: str, keep: str) -> None:
    """By default, where fork is safe. The cell has not run before."""
    reply = ok(not_loaded.execute(f"%%spawn 2 {keep}\nprint('ran')\n{used} is not None"))
    assert reply.result == "[0-1] True" and who_said(reply.text(), "ran") == {0, 1} and reply.text().count("ran") <= 2
    assert f"2 ranks · fork: {used.partition('.')[0]} cannot travel, and fork is safe here" in reply.table["text/plain"]
    if keep:
        assert ok(not_loaded.execute("%%ranks\nworld_size")).result == "[0-1] 2"
        ok(not_loaded.execute("%ranks stop"))


def test_what_does_not_load_where_fork_is_unsafe(not_loaded: Kernel) -> None:
    ok(not_loaded.execute("import threading\nheld = threading.Lock()\n_ = held.acquire()\nfragile.held = [held]"))
    ok(not_loaded.execute("Fragile.__getstate__ = lambda self: {'x': self.x}"))
    try:
        reply = not_loaded.execute("%%spawn 2\nfragile.x")
    finally:
        ok(not_loaded.execute("del fragile.held, Fragile.__getstate__"))
    assert reply.ename == "PayloadError" and "fragile cannot be loaded in a rank: ValueError" in reply.evalue
    assert "And fork, which would need no sending, is unsafe: fragile.held[0] is a lock that is held" in reply.evalue


def test_kept_ranks_stay_that_cannot_load_something(not_loaded: Kernel) -> None:
    ok(not_loaded.execute("%%spawn 2 --keep -m forkserver\nmine = 3"))
    try:
        reply = not_loaded.execute("%%ranks --push fragile\nfragile.x")
        assert reply.ename == "PayloadError" and reply.evalue == REFUSED["fragile.x"]
        assert ok(not_loaded.execute("%%ranks\nmine")).result == "[0-1] 3"
    finally:
        ok(not_loaded.execute("%ranks stop"))


def test_the_first_command_of_a_session_that_cannot_be_loaded_is_not_lost(not_loaded: Kernel) -> None:
    """By default, under which forked ranks take the place of those that a start could not serve."""
    cell = "import nbspawn\nwith nbspawn.Session(2) as session:\n    print(session.run(lambda rank: fragile.x))"
    reply = not_loaded.execute(cell)
    assert reply.ename == "PayloadError" and "fn cannot be loaded in a rank: ValueError: it breaks" in reply.evalue


@pytest.mark.parametrize("call", ["spawn", "start_processes"])
def test_a_function_that_does_not_load(not_loaded: Kernel, call: str) -> None:
    ok(not_loaded.execute("import nbspawn\ndef use(rank): return fragile.x"))
    reply = not_loaded.execute(f"nbspawn.{call}(use, nprocs=2, start_method='forkserver')")
    assert reply.ename == "PayloadError" and "fn cannot be loaded in a rank: ValueError: it breaks" in reply.evalue


ONE_MEMORY = """
import numpy as np, pandas as pd, torch
class Holder: pass
def memories():
    a = np.arange(12.0).reshape(3, 4)
    large = np.zeros(10**6)
    fields = np.zeros(5, dtype=[("x", "i4"), ("y", "f8")])
    model, holder, read_only, buffer = torch.nn.Linear(300, 300), Holder(), a.view(), bytearray(100)
    holder.array, holder.view = a, a[2]
    read_only.flags.writeable = False
    tensor = torch.zeros(10)
    return {
        "a": a, "tensor of a": torch.from_numpy(a), "row": a[1], "column": a[:, 2], "flat": a.ravel(), "back": a[::-1],
        "holder": holder, "read_only": read_only,
        "of one buffer": (np.frombuffer(buffer, "u1"), np.frombuffer(buffer, "i2")),
        "large": large, "rest": torch.from_numpy(large[100:]), "part": large[10:20], "fields": fields, "x": fields["x"],
        "model": model, "weight": model.weight.detach().numpy(), "tensor": tensor, "array": tensor.numpy(),
        "repeated": np.broadcast_to(np.arange(3.0), (1000, 3)),
        "again": np.lib.stride_tricks.as_strided(a[0], (5, 4), (0, 8)),
        "empty": np.zeros(0), "number": np.array(5.0), "objects": np.array([a, "text"], dtype=object),
    }
def check(of):
    of["a"][1, 2], of["a"][2, 0], of["a"][0, 3] = 100, 200, 300
    assert [of["tensor of a"][1, 2], of["row"][2], of["column"][1], of["flat"][6], of["back"][1, 2]] == [100] * 5
    assert of["holder"].array is of["a"] and of["holder"].view[0] == 200 and of["objects"][0] is of["a"]
    assert of["read_only"][2, 0] == 200 and not of["read_only"].flags.writeable
    of["of one buffer"][0][1] = 1
    assert of["of one buffer"][1][0] == 256
    of["large"][105], of["large"][12] = 7, 3
    assert of["rest"][5] == 7 and of["part"][2] == 3 and of["rest"].shape == (10**6 - 100,)
    of["fields"]["x"][1] = 9
    assert of["x"][1] == 9
    with torch.no_grad():
        of["model"].weight[0, 0] = 42
    of["tensor"][3] = 5
    assert of["weight"][0, 0] == 42 and of["array"][3] == 5
    assert of["repeated"].strides == (0, 8) and of["repeated"].sum() == 3000 and not of["repeated"].flags.writeable
    assert of["again"].strides == (0, 8) and (of["again"][:, 3] == 300).all()
    assert of["empty"].shape == (0,) and of["number"].shape == () and of["number"] == 5
    return True
shared, in_function = memories(), memories()
def use(): return check(in_function)
frame = pd.DataFrame({"a": range(5), "b": range(5)})
series, matrix = frame["a"], np.zeros((3000, 3000))
wide, high = matrix[5], matrix[:, 7]
"""


def test_what_lies_over_one_memory(kernel: Kernel, method: str) -> None:
    """Also what one name alone leads to, or a function; and what is sent to kept ranks later."""
    ok(kernel.execute(ONE_MEMORY))
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\ncheck(shared), use(), check(memories())")).result == (
        "[0-1] (True, True, True)"
    )
    if method != "fork":
        ok(kernel.execute("%%spawn 2 --keep\ncheck"))
        assert ok(kernel.execute("%%ranks --push shared\ncheck(shared)")).result == "[0-1] True"
        ok(kernel.execute("%ranks stop"))


def test_what_does_not_stay_over_one_memory(kernel: Kernel) -> None:
    """pandas' objects, of which one does not see what is written to another; and what is far apart in its base."""
    ok(kernel.execute(ONE_MEMORY))
    cell = "series.iloc[0] = 9\nwide[7] = 1\nframe['a'].iloc[0], high[5], np.shares_memory(wide, high)"
    assert (
        ok(kernel.execute(f"%%spawn 2 -m forkserver\n{cell}")).result == "[0-1] (np.int64(0), np.float64(0.0), False)"
    )


def test_generics_of_pydantic(kernel: Kernel, method: str) -> None:
    """What has arrived is what ``Page[int]`` makes there: of the notebook's in a rank, of a rank's in the notebook."""
    pytest.importorskip("pydantic")
    notebook = """
import typing
import pydantic
T, U = typing.TypeVar("T"), typing.TypeVar("U")
class Page(pydantic.BaseModel, typing.Generic[T]):
    items: list[T]
class Pair(pydantic.BaseModel, typing.Generic[T, U]):
    a: T
    b: U
page, pair, of_both = Page[int](items=[1]), Pair[int, str](a=1, b="b"), Page[str]"""
    ok(kernel.execute(notebook))
    cell = "assert (type(page), type(pair)) == (Page[int], Pair[int, str])\n"
    cell += "page, Page[str](items=['x']), Pair[int, int](a=1, b=2), Page[float](items=[1.0])"
    ok(kernel.execute(f"%%spawn 2 -m {method} -o back\n{cell}"))
    kinds = "[Page[int], Page[str], Pair[int, int], Page[float]]"
    assert kernel.value(f"list(map(type, back[0])) == list(map(type, back[1])) == {kinds}, of_both is Page[str]") == (
        True,
        True,
    )


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_hashes_makes_a_hollow_class(seed: int) -> None:
    """Which of a registry and its classes is pickled first depends on it."""
    program = """
import sys
from nbspawn._payload.by_value import ByValue
class Base:
    known = {}
    def __init_subclass__(cls): Base.known[cls.__name__] = cls
for name in "ABCDEF":
    globals()[name] = type(name, (Base,), {"get": lambda self: Base.known})
ByValue(globals()).dump({name: globals()[name] for name in {*"ABCDEF", "Base"}}, sys.stdout.buffer)
"""
    load = """
import pickle, sys
from nbspawn._payload.by_value import loading
with loading({}):
    loaded = pickle.load(sys.stdin.buffer)
base = loaded.pop("Base")
assert base.known == loaded, (base.known, loaded)
assert loaded["A"]().get() is base.known
"""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    packed = subprocess.run([sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE)
    subprocess.run([sys.executable, "-c", load], env=environment, check=True, input=packed.stdout)
