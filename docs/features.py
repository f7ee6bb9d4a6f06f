"""README's small pictures, each of one feature, from a real JupyterLab: ``python docs/features.py [NAME ...]``.

They are 1121 pixels wide, to be shown at 560. What is needed: docs/stage.py.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack

from playwright.sync_api import Locator, expect
from stage import FAILING, FAILS, LOAD, PICTURES, STRAGGLER, WORK, Cluster, Lab, Notebook, close_sidebar, stage

STALLING = """%%spawn 4 -b gloo -g 1
import time, torch, torch.distributed as dist
from tqdm import tqdm

for step in tqdm(range(100)):
    if rank == 1 and step == 31:
        time.sleep(600)
    time.sleep(0.02)
    dist.all_reduce(torch.ones(1))"""
STOPPING = """%%spawn 4 -b gloo
import torch, torch.distributed as dist

loss = torch.tensor(2.5 - rank)
breakpoint()
dist.all_reduce(loss.log())"""
KEEPING = """%%spawn 4 --keep -b gloo
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)"""
TRAINING = """%%ranks
loss = model(torch.randn(64, 8)).square().mean()
loss.backward(); optimizer.step()
round(loss.item(), 3)"""
ON_HOSTS = """%%spawn 4 --on ray --nnodes 2 -b gloo
import time, torch, torch.distributed as dist
from tqdm import tqdm

for step in tqdm(range(400)):
    time.sleep(0.02)
    dist.all_reduce(torch.ones(1))"""

_WINDOW = 864, 1200  # points: a cell is then as narrow as its table can be read
_SCALE = 1.62  # pixels a point
_MARGIN = 4.0  # points
_NO_FRAME = ".jp-Cell { border-color: transparent !important; outline: none !important; box-shadow: none !important }"


class Pictures:
    """One method for each picture, and of its name."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def error(self) -> None:
        notebook = self._open(LOAD, FAILS, FAILING)
        for cell in range(3):
            notebook.run(cell)
        self._take("error", *notebook.outputs(2).all())

    def live(self) -> None:
        notebook = self._open(LOAD, STALLING)
        notebook.run(0)
        notebook.start(1)
        expect(notebook.outputs(1).first).to_contain_text(re.compile(r"have waited \d+ s"))
        self._take("live", self._source(1), *notebook.outputs(1).all())
        notebook.press("interrupt")
        notebook.wait()

    def timeline(self) -> None:
        notebook = self._open(LOAD, WORK, STRAGGLER)
        for cell in range(3):
            notebook.run(cell)
        self._take("timeline", notebook.outputs(2).locator("details"))

    def debugger(self) -> None:
        notebook = self._open(LOAD, STOPPING)
        notebook.run(0)
        notebook.start(1)
        expect(notebook.outputs(1).filter(has_text="have stopped too")).to_be_visible()
        notebook.answer("all p loss")
        expect(notebook.printed(1).filter(has_text="[3]   tensor(-0.5")).to_be_visible()
        prompt = self._lab.page.locator(".jp-Stdin-input")
        prompt.fill("all n")
        self._take("debugger", *notebook.outputs(1).all(), prompt)
        prompt.fill("q")
        prompt.press("Enter")
        notebook.wait()

    def kept(self) -> None:
        notebook = self._open(LOAD, KEEPING, TRAINING, "%ranks", "%ranks stop")
        for cell in (0, 1, 2, 2, 3):  # a first step takes long enough for a table
            notebook.run(cell)
        self._take("kept", self._source(2), *notebook.outputs(3).all())
        notebook.run(4)

    def hosts(self) -> None:
        """The hosts are namespaces of this machine."""
        notebook = self._open(LOAD, ON_HOSTS, "%ranks release")
        notebook.run(0)
        notebook.run(1)  # the first run starts the agents
        notebook.start(1)
        expect(notebook.outputs(1).first).to_contain_text(re.compile(r"[3-9]\d%"))
        self._take("hosts", self._source(1), *notebook.outputs(1).all())
        notebook.wait()
        notebook.run(2)

    def _open(self, *cells: str) -> Notebook:
        notebook = self._lab.open("notebook.ipynb", *cells)
        close_sidebar(self._lab)
        self._lab.page.add_style_tag(content=_NO_FRAME)
        return notebook

    def _source(self, cell: int) -> Locator:
        return self._lab.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-InputArea-editor")

    def _take(self, name: str, *shown: Locator) -> None:
        """From the top of the first of these to the bottom of the last, as wide as a cell."""
        cell = self._source(0).bounding_box()
        boxes = [box for one in shown if (box := one.bounding_box())]
        assert cell and boxes
        left, width = cell["x"] - _MARGIN, cell["width"] + 2 * _MARGIN
        top, bottom = boxes[0]["y"] - _MARGIN, max(box["y"] + box["height"] for box in boxes) + _MARGIN
        clip = {"x": left, "y": top, "width": width, "height": bottom - top}
        self._lab.page.screenshot(path=PICTURES / f"{name}.png", clip=clip)


def main() -> None:
    names = sys.argv[1:] or ["error", "live", "timeline", "debugger", "kept", "hosts"]
    PICTURES.mkdir(exist_ok=True)
    with ExitStack() as stack:
        if "hosts" in names:
            os.environ["RAY_ADDRESS"] = stack.enter_context(Cluster(2)).address
        pictures = Pictures(stack.enter_context(stage(*_WINDOW, _SCALE)))
        for name in names:
            getattr(pictures, name)()


if __name__ == "__main__":
    main()
