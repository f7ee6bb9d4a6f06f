"""Imports go down the rooms only, as docs/architecture.md lists them, and importing nbspawn costs next to nothing."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nbspawn"
TOUR = PACKAGE.parent / "docs" / "architecture.md"
APART = ({"_payload", "_state"}, {"_rank", "_render"})
"""These do not know each other."""
TO_RANKS = {"_rank.main.main", "_rank.jobs", "_rank.shell.displays"}
"""What the kernel has to do with the ranks' own code: it names what torch is to start, and what ranks are to run; and
before a fork it makes what ranks inherit."""
ENTRANCES = {"__init__.py", "__main__.py"}  # these may import anything, lazily
WITH_IPYTHON = ("_rank/shell.py", "_server/preload_shell.py", "_rank/edit/autoreload.py", "_notebook/", "__main__.py")

FILES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path, types: bool = False) -> set[str]:
    """Every module that the file imports, at its top or within a function; if ``types``, also for type checkers."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not types:
            node.body = []
    found = set()
    package = ["nbspawn", *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def room(parts: Sequence[str]) -> str:
    """'_rank/report/' for nbspawn._rank.report.sampler, the innermost folder; 'errors.py' for nbspawn.errors."""
    found = PACKAGE
    for part in parts[1:]:
        if not (found / part).is_dir():
            break
        found /= part
    if found == PACKAGE:
        return f"{parts[1].removesuffix('.py')}.py" if len(parts) > 1 else "__init__.py"
    return f"{found.relative_to(PACKAGE).as_posix()}/"


def rooms() -> dict[str, list[str]]:
    """The rooms that the tour names, from the top down, and the processes that each runs in."""
    table = TOUR.read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    return {name: where.split(", ") for named, where in rows for name in re.findall("`([^`]+)`", named)}


def names(files: list[Path]) -> list[str]:
    return [str(file.relative_to(PACKAGE)) for file in files]


def room_of(file: Path) -> str:
    return room(["nbspawn", *file.relative_to(PACKAGE).parts])


def below(file: Path) -> dict[str, str]:
    """The rooms that the file imports from, by what it imports."""
    used = {name for name in imported(file, types=True) if name.split(".")[0] == "nbspawn"}
    return {name: room(name.split(".")) for name in used}


def test_the_tour_names_every_room() -> None:
    assert {room_of(file) for file in FILES} - ENTRANCES == set(rooms())


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_imports_go_down(file: Path) -> None:
    """Not by a detour, nor for type checkers alone."""
    order, mine = list(rooms()), room_of(file)
    if mine in ENTRANCES:
        return
    for name, other in below(file).items():
        assert other != "__init__.py", f"{name}: the package's public names are for others"
        assert order.index(mine) <= order.index(other), f"{name} lies above"
        for packages in APART:
            tops = {mine.split("/")[0], other.split("/")[0]}
            assert len(tops) == 1 or not tops <= packages, f"{mine} and {other} do not know each other"


def test_no_two_modules_import_each_other() -> None:
    """Within a room, either; nor by a detour, nor for type checkers alone."""
    files = {".".join(["nbspawn", *file.relative_to(PACKAGE).with_suffix("").parts]): file for file in FILES}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items() if room_of(file) not in ENTRANCES}
    graph = {}
    for name, file in modules.items():
        used = imported(file, types=True)
        graph[name] = {one if one in modules else one.rpartition(".")[0] for one in used} & modules.keys() - {name}
    assert len(tuple(graphlib.TopologicalSorter(graph).static_order())) == len(modules)


def test_the_kernel_runs_nothing_of_ranks() -> None:
    tour = rooms()
    of_ranks = {name for name, where in tour.items() if {"rank", "fork server"} & set(where) and "kernel" not in where}
    of_kernel = [file for file in FILES if set(tour.get(room_of(file), {"all"})) <= {"kernel", "agent"}]
    used = {name for file in of_kernel for name, other in below(file).items() if other in of_ranks}
    assert {name.removeprefix("nbspawn.") for name in used} == TO_RANKS


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_only_the_notebooks_face_imports_ipython(file: Path) -> None:
    if str(file.relative_to(PACKAGE)).startswith(WITH_IPYTHON):
        return
    tops = {name.split(".")[0] for name in imported(file)}
    assert not tops & {"IPython", "ipywidgets", "ipykernel", "traitlets", "comm"}


def run(text: str) -> str:
    child = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=150)
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_import_loads_neither_torch_nor_ipython() -> None:
    heavy = "{'torch', 'IPython', 'ipywidgets', 'numpy', 'cloudpickle', 'multiprocessing', 'importlib.metadata'}"
    assert run(f"import sys, nbspawn; dir(nbspawn); print({heavy} & set(sys.modules))") == "set()\n"


def test_import_takes_little() -> None:
    """The best of several, in processor time: other work on the machine must not fail this."""
    text = "import time; t = time.process_time(); import nbspawn; print(time.process_time() - t)"
    assert min(float(run(text)) for _ in range(3)) < 0.03


@pytest.mark.extended
def test_extension_loads_without_torch_and_soon() -> None:
    text = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.process_time()
shell.run_line_magic("load_ext", "nbspawn")
took = time.process_time() - began
print(took, *sorted({"torch", "ipywidgets"} & set(sys.modules)))
shell.run_line_magic("unload_ext", "nbspawn")
"""
    took, *loaded = run(text).split()
    assert not loaded
    assert float(took) < 0.3
