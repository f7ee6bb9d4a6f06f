"""What makes no sense is refused in one sentence before anything starts; what cannot be looked at is told as such."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import sharedctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernels import Kernel, lives, ok, wait_gone
from resolving import resolved

import nbspawn
from nbspawn import Session
from nbspawn._engine.start import single_process_objects
from nbspawn._notebook import arguments
from nbspawn._payload.diagnosis import one_line, parts
from nbspawn._payload.packing import DESCRIPTORS, UnpicklableError, Value, pack_variables
from nbspawn._session.views import StreamView

# ---------------------------------------------------------------- arguments of the functions


def divide(rank: int) -> float:
    numerator = rank + 1
    return numerator / 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 5.0), ("grace_period", 3.0), ("view", StreamView()), ("pdb", True), ("debugpy", True)],
)
def test_nothing_that_a_watch_does_is_ignored_without_one(name: str, value: object) -> None:
    arguments_: dict[str, Any] = {name: value}
    with pytest.raises(nbspawn.UsageError, match=rf"{name} would be ignored, because the ranks are not"):
        nbspawn.spawn(divide, nprocs=2, join=False, **arguments_)


def test_all_that_would_be_ignored_is_named() -> None:
    with pytest.raises(nbspawn.UsageError, match="join=False timeout and grace_period would be ignored"):
        nbspawn.spawn(divide, nprocs=2, join=False, timeout=5, grace_period=0)


def test_the_variables_of_an_error_are_shown_without_a_watch_too(nothing_left: None) -> None:
    context = nbspawn.spawn(divide, join=False, start_method="fork", show_locals=True)
    assert isinstance(context, nbspawn._engine.run.local_context.LocalContext)
    with pytest.raises(nbspawn.RankRaisedError, match="numerator = 1"):
        context.join()


def test_what_a_session_cannot_use() -> None:
    session = Session(2)
    with pytest.raises(nbspawn.UsageError, match=r"run\(\) takes a function: execute\(\) takes source code"):
        session.run("rank", 5)  # type: ignore[arg-type]
    with pytest.raises(nbspawn.UsageError, match=r"execute\(\) takes source code, got .*: run\(\) takes a function"):
        session.execute(divide)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional argument"):
        session.execute("rank", 5)  # type: ignore[misc]


SCRIPT = """
import sys, nbspawn

def helper(rank):
    return big[rank]

with nbspawn.Session(2, start_method=sys.argv[1]) as session:
    session.execute("mine = rank + 1")
    session.push(big=[7, 8])
    print("pushed:", list(session.execute("sum(big)")))
    print("pulled:", list(session.pull("mine")))
    print("called:", list(session.run(helper)))
"""


@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(name, marks=pytest.mark.extended) for name in ("fork", "spawn"))]
)
def test_a_script_pushes_variables_to_cells(method: str, tmp_path: Path) -> None:
    """No kernel, so no shell before the first cell makes one."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script, method], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == ["pushed: [15, 15]", "pulled: [1, 2]", "called: [7, 8]"]


# ---------------------------------------------------------------- names of variables

RESERVED = {
    "class": "is a Python keyword",
    "None": "is a Python keyword",
    "print": "is a Python builtin",
    "list": "is a Python builtin",
    "In": "is one of IPython's own variables",
    "get_ipython": "is one of IPython's own variables",
    "exit": "is one of IPython's own variables",
    "_": "is one of IPython's own variables",
    "___": "is one of IPython's own variables",
    "_5": "is one of IPython's own variables",
    "_i": "is one of IPython's own variables",
    "_i12": "is one of IPython's own variables",
    "_dh": "is one of IPython's own variables",
    "__name__": "is reserved by Python",
    "a-b": "cannot be the name of a variable",
}


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize("option", ["-o", "--pull", "--push"])
def test_names_that_are_taken(name: str, option: str) -> None:
    for parser in [arguments.RANKS_PARSER] + [arguments.PARSER] * (option == "-o"):
        with pytest.raises(nbspawn.UsageError, match=f"'{name}' {RESERVED[name]}"):
            arguments.parse(f"{option} {name}", parser)


def test_names_that_are_free() -> None:
    for name in ("out", "match", "_mine", "_i_", "__mine", "In5", "rank"):
        assert arguments.parse(f"2 -o {name}").out == name
        assert arguments.parse(f"--pull a,{name}", arguments.RANKS_PARSER).pull == ["a", name]


def test_no_option_takes_the_notebooks_own_names(kernel: Kernel) -> None:
    for cell in ("%%spawn 2 -o get_ipython\nrank", "%%spawn 2 -o In\nrank", "%%ranks --pull print\n1"):
        reply = kernel.execute(cell)
        assert reply.ename == "UsageError" and reply.traceback.count("\n") == 0, "one sentence"
    assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1", "magics work"


# ---------------------------------------------------------------- names of sessions


@pytest.fixture
def two_sessions(kernel: Kernel) -> Iterator[Kernel]:
    """A rank that stays in each of @a and @b."""
    for name in "ab":
        ok(kernel.execute(f"%%spawn 1 --keep --name {name} -m fork\n'of {name}'"))
    yield kernel
    kernel.execute("%ranks auto off")
    kernel.execute("%ranks stop")


@pytest.mark.parametrize("line", ["%%ranks @a @b\nrank", "%ranks logs 0 @a @b", "%ranks restart @b @a"])
def test_what_is_for_one_session_refuses_two(two_sessions: Kernel, line: str) -> None:
    reply = two_sessions.execute(line)
    assert reply.ename == "UsageError" and "expected one session, got 2: @" in reply.traceback
    assert reply.traceback.count("\n") == 0 and len(two_sessions.ranks()) == 2


def test_sessions_are_listed_by_name(two_sessions: Kernel) -> None:
    message = ok(two_sessions.execute("%ranks @b")).text()
    assert "1 ranks @b" in message and "@a" not in message
    message = ok(two_sessions.execute("%ranks @b @a")).text()
    assert message.index("@b") < message.index("@a")
    reply = two_sessions.execute("%ranks @c")
    assert reply.ename == "UsageError" and "there are no kept ranks named 'c'" in reply.traceback
    assert "There are: @a, @b" in reply.traceback


def test_several_sessions_are_stopped_by_name(two_sessions: Kernel) -> None:
    reply = two_sessions.execute("%ranks stop @a @nobody")
    assert "named 'nobody'" in reply.traceback and len(two_sessions.ranks()) == 2, "all or none"
    for line in ("%ranks stop @", "%ranks stop @a-b"):
        assert "cannot be a name" in two_sessions.execute(line).traceback
    ok(two_sessions.execute("%%spawn 1 --keep -m fork\n'of no name'"))
    ok(two_sessions.execute("%ranks stop @b @a @a"))
    left = ok(two_sessions.execute("%ranks")).text()
    assert "1 ranks" in left and "@" not in left


def test_auto_mode_is_switched_off_for_all(two_sessions: Kernel) -> None:
    ok(two_sessions.execute("%ranks auto on @a"))
    reply = two_sessions.execute("%ranks auto off @b")
    assert reply.ename == "UsageError" and "takes no name" in reply.traceback


@pytest.mark.parametrize("how", ["reload", "unload"])
def test_unloading_says_what_it_ends(unloaded: Kernel, how: str) -> None:
    ok(unloaded.execute("%%spawn 2 --keep --name mine -m fork\nx = 1"))
    ok(unloaded.execute("%%spawn 3 --background -m fork\nimport time\ntime.sleep(600)"))
    before = [rank.pid for rank in unloaded.ranks()]
    assert len(before) == 5
    message = ok(unloaded.execute(f"%{how}_ext nbspawn")).text()
    assert "the 2 kept ranks @mine have ended, with their variables: `%%spawn 2 --keep --name mine`" in message
    assert "the 3 ranks in the background @bg1 have ended: run their cell again" in message
    wait_gone(before)
    assert not any(map(lives, before))


def test_unloading_has_nothing_to_say_of_ranks_that_have_ended(unloaded: Kernel) -> None:
    unloaded.execute("%%spawn 1 --keep -m fork\nimport os\nos._exit(3)")
    reply = ok(unloaded.execute("%reload_ext nbspawn"))
    assert not reply.text()


