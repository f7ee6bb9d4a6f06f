"""Runs a notebook with a user who answers its prompts: each code cell's answers stand in its metadata.

``python tests/support/answered.py notebooks/debugging.ipynb`` runs it, and saves what came out in it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from kernels import ExecutedKernel, Reply
from users import User

_RUNS = re.compile(r"^\[\d+\] +(starting|running|waiting)\b", re.MULTILINE)
"""In what the command ``ranks`` lists. A peer that is listed as waiting may have gone on: its sample is older."""


def run(path: Path, directory: str = "", **env: str) -> list[Reply]:
    """What the code cells left behind, in their order, in this directory or a temporary one; raises where a cell failed
    that was not to fail. ``env`` is new in the kernel's environment."""
    replies = []
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder, ExecutedKernel(Path(directory or folder), **env) as kernel:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                user = User(kernel, cell.source)
                for answer in cell.metadata.get("answers", ()):
                    while _RUNS.search(_say(user, answer)):
                        pass  # a peer has not ended, as each will in these notebooks
                reply = user.cell.wait()
                assert reply.status == "ok" or "raises-exception" in cell.metadata.get("tags", ()), reply
                replies.append(reply)
    return replies


def _say(user: User, answer: str) -> str:
    prompt = user.prompt()
    user.cell.reply.fold("stream", {"name": "stdout", "text": f"{prompt} {answer}\n"})
    return user.say(answer)


def save(path: Path, replies: list[Reply]) -> None:
    """Put the outputs into the notebook."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, (cell, reply) in enumerate(zip(code, replies, strict=True), 1):
        cell.execution_count = count
        cell.outputs = [_output(output, count) for output in reply.outputs]
    nbformat.write(notebook, path)


def _output(output: dict[str, Any], count: int) -> Any:
    kind = output["type"]
    if kind in ("stdout", "stderr"):
        return nbformat.v4.new_output("stream", name=kind, text=output["text"])
    if kind == "error":
        fields = {name: output[name] for name in ("ename", "evalue", "traceback")}
        return nbformat.v4.new_output("error", **fields)
    data = {"data": output["data"], "metadata": output["metadata"]}
    if kind == "execute_result":
        data["execution_count"] = count
    return nbformat.v4.new_output(kind, **data)


if __name__ == "__main__":
    notebook_path = Path(sys.argv[1])
    save(notebook_path, run(notebook_path))
