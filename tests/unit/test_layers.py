"""Imports go down the layers only, and importing nbspawn costs next to nothing (docs/architecture.md tells the
layers)."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nbspawn"
LAYERS: tuple[set[str], ...] = (
    {"_protocol", "_accelerators", "_version"},
    {"_process"},
    {"_payload", "_state"},
    {"_carried"},
    {"_rank", "_render"},
    {"errors", "_results"},
    {"_server"},
    {"_engine"},
    {"_agent"},
    {"_session"},
    {"_api", "_session_api"},
    {"_check"},
    {"_notebook"},
)
APART = ({"_payload", "_state"}, {"_rank", "_render"})
"""Of one layer, and yet they do not know each other."""
OF_KERNEL = {"_notebook", "_session", "_engine", "_agent", "_api", "_session_api", "_check"}
"""What runs in the kernel, or in an agent in its place."""
TO_RANKS = {"_rank.main.main", "_rank.jobs", "_rank.shell.displays"}
"""What that has to do with the ranks' own code: it names what torch is to start, and what ranks are to run; and before
a fork it makes what ranks inherit."""
ENTRANCES = {"__init__", "__main__"}  # these may import anything, lazily
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


def unit(parts: list[str]) -> str:
    """'engine' for nbspawn._engine.run.local, '__init__' for a name of the package itself."""
    return parts[1] if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or is_module(parts[1])) else "__init__"


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists()


def layer(name: str) -> int:
    return next(number for number, units in enumerate(LAYERS) if name in units)


def unit_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def names(files: list[Path]) -> list[str]:
    return [str(file.relative_to(PACKAGE)) for file in files]


def room(parts: Sequence[str]) -> str:
    """'_rank/report' for nbspawn._rank.report.sampler: the innermost folder; '' for the package's own."""
    found = PACKAGE
    for part in parts[1:]:
        if not (found / part).is_dir():
            break
        found /= part
    return "/".join(found.relative_to(PACKAGE).parts)


def test_no_two_rooms_import_each_other() -> None:
    """Not by a detour, and not for type checkers alone."""
    below: dict[str, set[str]] = {}
    for file in FILES:
        mine = room(["nbspawn", *file.relative_to(PACKAGE).parts])
        others = {room(name.split(".")) for name in imported(file, types=True) if name.startswith("nbspawn.")}
        below.setdefault(mine, set()).update(others - {mine})
    del below[""]  # the thin modules between the layers
    sorter = graphlib.TopologicalSorter({mine: others - {""} for mine, others in below.items()})
    assert {"_rank/report", "_engine/start"} < set(sorter.static_order())


def test_every_file_has_a_layer() -> None:
    assert {unit_of(file) for file in FILES} - ENTRANCES == set().union(*LAYERS)


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_imports_go_down(file: Path) -> None:
    mine = unit_of(file)
    if mine in ENTRANCES:
        return
    for name in imported(file):
        if name.split(".")[0] != "nbspawn":
            continue
        other = unit(name.split("."))
        assert other != "__init__", f"{name}: the package's public names are for others"
        assert layer(other) <= layer(mine), f"{name} lies above"
        for packages in APART:
            assert mine == other or not {mine, other} <= packages, f"{name}: {mine} and {other} do not know each other"


def test_the_kernel_runs_nothing_of_ranks() -> None:
    used = {name for file in FILES if unit_of(file) in OF_KERNEL for name in imported(file, types=True)}
    found = {name.removeprefix("nbspawn.") for name in used if name.startswith(("nbspawn._rank", "nbspawn._server"))}
    assert found == TO_RANKS


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
