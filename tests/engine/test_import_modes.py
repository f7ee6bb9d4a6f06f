"""Functions and classes of test modules run in ranks, however pytest imports them: three layouts by three modes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BODY = """
import dataclasses, enum, functools
import torch.distributed as dist
import nbspawn
LIMIT = 3
class Color(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Point:
    x: int
    color: Color = Color.RED
    def more(self):
        return double(self.x) + LIMIT
@functools.lru_cache
def cached(x):
    return double(x)
def work(rank, point):
    found = [None, None]
    dist.all_gather_object(found, Point(rank))
    assert found[1] == Point(1) and type(found[1]) is Point
    return cached(rank), Point(rank), point.more(), isinstance(point, Point)
def test_spawn():
    results = nbspawn.spawn(work, (Point(5),), nprocs=2, backend="gloo")
    assert results[1] == (2, Point(1), 13, True) and type(results[1][1]) is Point
def test_session():
    with nbspawn.Session(2) as session:
        assert session.run(lambda rank: Point(rank).more()) == [3, 5]
        session.push(point=Point(7))
        assert session.execute("point.more()") == [17, 17]
"""
DOUBLE = "def double(x): return times * x\ntimes = 2\n"
LAYOUTS = {
    "flat": {"tests/test_ranks.py": DOUBLE + BODY},
    "package": {
        "tests/__init__.py": "",
        "tests/deep/__init__.py": "",
        "tests/helping.py": DOUBLE,
        "tests/deep/test_ranks.py": f"from ..helping import double\n{BODY}",
    },
    "src": {
        "src/pkg/__init__.py": DOUBLE,
        "tests/test_ranks.py": f"from pkg import double\n{BODY}",
        "tests/conftest.py": "import os, sys\nsys.path.insert(0, os.path.abspath('src'))\n",
    },
}


def cases() -> list[object]:
    """In the gate, the one in which nothing is found by its name."""
    modes = ("importlib", "prepend", "append")
    return [
        pytest.param(layout, mode, marks=() if (layout, mode) == ("package", "importlib") else pytest.mark.extended)
        for layout in LAYOUTS
        for mode in modes
    ]


@pytest.mark.parametrize(("layout", "mode"), cases())
def test_modules_of_tests(tmp_path: Path, layout: str, mode: str) -> None:
    """By the command `pytest`, for which the current directory is not in sys.path."""
    for name, text in LAYOUTS[layout].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = [f"--import-mode={mode}", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "tests"]
    command = [Path(sys.executable).with_name("pytest"), "-q", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout
