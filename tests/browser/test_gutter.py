"""A user who clicks in the gutter of JupyterLab: every rank stops, and JupyterLab's own debugger shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from debugger_sidebar import Sidebar
from lab import CHROMIUM, Lab, Notebook, open_lab
from playwright.sync_api import expect

pytestmark = pytest.mark.skipif(not os.path.exists(CHROMIUM), reason="needs Debian's package chromium")

CELL = """%%spawn 2
import torch

def shard(step):
    lr = 0.1 / (rank + 1)
    x = torch.full((2, 3), float(rank + step))
    return x * lr

total = shard(1).sum()
total.item()"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as lab:
        lab.page.set_viewport_size({"width": 1500, "height": 950})
        yield lab


def opened(lab: Lab, name: str, *cells: str) -> tuple[Notebook, Sidebar]:
    notebook = lab.open(name, "%load_ext nbspawn", *cells)
    notebook.run(0)
    sidebar = Sidebar(lab.page)
    sidebar.switch_on()
    return notebook, sidebar


def test_every_rank_stops_shows_its_variables_steps_and_goes_on(lab: Lab) -> None:
    notebook, sidebar = opened(lab, "gutter.ipynb", CELL)
    sidebar.click(1, 7)
    notebook.start(1)
    sidebar.shows("rank 0: shard", "rank 0: <module>", "rank 1: shard", "rank 1: <module>")
    sidebar.variable("lr", "0.1")
    expect(notebook.outputs(1).nth(0)).to_contain_text("paused")
    sidebar.frames.nth(2).click()
    sidebar.variable("lr", "0.05")
    sidebar.press("Next")
    sidebar.shows("rank 1: <module>", "rank 0: <module>")
    sidebar.press("Continue")
    notebook.wait()
    expect(sidebar.frames).to_have_count(0)
    expect(notebook.outputs(1).last).to_contain_text("[0-1] 0.6")
    notebook.shut_down()


@pytest.mark.extended
def test_a_page_that_is_loaded_again_while_ranks_are_paused_shows_them(lab: Lab) -> None:
    notebook, sidebar = opened(lab, "reload.ipynb", CELL, "6 * 7")
    sidebar.click(1, 7)
    notebook.start(1)
    paused = "rank 0: shard", "rank 0: <module>", "rank 1: shard", "rank 1: <module>"
    sidebar.shows(*paused)
    lab.page.reload()
    lab.page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.context?.isReady")
    sidebar.open()
    sidebar.shows(*paused)
    sidebar.press("Continue")
    notebook.run(2)
    expect(notebook.outputs(2)).to_have_text("42")
    expect(sidebar.frames).to_have_count(0)
    notebook.shut_down()


@pytest.mark.extended
def test_stop_while_ranks_are_paused_ends_them(lab: Lab) -> None:
    notebook, sidebar = opened(lab, "stop.ipynb", CELL)
    sidebar.click(1, 7)
    notebook.start(1)
    sidebar.shows("rank 0: shard", "rank 0: <module>", "rank 1: shard", "rank 1: <module>")
    notebook.press("interrupt")
    notebook.wait()
    expect(notebook.outputs(1).last).to_contain_text("KeyboardInterrupt")
    expect(sidebar.frames).to_have_count(0)
    notebook.shut_down()
