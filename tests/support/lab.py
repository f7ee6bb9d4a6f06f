"""Drives real front ends in Debian's Chromium: opens notebooks, runs cells, presses buttons, reads what is shown.

JupyterLab, Notebook 7, Voila and the classic Notebook 6, the last with another environment's interpreter.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import nbformat
import psutil
from kernels import lives, wait_gone, wait_until
from methods import PATIENCE
from playwright.sync_api import Locator, Page, Route, WebSocket, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
_END = 10.0  # seconds for a server to end

App = Literal["lab", "notebook", "voila", "classic"]

expect.set_options(timeout=PATIENCE * 1000)


class Lab:
    """A Jupyter server on a port of its own choice, and a browser window with JupyterLab or Notebook 7."""

    def __init__(self, folder: Path, page: Page, app: App, python: str | Path = sys.executable) -> None:
        self.folder = folder
        self.page = page
        self._app = app
        self._python = str(python)
        self.url = ""
        self.messages: deque[str] = deque(maxlen=300)
        page.set_default_timeout(PATIENCE * 1000)
        page.on("websocket", self._follow)

    @contextmanager
    def serving(self) -> Iterator[Lab]:
        """While the server runs; its kernels end with it."""
        private = {
            f"JUPYTER{name}_DIR": str(self.folder / name.strip("_").lower())
            for name in ("_CONFIG", "_DATA", "_RUNTIME", "LAB_SETTINGS", "LAB_WORKSPACES")
        }
        with open(self.folder / "server.log", "w") as log:
            server = subprocess.Popen(
                [self._python, "-m", *self._command()], env={**os.environ, **private}, stdout=log, stderr=log
            )
        try:
            # Each of these servers takes a free port for 0, and not each says which.
            port = wait_until(lambda: _listening(server), f"{self._app} listens")
            self.url = f"http://127.0.0.1:{port}/"
            yield self
        finally:
            _end(server)

    def _follow(self, socket: WebSocket) -> None:
        """Note the types of the kernel's messages and of those to it."""

        def noted(way: str, frame: str | bytes) -> None:
            found = re.search(rb'"msg_type": ?"(\w+)"', frame if isinstance(frame, bytes) else frame.encode())
            if found:
                self.messages.append(f"{time.strftime('%X')} {way} {found[1].decode()}")

        socket.on("framesent", partial(noted, "to the kernel:"))
        socket.on("framereceived", partial(noted, "from it:"))

    def _command(self) -> list[str]:
        return [
            "jupyterlab",
            "--allow-root",
            "--no-browser",
            "--ServerApp.ip=127.0.0.1",
            "--ServerApp.port=0",
            f"--ServerApp.root_dir={self.folder}",
            "--IdentityProvider.token=",
            "--LabApp.expose_app_in_browser=True",
            "--JupyterNotebookApp.expose_app_in_browser=True",
            "--LabApp.news_url=",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]

    def open(self, name: str, *cells: str) -> Notebook:
        """Write a notebook of these cells, and open it with a kernel of the server's interpreter."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)
        return self.reopen(name)

    def reopen(self, name: str, kernel: bool = True) -> Notebook:
        """Open a notebook that is there, in a window that has nothing else open.

        Without a ``kernel`` the window is told that the server has none of the notebook's language; the question which
        one to take is answered with none, as a reader would whose machine lacks it. Nothing in the file changes.
        """
        if kernel:
            self.page.unroute(_SPECS)
        else:
            self.page.route(_SPECS, _answer_with_another_kernel)
        notebook = self._shown(name)
        if not kernel:
            notebook.decline_kernel()
        return notebook

    def _shown(self, name: str) -> Notebook:
        self.page.goto(f"{self.url}lab/tree/{name}?reset" if self._app == "lab" else f"{self.url}notebooks/{name}")
        self.page.wait_for_function(f"() => window.jupyterapp && {_PANEL}?.context?.isReady")
        return Notebook(self, name)


class Classic(Lab):
    """The classic Notebook 6."""

    def _command(self) -> list[str]:
        return [
            "notebook",
            "--allow-root",
            "--no-browser",
            "--NotebookApp.ip=127.0.0.1",
            "--NotebookApp.port=0",
            f"--NotebookApp.notebook_dir={self.folder}",
            "--NotebookApp.token=",
        ]

    def _shown(self, name: str) -> Notebook:
        self.page.goto(f"{self.url}notebooks/{name}")
        self.page.wait_for_function("() => window.Jupyter?.notebook?._fully_loaded")
        return ClassicNotebook(self, name)


class Voila(Lab):
    """Voila. To open a page runs the whole notebook, in a kernel of the page's own."""

    def _command(self) -> list[str]:
        return ["voila", str(self.folder), "--no-browser", "--Voila.ip=127.0.0.1", "--Voila.port=0"]

    def reopen(self, name: str, kernel: bool = True) -> Notebook:
        assert kernel, "Voila has no page without a kernel"
        return super().reopen(name)

    def _shown(self, name: str) -> Notebook:
        self.page.goto(f"{self.url}voila/render/{name}")
        self.page.locator("#rendered_cells").wait_for()
        return VoilaNotebook(self, name)


