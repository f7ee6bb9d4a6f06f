"""The notebook's language holds in its ranks: compiler flags, what only annotations name, ``sys.argv``. So it does by
every method, in kept ranks, in functions and Sessions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel, ok
from methods import EVERY_METHOD

NOTEBOOK = """
%load_ext nbspawn
from __future__ import annotations
import argparse, dataclasses, inspect, sys, threading, typing
from typing import NamedTuple, Optional, TypedDict
import nbspawn
import numpy as np
import numpy as only_annotated
class Leaf:
    tree: Tree
class Tree:
    leaves: dict[str, Leaf]
    def join(self, other: Tree, how: "Optional[How]" = None) -> only_annotated.ndarray: ...
class How: pass
class Row(NamedTuple):
    how: "Also"
class Also: pass
Options = TypedDict("Options", {"also": "Also2"})
class Also2: pass
class Elements(list["Element"]): pass
class Element: pass
Rate = float
@dataclasses.dataclass
class Arguments:
    lr: Rate = 0.1
    nowhere: Nowhere = None
class Stuck:
    lock = threading.Lock()
def stuck(x: Stuck, data: big) -> Stuck: ...
big = np.zeros(10**7)
def hints():
    return typing.get_type_hints(Tree.join), typing.get_type_hints(Tree), inspect.signature(Row, eval_str=True)
"""

USES = """
class Node:
    def join(self, other: Node) -> Node: ...
@dataclasses.dataclass
class Config:
    before: Tree | None
    after: Later
class Later: pass
def of_nothing(x: Unknown) -> None: ...
def only_here(x: How) -> list[Element]: ...
hints()
assert typing.get_type_hints(Config)["after"] is Later
assert typing.get_type_hints(Node.join) == {"other": Node, "return": Node}
assert typing.get_type_hints(only_here)["return"] == list[eval("Element")]
assert typing.get_type_hints(Options)["also"].__name__ == "Also2"
assert Elements.__orig_bases__ and globals()["Element"]
assert [field.name for field in dataclasses.fields(Arguments)] == ["lr", "nowhere"] and "Rate" in globals()
try:
    typing.get_type_hints(Arguments)
except NameError as error:
    assert "Nowhere" in str(error)
else:
    assert False
assert stuck and (METHOD == "fork" or not {"Stuck", "big"} & globals().keys())
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        ok(kernel.execute(NOTEBOOK))
        yield kernel
        kernel.assert_no_rank()


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_annotations(notebook: Kernel, method: str) -> None:
    ok(notebook.execute(f"%%spawn 2 -m {method}\n{USES.replace('METHOD', repr(method))}"))


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_annotations_of_a_function_that_is_sent(notebook: Kernel, method: str) -> None:
    cell = f"nbspawn.spawn(lambda rank: [str(hint) for hint in hints()], nprocs=2, start_method='{method}')[1]"
    assert ok(notebook.execute(cell)).result == notebook.execute("[str(hint) for hint in hints()]").result


def test_annotations_in_kept_ranks_and_sessions(notebook: Kernel) -> None:
    """Also those of a cell of theirs, which knows what it has been sent, and what ranks define."""
    ok(notebook.execute("%%spawn 2 --keep\nfirst = hints()"))
    cell = "%%ranks --push Arguments\nclass Mine:\n    own: Mine | Missing\ntyping.get_type_hints(Tree)['leaves']"
    assert "__main__.Leaf" in ok(notebook.execute(cell)).result
    assert ok(notebook.execute("%%ranks\nglobals()['Rate'].__name__, Mine")).result.startswith("[0-1] ('float'")
    ok(notebook.execute("%ranks stop"))
    text = 'class A:\n    own: A | Missing\nv = """a\n    \nb"""\nv'
    cell = f"with nbspawn.Session(2) as session:\n    results = list(session.execute({text!r}))\nresults"
    assert ok(notebook.execute(cell)).result == repr(["a\n    \nb"] * 2)


def test_flags_of_ranks_stay_theirs(kernel: Kernel) -> None:
    """An import in a cell of kept ranks holds for their later cells, and not for the notebook's."""
    assert kernel.execute("%%spawn 2\ndef f(x: Nowhere): ...").ename == "RankRaisedError"
    ok(kernel.execute("%%spawn 2 --keep\nfrom __future__ import annotations\ndef f(x: Nowhere): ..."))
    ok(kernel.execute("%%ranks\ndef g(x: Nowhere): ..."))
    assert kernel.execute("def h(x: Nowhere): ...").ename == "NameError"
    ok(kernel.execute("%ranks stop"))


# ---------------------------------------------------------------- sys.argv

PARSED = """
import argparse, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.5)
command = [sys.executable, "-c", "import sys; print(*sys.argv[1:])", *sys.argv[1:]]
(sys.argv[0][-8:], parser.parse_args().lr, subprocess.run(command, check=True, stdout=-1, text=True).stdout.strip())
"""


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_arguments(notebook: Kernel, method: str) -> None:
    """Set as a whole, in place, behind the kernel's own; around a function, too."""

    def parsed() -> str:
        return ok(notebook.execute(f"%%spawn 2 -m {method}{PARSED}")).result

    program = notebook.value("__import__('sys').argv[0][-8:]")
    assert parsed() == f"[0-1] ({program!r}, 0.5, '')"
    ok(notebook.execute("own = sys.argv\nsys.argv = ['train.py', '--lr', '0.1']"))
    try:
        assert parsed() == "[0-1] ('train.py', 0.1, '--lr 0.1')"
        ok(notebook.execute("sys.argv[2:] = ['0.2']"))
        cell = f"nbspawn.spawn(lambda rank: __import__('sys').argv, nprocs=2, start_method='{method}')"
        assert ok(notebook.execute(cell)).result == "[0-1] ['train.py', '--lr', '0.2']"
        ok(notebook.execute("sys.argv = [*own, '--lr', '0.3']"))
        assert parsed() == f"[0-1] ({program!r}, 0.3, '--lr 0.3')"
    finally:
        ok(notebook.execute("sys.argv = own"))


def test_arguments_of_kept_ranks(notebook: Kernel) -> None:
    """What a rank has set stays, until the notebook sets others."""
    ok(notebook.execute("%%spawn 2 --keep\nimport sys"))
    assert ok(notebook.execute("%%ranks\nsys.argv[1:] = ['own']\nsys.argv[1:]")).result == "[0-1] ['own']"
    assert ok(notebook.execute("%%ranks\nsys.argv[1:]")).result == "[0-1] ['own']"
    ok(notebook.execute("own, sys.argv = sys.argv, ['a.py', 'new']"))
    try:
        assert ok(notebook.execute("%%ranks\nsys.argv")).result == "[0-1] ['a.py', 'new']"
    finally:
        ok(notebook.execute("sys.argv = own\n%ranks stop"))


@pytest.mark.extended
@pytest.mark.parametrize(("program", "separator"), [(["-m", "IPython"], ["--"]), ([], [])], ids=["IPython", "Python"])
def test_arguments_of_a_script(tmp_path: Path, program: list[str], separator: list[str]) -> None:
    """Its own, whether Python runs it or IPython."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport nbspawn\ndef show(rank):\n    return sys.argv[1:]\n"
        "if __name__ == '__main__':\n    print('ranks', list(nbspawn.spawn(show, nprocs=2)))\n"
    )
    command = [sys.executable, *program, str(script), *separator, "--lr", "0.1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "ranks [['--lr', '0.1'], ['--lr', '0.1']]" in printed