# ---------------------------------------------------------------- backends and environments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-b nope", "torch has no backend 'nope': use gloo, "),
        ("-b ''", "torch has no backend '': use gloo, "),
        ("-b undefined", "torch has no backend 'undefined': use gloo, "),
        ("-b gloo,nope", "torch has no backend 'gloo,nope': use gloo, "),
        ("-b cpu:nope", "torch has no backend 'nope': use gloo, "),
        ("-b cpu:gloo:x", "'cpu:gloo:x' does not name one backend for each device type: write it as cpu:gloo,"),
        ("-b cpu:gloo,cpu:gloo", "does not name one backend for each device type"),
        ("-b toaster:gloo", "does not name one backend for each device type"),
        ("--env RANK=0", "RANK differs by rank: it cannot be set for all of them"),
        ("--env MASTER_PORT=abc", "MASTER_PORT must be between 1 and 65535, got 'abc'"),
        ("--env MASTER_PORT=", "MASTER_PORT must be between 1 and 65535, got ''"),
        ("--env MASTER_PORT=65536", "MASTER_PORT must be between 1 and 65535, got '65536'"),
        ("--env =5", "'=5' is not NAME=VALUE"),
    ],
)
def test_refused_before_anything_starts(kernel: Kernel, options: str, says: str) -> None:
    reply = kernel.execute(f"%%spawn 2 {options}\nrank")
    assert reply.ename == "UsageError" and says in reply.traceback
    assert reply.traceback.count("\n") == 0 and not kernel.ranks()


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_a_backend_that_this_torch_is_built_without() -> None:
    with pytest.raises(nbspawn.UsageError, match="this torch is built without mpi: use gloo, .*, or auto"):
        resolved(2, "mpi", {})
    with pytest.raises(nbspawn.UsageError, match="this torch is built without mpi"):
        resolved(2, "cpu:gloo,cuda:mpi", {})


def test_the_functions_refuse_them_too() -> None:
    with pytest.raises(nbspawn.UsageError, match="torch has no backend 'nope'"):
        nbspawn.spawn(divide, backend="nope")
    with pytest.raises(nbspawn.UsageError, match="torch has no backend 'nope'"):
        Session(2, backend="nope")
    with pytest.raises(nbspawn.UsageError, match="torch has no backend '5'"):
        Session(2, backend=5)  # type: ignore[arg-type]
    for env, says in {
        ("", "x"): "'' cannot be the name of an environment variable",
        ("A\0", "x"): "cannot be the name",
        ("A=B", "x"): "'A=B' cannot be the name",
        ("A", "x\0"): "variable A must be text without NUL",
        ("A", 5): "variable A must be text without NUL, got 5",
    }.items():
        with pytest.raises(nbspawn.UsageError, match=says):
            Session(2, env=dict([env]))  # type: ignore[list-item]


def test_backends_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "of_a_third_party"])
    for backend in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "of_a_third_party"):
        assert resolved(2, backend, {"MASTER_PORT": "29500"}).backend == backend
    assert resolved(2, "GLOO", {}).backend == "gloo", "torch does not mind capitals either"


def test_a_backend_for_each_kind_of_device(kernel: Kernel) -> None:
    cell = "%%spawn 2 -b cpu:gloo,meta:gloo\nimport torch, torch.distributed as dist\nt = torch.ones(1)\n"
    assert ok(kernel.execute(cell + "dist.all_reduce(t)\nt.item()")).result == "[0-1] 2.0"


# ---------------------------------------------------------------- what cannot be looked at

REFUSING = """
class TextRefused(Exception):
    def __str__(self):
        raise KeyError("no text")

class AttributesRefused:
    def __getattribute__(self, name):
        raise OSError(name)
    def __repr__(self):
        raise TextRefused

class ClassRefused:
    @property
    def __class__(self):
        raise ZeroDivisionError
    def __reduce_ex__(self, protocol):
        raise TextRefused

class DictRefused:
    __slots__ = ()
    @property
    def __dict__(self):
        raise RuntimeError("no dict")
    def __reduce_ex__(self, protocol):
        raise TypeError("not me")

class MappingRefused(dict):
    def items(self):
        raise RuntimeError("no items")
    def __reduce_ex__(self, protocol):
        raise TypeError("not me")

class Meta(type):
    def __getattribute__(cls, name):
        if refusing and name in ("__module__", "__qualname__", "__mro__"):  # pytest asks for the __name__
            raise OSError(name)
        return super().__getattribute__(name)

class TypeRefused(metaclass=Meta):
    def __reduce_ex__(self, protocol):
        raise TypeError("not me")

class _:
    def __reduce_ex__(self, protocol):
        raise TypeError("not me")

refusing = False
refused = [AttributesRefused(), ClassRefused(), DictRefused(), MappingRefused(a=1), TypeRefused(), _()]
refusing = True
"""
NAMES = ("AttributesRefused", "ClassRefused", "DictRefused", "MappingRefused", "TypeRefused", "_")


