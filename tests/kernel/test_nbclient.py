"""Notebooks run with nobody looking: nbclient executes them, and what it saves reads well with no kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from kernels import once, plain
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def execute(folder: Path, *cells: str, allow_errors: bool = False) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="python3", timeout=60, allow_errors=allow_errors, resources=resources)
    try:
        client.execute()  # "python3" is this interpreter
    finally:
        nbformat.write(notebook, folder / "executed.ipynb")
    return nbformat.read(folder / "executed.ipynb", as_version=4)


LOAD = "%load_ext nbspawn"


@once
def test_a_notebook_reads_well(tmp_path: Path, method: str) -> None:
    notebook = execute(
        tmp_path,
        LOAD,
        f"%%spawn 2 -m {method} -o results\nprint('said by', rank)\nrank * 7",
        "list(results)",
        f"%%spawn 2 -m {method}\nimport matplotlib.pyplot as plt\nplt.plot([1, rank])\nplt.show()\nrank",
    )
    nbformat.validate(notebook)
    table, *lines = notebook.cells[1].outputs
    assert table.output_type == "display_data"
    assert table.data["text/plain"].count("✓ done") == 2 and "<table" in table.data["text/html"]
    assert "script" not in table.data["text/html"]
    assert "said by 1" in "".join(line.text for line in lines)  # nbclient does not merge a stream's pieces
    assert notebook.cells[2].outputs[0].data["text/plain"] == "[0, 7]"
    figures = [output for output in notebook.cells[3].outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 2
    assert notebook.cells[3].outputs[-1].data["text/plain"] == "[0] 0\n[1] 1"


@once
def test_a_failing_cell_ends_the_notebook(tmp_path: Path, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\ndef width(batch):\n    return batch['width']\nwidth({{}}) if rank else None"
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


def test_errors_may_be_allowed(tmp_path: Path) -> None:
    notebook = execute(tmp_path, LOAD, "%%spawn 2\n1 / rank", "%%spawn 2\nrank", allow_errors=True)
    assert notebook.cells[1].outputs[-1].ename == "RankRaisedError"
    assert notebook.cells[2].outputs[-1].data["text/plain"] == "[0] 0\n[1] 1"


@once
def test_input_is_refused_clearly(tmp_path: Path, method: str) -> None:
    with pytest.raises(CellExecutionError) as raised:
        execute(tmp_path, LOAD, f"%%spawn 2 -m {method}\nname = input('who? ')")
    assert "nobody can answer" in plain(str(raised.value))


def test_updated_displays_are_saved_once(tmp_path: Path) -> None:
    cell = """%%spawn 2
from IPython.display import HTML, clear_output, display
handle = display(HTML('first'), display_id=True)
for i in range(20): handle.update(HTML(f'{rank} at {i}'))"""
    notebook = execute(tmp_path, LOAD, cell)
    rich = [output.data["text/html"] for output in notebook.cells[1].outputs if output.output_type == "display_data"]
    assert sorted(rich[1:]) == ["0 at 19", "1 at 19"]
