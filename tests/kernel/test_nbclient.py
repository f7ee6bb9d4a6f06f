"""Notebooks run with nobody looking: nbclient executes them, and what it saves reads well with no kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from kernels import plain
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def execute(folder: Path, *cells: str, allow_errors: bool = False) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=150, allow_errors=allow_errors, resources=resources
    )
    try:
        client.execute()  # "python3" is this interpreter
    finally:
        nbformat.write(notebook, folder / "executed.ipynb")
    return nbformat.read(folder / "executed.ipynb", as_version=4)


LOAD = "%load_ext nbspawn"
CELLS = {
    "results": "%%spawn 2 -m forkserver -o results\nprint('said by', rank)\nrank * 7",
    "list": "list(results)",
    "figures": "%%spawn 2 -m forkserver\nimport matplotlib.pyplot as plt\nplt.plot([1, rank])\nplt.show()\nrank",
    "updates": """%%spawn 2
from IPython.display import HTML, display
handle = display(HTML('first'), display_id=True)
for i in range(20): handle.update(HTML(f'{rank} at {i}'))""",
    "input": "%%spawn 2 -m forkserver\nname = input('who? ')",
    "error": "%%spawn 2\n1 / rank",
    "after an error": "%%spawn 2\nrank",
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The cells, each with what is saved of it."""
    notebook = execute(tmp_path_factory.mktemp("notebook"), LOAD, *CELLS.values(), allow_errors=True)
    nbformat.validate(notebook)
    return dict(zip(CELLS, notebook.cells[1:], strict=True))


def test_a_notebook_reads_well(executed: dict[str, Any]) -> None:
    table, *lines = executed["results"].outputs
    assert table.output_type == "display_data"
    assert table.data["text/plain"].count("✓ done") == 2 and "<table" in table.data["text/html"]
    assert "script" not in table.data["text/html"]
    assert "said by 1" in "".join(line.text for line in lines)  # nbclient does not merge a stream's pieces
    assert executed["list"].outputs[0].data["text/plain"] == "[0, 7]"
    figures = [output for output in executed["figures"].outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 2
    assert executed["figures"].outputs[-1].data["text/plain"] == "[0] 0\n[1] 1"


def test_updated_displays_are_saved_once(executed: dict[str, Any]) -> None:
    displays = [output for output in executed["updates"].outputs if output.output_type == "display_data"]
    rich = [output.data["text/html"] for output in displays]
    assert sorted(rich[1:]) == ["0 at 19", "1 at 19"]


def test_input_is_refused_clearly(executed: dict[str, Any]) -> None:
    error = executed["input"].outputs[-1]
    assert error.ename == "RankRaisedError" and "nobody can answer" in plain("\n".join(error.traceback))


def test_errors_may_be_allowed(executed: dict[str, Any]) -> None:
    assert executed["error"].outputs[-1].ename == "RankRaisedError"
    assert executed["after an error"].outputs[-1].data["text/plain"] == "[0] 0\n[1] 1"


@pytest.mark.extended
def test_a_failing_cell_ends_the_notebook(tmp_path: Path) -> None:
    cell = "%%spawn 2 -m forkserver\ndef width(batch):\n    return batch['width']\nwidth({}) if rank else None"
    with pytest.raises(CellExecutionError) as raised:
        execute(tmp_path, LOAD, cell, "print('never')")
    message = plain(str(raised.value))
    assert "RankRaisedError: rank 1 of 2: KeyError: 'width' (line 3)" in message
    assert "----> 3     return batch['width']" in message
    saved = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    nbformat.validate(saved)
    assert "✗ failed" in saved.cells[1].outputs[0].data["text/plain"]
    assert saved.cells[1].outputs[-1].output_type == "error"
    assert saved.cells[1].outputs[-1].evalue == "rank 1 of 2: KeyError: 'width' (line 3)"
    assert saved.cells[2].outputs == []
