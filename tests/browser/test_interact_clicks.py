"""``nbspawn.interact`` and panels as a user sees them: in JupyterLab, Notebook 7, Voila and the classic Notebook 6."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest
from lab import CHROMIUM, App, Lab, Notebook, open_lab
from playwright.sync_api import Locator, expect

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not os.path.exists(CHROMIUM), reason="needs Debian's package chromium"),
]

LOAD = "%load_ext nbspawn\nimport nbspawn, time"
TRAIN = """def train(rank, speed=1, fail=False):
    print("speed", speed)
    if fail and rank == 1:
        raise KeyError("hieght")
    while speed == 9:
        time.sleep(0.01)
    return speed * 10 + rank"""
WIDGET = """import ipywidgets
widget = nbspawn.interact(train, nprocs=2, speed=(0, 9))
taken = ipywidgets.Label()
ipywidgets.dlink((widget.arguments["speed"], "value"), (taken, "value"), "taken {}".format)
display(widget, taken)"""


def installed() -> list[App]:
    """The front ends that this environment has. Notebook is another program since release 7."""
    found: list[App] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        found += ["classic"] if importlib.metadata.version("notebook").startswith("6.") else ["lab", "notebook"]
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("voila")
        found.append("voila")
    return found


@pytest.fixture(scope="module", params=installed())
def app(request: pytest.FixtureRequest) -> App:
    found: App = request.param
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), app) as lab:
        yield lab


def button(notebook: Notebook, name: str) -> Locator:
    return notebook.find("button.jupyter-button", name).first


def move(notebook: Notebook, value: int) -> None:
    """The slider, by its number; until the kernel has it, because front ends send a click before a value that waits."""
    number = notebook.find(".widget-readout").first
    number.fill(str(value))
    number.press("Enter")
    expect(notebook.find(".widget-label", f"taken {value}").first).to_be_visible()


def test_interact(lab: Lab, app: App) -> None:
    notebook = lab.open("interact.ipynb", LOAD, TRAIN, WIDGET)
    notebook.run_all()
    shown = notebook.find(".widget-vbox, .jupyter-widgets").filter(has=lab.page.locator("button")).first
    expect(button(notebook, "Run")).to_be_enabled()
    expect(button(notebook, "Stop")).to_be_disabled()
    move(notebook, 2)
    button(notebook, "Run").click()
    expect(shown).to_contain_text(re.compile(r"\[(0|1|0-1)\] +speed 2"))  # one line or two: a matter of moments
    expect(shown).to_contain_text(re.compile(r"\[0\] 20\s+\[1\] 21"))
    expect(shown.locator("table").first).to_contain_text("✓ done")

    move(notebook, 9)
    button(notebook, "Run").click()
    expect(shown).to_contain_text("speed 9")
    expect(shown).not_to_contain_text("speed 2")
    expect(shown.locator("table").first).to_contain_text("● running")
    button(notebook, "Stop").click()
    expect(shown.locator("table").first).to_contain_text("■ interrupted")
    expect(button(notebook, "Run")).to_be_enabled()

    move(notebook, 8)
    notebook.find(".widget-checkbox input").first.click()
    button(notebook, "Run").click()
    expect(shown).to_contain_text("RankRaisedError: rank 1 of 2: KeyError: 'hieght'")
    expect(shown.locator("table").first).to_contain_text("✗ failed")
    picture = notebook.find("div[class^=nbspawn-]")
    expect(picture).to_be_hidden()
    if app == "voila":
        return
    expect(picture).to_contain_text("KeyError")

    notebook.save()
    notebook.shut_down()
    notebook = lab.reopen("interact.ipynb", kernel=False)
    picture = notebook.find("div[class^=nbspawn-]")
    expect(picture).to_be_visible()
    expect(picture.locator("table").first).to_contain_text("✗ failed")
    expect(lab.page.get_by_text("Loading widget...").first).to_be_hidden()
    expect(picture).to_contain_text("train(speed=8, fail=True)")
    expect(picture).to_contain_text("KeyError: 'hieght'")
    expect(notebook.find("button.jupyter-button")).to_have_count(0)


def test_a_session_shows_itself(lab: Lab, app: App) -> None:
    cells = (LOAD, "ranks = nbspawn.Session(2).start()\nranks", "ranks.execute('print(6 * 7)')")
    notebook = lab.open("session.ipynb", *cells)
    notebook.run_all()
    panel = notebook.find(".widget-vbox, .jupyter-widgets").filter(has=lab.page.locator("button")).first
    expect(panel).to_contain_text("idle")
    panel.locator("select").select_option("log of rank 1")
    expect(panel).to_contain_text("42")
    button(notebook, "Restart").click()
    expect(panel).to_contain_text("idle")
    button(notebook, "End").click()
    expect(notebook.find("button.jupyter-button")).to_have_count(0)
    expect(notebook.outputs(1).get_by_text("2 ranks · ended: they were stopped").first).to_be_visible()
    if app == "voila":
        return

    notebook.save()
    notebook.shut_down()
    notebook = lab.reopen("session.ipynb", kernel=False)
    expect(notebook.find("div[class^=nbspawn-]")).to_contain_text("2 ranks · ended: they were stopped")
    expect(notebook.find("button.jupyter-button")).to_have_count(0)
