"""Drives a real JupyterLab or Notebook 7 in Debian's Chromium: opens notebooks, runs cells, presses buttons, reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import nbformat
from kernels import PATIENCE, wait_until
from playwright.sync_api import Locator, Page, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"

App = Literal["lab", "notebook"]

expect.set_options(timeout=PATIENCE * 1000)


class Lab:
    """A Jupyter server on a port of its own choice, and a browser window with JupyterLab or Notebook 7."""

    def __init__(self, folder: Path, page: Page, app: App) -> None:
        self.folder = folder
        self.page = page
        self._app = app
        self.url = ""
        page.set_default_timeout(PATIENCE * 1000)

    @contextmanager
    def serving(self) -> Iterator[Lab]:
        """While the server runs; its kernels end with it."""
        runtime = self.folder / "runtime"
        private = {
            f"JUPYTER{name}_DIR": str(self.folder / name.strip("_").lower())
            for name in ("_CONFIG", "_DATA", "LAB_SETTINGS", "LAB_WORKSPACES")
        }
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": "0",
            "ServerApp.root_dir": str(self.folder),
            "IdentityProvider.token": "",
            "LabApp.expose_app_in_browser": "True",
            "JupyterNotebookApp.expose_app_in_browser": "True",
            "LabApp.news_url": "",
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        }
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with open(self.folder / "server.log", "w") as log:
            server = subprocess.Popen(
                command,
                env={**os.environ, **private, "JUPYTER_RUNTIME_DIR": str(runtime)},
                stdout=log,
                stderr=log,
            )
        try:
            message = runtime / f"jpserver-{server.pid}.json"
            wait_until(lambda: message.exists() and message.read_text().endswith("}"), "JupyterLab listens")
            self.url = json.loads(message.read_text())["url"]
            yield self
        finally:
            server.terminate()
            server.wait(PATIENCE)

    def open(self, name: str, *cells: str) -> Notebook:
        """Write a notebook of these cells, and open it with a kernel of this interpreter."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)
        return self.reopen(name)

    def reopen(self, name: str) -> Notebook:
        """Open a notebook that is there, in a window that has nothing else open."""
        self.page.goto(f"{self.url}lab/tree/{name}?reset" if self._app == "lab" else f"{self.url}notebooks/{name}")
        self.page.wait_for_function(f"() => window.jupyterapp && {_PANEL}?.context?.isReady")
        return Notebook(self, name)


_PANEL = "window.jupyterapp.shell.currentWidget"


class Notebook:
    """The notebook in the window. Cells are counted from 0."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._page = lab.page
        self.path = lab.folder / name

    def start(self, cell: int, queue: bool = False) -> None:
        """Run a cell, and return at once; ``queue`` it behind the one that runs."""
        if not queue:
            self._page.wait_for_function(f"() => {_PANEL}.context.sessionContext.session?.kernel?.status == 'idle'")
        self._page.evaluate(
            f"""cell => {{
                {_PANEL}.content.activeCellIndex = cell;
                window.ended = window.jupyterapp.commands.execute("notebook:run-cell");
            }}""",
            cell,
        )

    def wait(self) -> None:
        """Until the cell that was started has ended."""
        self._page.evaluate("() => window.ended.then(() => null)")

    def run(self, cell: int) -> None:
        """Run a cell to its end."""
        self.start(cell)
        self.wait()

    def outputs(self, cell: int) -> Locator:
        """What is shown under a cell."""
        return self._page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-OutputArea-output")

    def printed(self, cell: int) -> Locator:
        """Its text on stdout, a block or several."""
        return self.outputs(cell).and_(self._page.locator('[data-mime-type="application/vnd.jupyter.stdout"]'))

    def answer(self, text: str) -> None:
        """Type into the prompt that is open, and wait until it has been taken."""
        prompt = self._page.locator(".jp-Stdin-input")
        prompt.fill(text)
        element = prompt.element_handle()
        prompt.press("Enter")
        element.wait_for_element_state("hidden")

    def press(self, button: str) -> None:
        """A button of the notebook's toolbar, by its name in JupyterLab: 'interrupt', 'restart'."""
        self._page.locator(f'.jp-NotebookPanel-toolbar [data-jp-item-name="{button}"]').click()

    def save(self) -> Any:
        """The notebook as it is saved."""
        self._page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save').then(() => null)")
        return nbformat.read(self.path, as_version=4)

    def shut_down(self) -> None:
        """End the notebook's kernel."""
        self._page.evaluate(f"() => {_PANEL}.context.sessionContext.shutdown().then(() => null)")


@contextmanager
def open_lab(folder: Path, app: App = "lab") -> Iterator[Lab]:
    """A server and a browser."""
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            with Lab(folder, browser.new_page(viewport={"width": 1200, "height": 900}), app).serving() as lab:
                yield lab
        finally:
            browser.close()
