"""docs/first_changes.md: its diffs apply to the code as it is, and its cells do what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first_changes.md").read_text()

CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbspawn")
for cell in json.loads(sys.stdin.read()):
    result = shell.run_cell(cell)
    result.raise_error()
    if result.result is not None:
        print("VALUES", *result.result)
shell.run_line_magic("ranks", "stop")
shell.run_line_magic("ranks", "release")
"""


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nbspawn as it is after the page's changes."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "nbspawn", folder / "nbspawn", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in blocks("diff"):
        whole = re.sub("^$", " ", diff.rstrip("\n"), flags=re.MULTILINE) + "\n"  # an editor takes such blanks away
        subprocess.run(["git", "apply", "-"], input=whole, cwd=folder, check=True, text=True)
    return folder


def test_the_diffs_are_three_changes(changed: Path) -> None:
    assert len(blocks("diff")) == 5
    assert "def _pids" in (changed / "nbspawn" / "_notebook" / "ranks.py").read_text()


@pytest.mark.extended
def test_the_cells_work(changed: Path) -> None:
    command, cells = [sys.executable, "-c", CELLS], json.dumps(blocks(""))
    env = {**os.environ, "PYTHONPATH": str(changed)}
    run = subprocess.run(command, input=cells, env=env, cwd=changed, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    values = re.findall(r"^VALUES (.*)$", run.stdout, re.MULTILINE)
    lower = os.nice(0) + 5
    assert values == ["0 1", f"{lower} {lower}", "0 0 1 1"], run.stdout
    assert re.search(r"^\d+ \d+$", run.stdout, re.MULTILINE), run.stdout