@pytest.fixture(params=range(len(NAMES)), ids=NAMES)
def refused(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """The name of a class, and an object of it that raises at a look."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(REFUSING, namespace)
    return NAMES[request.param], namespace["refused"][request.param]


def test_a_value_that_refuses_to_be_looked_at_stays(refused: tuple[str, Any]) -> None:
    name, obj = refused
    value = Value.of(obj)
    assert re.match(rf"the result is an? {name} \(", value.result.reason)
    assert value.text()
    within = Value.of([1, obj])
    assert within.result.reason.startswith("the result[1] is a")


def test_a_variable_that_refuses_to_be_looked_at_is_named(refused: tuple[str, Any]) -> None:
    name, obj = refused
    with pytest.raises(UnpicklableError, match=rf"^odd cannot travel to another process: odd is an? {name} \("):
        pack_variables({"odd": obj, "x": 1})
    assert single_process_objects.notes({"odd": obj}) == ()
    list(parts(obj))


def test_the_text_of_an_error_may_be_refused_too() -> None:
    namespace: dict[str, Any] = {}
    exec(REFUSING, namespace)
    assert one_line(namespace["TextRefused"]()) == "TextRefused: <its __str__ raised KeyError>"


def test_a_notebook_with_objects_that_refuse_to_be_looked_at(own_kernel: Kernel) -> None:
    ok(own_kernel.execute("%%spawn 1 -m forkserver\nrank"))  # from now on each cell's end looks at the variables
    ok(own_kernel.execute(REFUSING + "def nobodys(): pass\nnobodys.__module__ = None\nodd = refused[0]"))
    assert ok(own_kernel.execute("1 + 1")).text("stderr") == ""
    reply = own_kernel.execute("%%spawn 2 -m forkserver\nodd\nrank")
    assert "PayloadError: odd cannot travel to another process: odd is a" in reply.traceback
    assert reply.traceback.count("\n") == 0
    assert ok(own_kernel.execute("%%spawn 2\nmine = odd\nrank")).result == "[0] 0\n[1] 1", "by fork"
    ok(own_kernel.execute(f"%%spawn 1 -m forkserver -o out\n{REFUSING}\nrefused[2]"))
    assert "the result is a DictRefused (TypeError: not me)" in own_kernel.execute("out[0]").traceback


# ---------------------------------------------------------------- more than a process can be sent


def count(rank: int, tensors: list[torch.Tensor]) -> int:
    tensors[rank][0] = 7
    return len(tensors)


@pytest.fixture
def shared() -> list[torch.Tensor]:
    """More tensors than multiprocessing sends descriptors."""
    return [torch.zeros(2).share_memory_() for _ in range(300)]


def test_too_many_shared_tensors_are_counted(shared: list[torch.Tensor]) -> None:
    with pytest.raises(UnpicklableError) as caught:
        pack_variables({"model": shared, "x": 1})
    message = str(caught.value)
    assert message.startswith("model cannot travel to another process: 300 descriptors")
    assert f"the fork server takes {DESCRIPTORS}." in message and "set_sharing_strategy('file_system')" in message
    pack_variables({"model": shared[:DESCRIPTORS]}).close()
    pack_variables({"views": [shared[0][:1] for _ in range(300)]}).close()
    pack_variables({"numbers": [sharedctypes.RawValue("i") for _ in range(300)]}).close()


def test_too_many_shared_tensors_under_the_fork_server(shared: list[torch.Tensor], nothing_left: None) -> None:
    with pytest.raises(nbspawn.PayloadError, match="args cannot travel to another process: 300 descriptors"):
        nbspawn.spawn(count, (shared,), 2, start_method="forkserver")


@pytest.mark.parametrize(
    ("method", "taken"), [("auto", "fork"), pytest.param("spawn", "spawn", marks=pytest.mark.extended)]
)
def test_too_many_shared_tensors_for_the_fork_server_go_otherwise(
    shared: list[torch.Tensor], method: str, taken: str, nothing_left: None
) -> None:
    view = StreamView()
    values = nbspawn.spawn(count, (shared,), 2, start_method=method, view=view)
    assert list(values) == [300, 300] and view.run.method == taken
    assert [tensor[0].item() for tensor in shared[:3]] == [7.0, 7.0, 0.0], "they stay shared"
