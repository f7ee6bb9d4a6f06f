"""The JupyterLab in which the documents' pictures are taken: light or dark, without what comes and goes by itself.

The scripts need Debian's package chromium, and the environment of binder/requirements.txt; ranks on several hosts also
root, and Debian's iproute2.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
sys.path.insert(0, str(DOCS.parent / "tests" / "support"))

from cluster import Cluster  # noqa: E402
from debugger_sidebar import Sidebar  # noqa: E402
from kernels import PATIENCE  # noqa: E402
from lab import Lab, Notebook, open_lab  # noqa: E402

__all__ = [
    "DOCS",
    "FAILING",
    "FAILS",
    "LOAD",
    "PATIENCE",
    "PICTURES",
    "STRAGGLER",
    "WORK",
    "Cluster",
    "Lab",
    "Notebook",
    "Sidebar",
    "close_sidebar",
    "stage",
]

LOAD = "%load_ext nbspawn\nimport nbspawn"
WORK = """import time, torch, torch.distributed as dist

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)"""
FAILS = """def area(shape):
    return shape["width"] * shape["hieght"]"""

FAILING = """%%spawn 4 -b gloo -g 1
import torch, torch.distributed as dist

total = torch.zeros(1)
if rank == 2:
    total += area({"width": 3, "height": 4})
dist.all_reduce(total)"""
STRAGGLER = """%%spawn 4 -b gloo --profile
time.sleep(0.4 + rank / 4)
for step in range(12):
    work(0.3 if rank == 2 else 0.1)
    dist.all_reduce(torch.ones(1))
    if step % 4 == 3:
        print("step", step + 1)"""

# JupyterLab's question whether it may show news, and the buttons in a cell's corner.
_STYLE = """addEventListener("DOMContentLoaded", () => document.head.insertAdjacentHTML("beforeend",
    "<style>.Toastify, .jp-cell-toolbar { display: none !important }</style>"))"""


@contextmanager
def stage(width: int, height: int, scale: float = 1.0, theme: str = "JupyterLab Light") -> Iterator[Lab]:
    """A server in a folder of its own, and a window of this size in points, each of ``scale`` pixels."""
    with tempfile.TemporaryDirectory() as name:
        settings = Path(name, "lab_settings", "@jupyterlab", "apputils-extension")
        settings.mkdir(parents=True)
        (settings / "themes.jupyterlab-settings").write_text(f'{{"theme": "{theme}"}}')
        with open_lab(Path(name), scale=scale) as lab:
            lab.page.set_viewport_size({"width": width, "height": height})
            lab.page.add_init_script(_STYLE)
            yield lab


def close_sidebar(lab: Lab) -> None:
    """So that the notebook is as wide as the window."""
    lab.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