_APPS: dict[App, type[Lab]] = {"lab": Lab, "notebook": Lab, "classic": Classic, "voila": Voila}
_PANEL = "window.jupyterapp.shell.currentWidget"
_SPECS = "**/api/kernelspecs*"


class Notebook:
    """The notebook in the window. Cells are counted from 0."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._page = lab.page
        self.path = lab.folder / name

    def start(self, cell: int, queue: bool = False) -> None:
        """Run a cell, and return at once; ``queue`` it behind the one that runs."""
        if not queue:
            self._wait_idle()
        self._page.evaluate(
            f"""cell => {{
                {_PANEL}.content.activeCellIndex = cell;
                window.ended = window.jupyterapp.commands.execute("notebook:run-cell");
            }}""",
            cell,
        )

    def _wait_idle(self) -> None:
        self._page.wait_for_function(f"() => {_PANEL}.context.sessionContext.session?.kernel?.status == 'idle'")

    def wait(self) -> None:
        """Until the cell that was started has ended."""
        self._page.evaluate("() => window.ended.then(() => null)")

    def run(self, cell: int) -> None:
        """Run a cell to its end."""
        self.start(cell)
        self.wait()

    def run_all(self) -> None:
        """Run all cells to their end."""
        self._wait_idle()
        self._page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => null)")

    def find(self, selector: str, text: str = "") -> Locator:
        """The elements of the page that a CSS selector matches and that contain a text."""
        return self._page.locator(selector).filter(has_text=text)

    def outputs(self, cell: int) -> Locator:
        """What is shown under a cell."""
        return self._page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-OutputArea-output")

    def printed(self, cell: int) -> Locator:
        """Its text on stdout, a block or several."""
        return self.outputs(cell).and_(self._page.locator('[data-mime-type="application/vnd.jupyter.stdout"]'))

    def images(self, cell: int) -> Locator:
        """Those that its code displays: the timeline, which has one too, is HTML."""
        return self.outputs(cell).and_(self._page.locator('[data-mime-type="image/png"]'))

    def answer(self, text: str) -> None:
        """Type into the prompt that is open, and wait until it has been taken."""
        prompt = self._page.locator(".jp-Stdin-input, input.raw_input")
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

    def decline_kernel(self) -> None:
        """Answer the question which kernel to start with none."""
        self._page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()


class ClassicNotebook(Notebook):
    """The same in the classic Notebook."""

    def start(self, cell: int, queue: bool = False) -> None:
        if not queue:
            self._wait_idle()
        self._page.evaluate("cell => Jupyter.notebook.execute_cells([cell])", cell)

    def _wait_idle(self) -> None:
        # The widgets' extension asks a new kernel for its models, in two requests, and then draws all widgets anew: it
        # loses those that came meanwhile. Nothing tells when it is done; after answers to three more requests it is.
        kernel = "Jupyter.notebook.kernel"
        self._page.wait_for_function(f"() => {kernel}?.is_connected() && {kernel}.widget_manager")
        for _ in range(3):
            self._page.evaluate(f"() => new Promise(answered => {kernel}.comm_info(null, () => answered(null)))")
        self._page.wait_for_function("() => !Jupyter.notebook.kernel_busy")

    def wait(self) -> None:
        expect(self._page.locator(".code_cell.running")).to_have_count(0)

    def run_all(self) -> None:
        self._wait_idle()
        self._page.evaluate("() => Jupyter.notebook.execute_all_cells()")
        self.wait()

    def outputs(self, cell: int) -> Locator:
        return self._page.locator(".code_cell").nth(cell).locator(".output_subarea")

    def printed(self, cell: int) -> Locator:
        return self.outputs(cell).and_(self._page.locator(".output_stdout"))

    def press(self, button: str) -> None:
        action = {"interrupt": "interrupt-kernel", "restart": "confirm-restart-kernel"}[button]
        self._page.locator(f'#maintoolbar [data-jupyter-action="jupyter-notebook:{action}"]').click()

    def save(self) -> Any:
        self._page.evaluate("() => Jupyter.notebook.save_notebook().then(() => null)")
        return nbformat.read(self.path, as_version=4)

    def shut_down(self) -> None:
        self._page.evaluate("() => new Promise(ended => Jupyter.notebook.session.delete(ended, ended))")

    def decline_kernel(self) -> None:
        self._page.locator(".modal-dialog").get_by_role("button", name="Continue Without Kernel").click()


class VoilaNotebook(Notebook):
    """The page that Voila made of it, which has only what the cells put out: nothing can be run, or saved."""

    def run_all(self) -> None:
        """Nothing: they have run before the page was shown."""

    def outputs(self, cell: int) -> Locator:
        return self._page.locator(f'[cell-index="{cell + 1}"] .jp-OutputArea-output')

    def printed(self, cell: int) -> Locator:
        return self.outputs(cell).and_(self._page.locator(".jp-RenderedText:not(.lm-Widget)"))  # nbconvert made it

    def shut_down(self) -> None:
        # As the page does when it is left; but this server has not given it the cookie that the request needs.
        self._page.evaluate(
            """async () => {
                const { baseUrl, kernelId } = JSON.parse(document.getElementById("jupyter-config-data").textContent);
                document.cookie = "_xsrf=spare; path=/";
                const body = new FormData();
                body.append("_xsrf", "spare");
                const answer = await fetch(`${baseUrl}voila/api/shutdown/${kernelId}`, { method: "POST", body });
                if (!answer.ok) throw Error(`${answer.url}: ${answer.status}`);
            }"""
        )


def _listening(server: subprocess.Popen[bytes]) -> int:
    """The port on which a server that runs listens; 0 before that."""
    assert server.poll() is None, "the server has ended: see its server.log"
    found = psutil.Process(server.pid).net_connections("tcp4")
    return next((one.laddr.port for one in found if one.status == psutil.CONN_LISTEN), 0)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server, and what it has started: by force where it does not end itself. (JupyterLab 4.6 sometimes does not,
    after a page that had no kernel.)"""
    if server.poll() is not None:
        return
    started = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END)
    for pid in filter(lives, [server.pid, *started]):
        os.kill(pid, signal.SIGKILL)
    server.wait()
    wait_gone(started, PATIENCE)


def _answer_with_another_kernel(route: Route) -> None:
    """The list of kernels of a server that has none of Python."""
    spec = {"argv": [], "display_name": "Another", "language": "another", "env": {}, "metadata": {}}
    known = {"another": {"name": "another", "spec": spec, "resources": {}}}
    route.fulfill(json={"default": "another", "kernelspecs": known})


@contextmanager
def open_lab(folder: Path, app: App = "lab", python: str | Path = sys.executable, scale: float = 1.0) -> Iterator[Lab]:
    """A server, run by this interpreter of an environment that has it, and a browser with ``scale`` pixels a point."""
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 900}, device_scale_factor=scale)
            with _APPS[app](folder, page, app, python).serving() as lab:
                yield lab
        finally:
            browser.close()
