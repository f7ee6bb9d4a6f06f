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


PAUSED = "rank 0: shard", "rank 0: <module>", "rank 1: shard", "rank 1: <module>"


def opened(lab: Lab, name: str, *cells: str) -> tuple[Notebook, Sidebar]:
    notebook = lab.open(name, "%load_ext nbspawn", *cells)
    notebook.run(0)
    sidebar = Sidebar(lab.page)
    sidebar.switch_on()
    return notebook, sidebar


def paused(lab: Lab, name: str) -> tuple[Notebook, Sidebar]:
    """A notebook whose cell 1 is paused at line 7, on both ranks."""
    notebook, sidebar = opened(lab, name, CELL, "6 * 7")
    sidebar.click(1, 7)
    notebook.start(1)
    sidebar.shows(*PAUSED)
    return notebook, sidebar


def goes_on(notebook: Notebook, sidebar: Sidebar) -> None:
    """Press Continue: the cell ends, and so does what is queued behind it."""
    sidebar.press("Continue")
    notebook.run(2)
    expect(notebook.outputs(2)).to_have_text("42")
    sidebar.has_gone_on()
    notebook.shut_down()


def test_every_rank_stops_shows_its_variables_steps_and_goes_on(lab: Lab) -> None:
    notebook, sidebar = paused(lab, "gutter.ipynb")
    expect(notebook.outputs(1).nth(0)).to_contain_text("paused")
    for rank, lr in (0, "0.1"), (1, "0.05"):
        sidebar.frame(f"rank {rank}: shard").click()
        sidebar.variable("lr", lr)
        sidebar.variable("x", "Tensor 2×3 float32 cpu: tensor([[")
    sidebar.press("Next")
    sidebar.shows("rank 1: <module>", "rank 0: <module>")
    expect(sidebar.frames.nth(0)).to_contain_text("rank 1")
    sidebar.press("Continue")
    notebook.wait()
    sidebar.has_gone_on()
    expect(notebook.outputs(1).last).to_contain_text("[0-1] 0.6")
    notebook.shut_down()


@pytest.mark.extended
def test_a_page_that_is_loaded_again_while_ranks_are_paused_shows_them(lab: Lab) -> None:
    notebook, sidebar = paused(lab, "reload.ipynb")
    lab.page.reload()
    lab.page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.context?.isReady")
    sidebar.open()
    sidebar.shows(*PAUSED)
    goes_on(notebook, sidebar)


@pytest.mark.extended
def test_a_front_end_that_went_away_finds_them_paused(lab: Lab) -> None:
    _, sidebar = paused(lab, "away.ipynb")
    lab.page.goto("about:blank")
    notebook = lab.reopen("away.ipynb")
    sidebar.open()
    sidebar.shows(*PAUSED)
    goes_on(notebook, sidebar)


@pytest.mark.extended
def test_two_windows_show_the_same(lab: Lab) -> None:
    notebook, sidebar = paused(lab, "two.ipynb")
    assert lab.page.context.browser is not None
    other = lab.page.context.browser.new_page()
    other.goto(f"{lab.url}lab/workspaces/two/tree/two.ipynb")
    other.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.context?.isReady")
    second = Sidebar(other)
    second.open()
    second.shows(*PAUSED)
    second.press("Next")
    for window in second, sidebar:
        window.shows("rank 0: <module>", "rank 1: <module>")
    goes_on(notebook, sidebar)
    expect(second.frames).to_have_count(0)
    other.close()


@pytest.mark.extended
def test_terminate_lets_them_go_on_and_keeps_the_breakpoints(lab: Lab) -> None:
    notebook, sidebar = paused(lab, "terminate.ipynb")
    sidebar.press("Terminate")
    notebook.wait()
    expect(notebook.outputs(1).last).to_contain_text("[0-1] 0.6")
    notebook.start(1)
    sidebar.shows(*PAUSED)
    goes_on(notebook, sidebar)


@pytest.mark.extended
def test_a_kernel_that_is_restarted_while_they_are_paused(lab: Lab) -> None:
    notebook, sidebar = paused(lab, "restart.ipynb")
    notebook.press("restart")
    lab.page.locator(".jp-Dialog .jp-mod-accept").click()
    sidebar.has_gone_on()
    notebook.run(0)
    notebook.start(1)
    sidebar.shows(*PAUSED)
    goes_on(notebook, sidebar)


@pytest.mark.extended
def test_the_button_debug_opens_it(lab: Lab) -> None:
    loop = "%%spawn 2\nimport time\nn = 0\nwhile n < 100_000:\n    time.sleep(0.01)\n    n += 1"
    notebook, sidebar = opened(lab, "button.ipynb", loop)
    notebook.start(1)
    table = notebook.outputs(1).nth(0)
    expect(table).to_contain_text("time.sleep")
    notebook.outputs(1).get_by_role("button", name="Debug all").click()
    sidebar.shows("rank 0: <module>", "rank 1: <module>")
    expect(table).to_contain_text("paused")
    sidebar.press("Continue")
    sidebar.has_gone_on()
    notebook.press("interrupt")
    notebook.wait()
    notebook.shut_down()


@pytest.mark.extended
def test_exceptions_that_are_raised(lab: Lab) -> None:
    notebook, sidebar = opened(lab, "raised.ipynb", "%%spawn 2\ndef inverse(x):\n    return 1 // x\ninverse(rank)")
    sidebar.press("Pause on exception")
    lab.page.locator(".lm-Menu-itemLabel").filter(has_text="raised").click()
    notebook.start(1)
    sidebar.shows("rank 0: inverse", "rank 0: <module>")
    sidebar.press("Continue")
    sidebar.shows("rank 0: <module>")
    sidebar.press("Continue")
    sidebar.shows("<module>")  # the notebook's: the rank's error is its cell's
    sidebar.press("Continue")
    notebook.wait()
    expect(notebook.outputs(1).last).to_contain_text("ZeroDivisionError")
    sidebar.has_gone_on()
    notebook.shut_down()


@pytest.mark.extended
def test_stop_while_ranks_are_paused_ends_them(lab: Lab) -> None:
    notebook, sidebar = paused(lab, "stop.ipynb")
    sidebar.frame("rank 1: shard").click()
    notebook.press("interrupt")
    notebook.wait()
    expect(notebook.outputs(1).last).to_contain_text("KeyboardInterrupt")
    sidebar.has_gone_on()
    notebook.shut_down()
