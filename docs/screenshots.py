"""The pictures of docs/appearance.md, from JupyterLab, light and dark, and a terminal: ``python docs/screenshots.py``.

Where there are GPUs, `python docs/screenshots.py gpus` takes that of a hang (`FAKE_GPUS=4`, `.ci/fake-gpu-env`);
`python docs/screenshots.py gutter` only that of docs/guide/debugging.md.
README's own are made by docs/features.py and docs/animation.py. What all three need: docs/stage.py.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pexpect
import rich.console
import rich.text
from playwright.sync_api import expect
from stage import DOCS, FAILING, FAILS, LOAD, STRAGGLER, WORK, Lab, Sidebar, close_sidebar, stage

LIVE = """%%spawn 4 -b gloo -g 1
import time, torch, torch.distributed as dist
from tqdm import tqdm

def step(number):
    if rank == 1 and number == 31:
        time.sleep(600)
    time.sleep(0.01)
    dist.all_reduce(torch.ones(1))

for number in tqdm(range(100), desc="epoch 2"):
    step(number)"""
HANG = """%%spawn gpu -b auto --keep
import time, torch, torch.distributed as dist

torch.manual_seed(0)
model = torch.nn.Linear(10, 1).to(device)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
for step in range(100):
    loss = model(torch.randn(32, 10, device=device)).square().mean()
    if rank == 1 and step == 20:
        time.sleep(600)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())"""
TRAIN = """import matplotlib.pyplot as plt, torch, torch.distributed as dist

def train(rank, lr, hidden=64, steps=60):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    x = torch.linspace(rank, rank + 1, 200)[:, None]
    losses = []
    for step in range(steps):
        loss = (model(x) - torch.sin(6 * x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[-1]:.3f}")
    if rank == 0:
        plt.figure(figsize=(5, 1.6)); plt.plot(losses); plt.show()
    return losses[-1]"""
SHARDS = """%%spawn 2
import torch

def shard(step):
    lr = 0.1 / (rank + 1)
    x = torch.full((2, 3), float(rank + step))
    return x * lr

shard(1).sum()"""
INTERACT = 'nbspawn.interact(train, nprocs=4, backend="gloo", lr=(1e-4, 1e-1), hidden=[16, 64, 256])'


def take(lab: Lab, folder: Path) -> None:
    """All pictures."""
    folder.mkdir(exist_ok=True)
    page = lab.page

    def picture(name: str, cell: int) -> None:
        page.locator(".jp-Notebook .jp-CodeCell").nth(cell).screenshot(path=folder / name)

    notebook = lab.open("timeline.ipynb", LOAD, WORK, STRAGGLER)
    for cell in range(3):
        notebook.run(cell)
    picture("timeline.png", 2)

    notebook = lab.open("failing.ipynb", LOAD, FAILS, FAILING)
    for cell in range(3):
        notebook.run(cell)
    picture("failing-cell.png", 2)

    notebook = lab.open("interact.ipynb", LOAD, TRAIN, INTERACT)
    for cell in range(3):
        notebook.run(cell)
    run = notebook.find("button.jupyter-button", "Run")
    run.click()
    expect(notebook.outputs(2).first).to_contain_text("✓ done")
    expect(run).to_be_enabled()
    page.wait_for_function("() => document.querySelectorAll('.jp-OutputArea img[src^=\"data:image/png\"]').length")
    picture("interact.png", 2)

    notebook = lab.open("live.ipynb", LOAD, LIVE)
    notebook.run(0)
    notebook.start(1)
    expect(notebook.outputs(1).first).to_contain_text(re.compile(r"have waited \d+ s"))
    picture("live-view.png", 1)
    notebook.press("interrupt")
    notebook.wait()


def gutter(lab: Lab, file: Path) -> None:
    """Ranks that JupyterLab's own debugger has stopped."""
    notebook = lab.open("shards.ipynb", LOAD, SHARDS)
    close_sidebar(lab)
    notebook.run(0)
    sidebar = Sidebar(lab.page)
    sidebar.switch_on()
    sidebar.click(1, 7)
    notebook.start(1)
    sidebar.shows("rank 0: shard", "rank 0: <module>", "rank 1: shard", "rank 1: <module>")
    sidebar.frames.nth(2).click()
    sidebar.variable("lr", "0.05")
    expect(notebook.outputs(1).first).to_contain_text("paused")
    lab.page.screenshot(path=file)
    sidebar.press("Continue")
    notebook.wait()


def gpus(lab: Lab, folder: Path) -> None:
    """A hang on GPUs, where a call returns at once, and a rank waits at a line that computes nothing with others."""
    notebook = lab.open("gpus.ipynb", LOAD, HANG)
    notebook.run(0)
    notebook.start(1)
    expect(notebook.outputs(1).first).to_contain_text("for their GPUs", timeout=60_000)
    lab.page.locator(".jp-Notebook .jp-CodeCell").nth(1).screenshot(path=folder / "gpu-hang.png")
    notebook.press("interrupt")
    notebook.wait()


def terminal(lab: Lab, file: Path) -> None:
    """IPython in a terminal of 80 columns: what stays of the same run."""
    shell = pexpect.spawn(sys.executable, ["-m", "IPython", "--no-banner"], dimensions=(50, 80), encoding="utf-8")
    try:
        for code in (LOAD, WORK, STRAGGLER):
            shell.expect(r"In \[.*\].*: ")
            # As a paste: typed lines would be indented.
            shell.send(f"\x1b[200~{code}\x1b[201~")
            shell.send("\x1b\r" if code == STRAGGLER else "\r\r")
        shell.expect("Where the time went.*In ", timeout=60)
        shown = shell.before + shell.after
    finally:
        shell.close(force=True)
    console = rich.console.Console(record=True, width=80, file=io.StringIO())
    last = shown[shown.rindex("4 ranks ·") :].partition("\x1b[6n")[0].rstrip().replace("\r", "")
    console.print(rich.text.Text.from_ansi(last))
    lab.page.set_content(console.export_svg(title="ipython, 80 columns"))
    lab.page.locator("svg").screenshot(path=file)


def main() -> None:
    if sys.argv[1:] == ["gpus"]:
        with stage(1500, 1000) as lab:
            return gpus(lab, DOCS)
    with stage(1180, 620) as lab:
        gutter(lab, DOCS / "gutter.png")
    if sys.argv[1:] == ["gutter"]:
        return None
    with stage(1180, 1000) as lab:
        take(lab, DOCS)
        terminal(lab, DOCS / "terminal.png")
    with stage(1180, 1000, theme="JupyterLab Dark") as lab:
        take(lab, DOCS / "dark")


if __name__ == "__main__":
    main()
