"""A user in JupyterLab, and in Notebook 7: what is seen under a cell, what Stop does, what stays without a kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import lives, wait_gone
from lab import CHROMIUM, Lab, open_lab
from playwright.sync_api import expect

pytestmark = pytest.mark.skipif(not os.path.exists(CHROMIUM), reason="needs Debian's package chromium")

LOAD = "%load_ext nbspawn"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), request.param) as lab:
        yield lab


in_lab = pytest.mark.parametrize("lab", ["lab"], indirect=True, scope="module")
# Notebook 7 is the same front end in another frame, so it runs only what depends on that: focus, widgets, prompts.
in_both = pytest.mark.parametrize("lab", ["lab", "notebook"], indirect=True, scope="module")


@pytest.mark.extended
@in_lab
def test_a_cell_shows_its_ranks_and_their_values_and_stays_in_the_saved_notebook(lab: Lab) -> None:
    cell = """%%spawn 2
import matplotlib.pyplot as plt
plt.plot([0, rank]); plt.show()
print("said by", rank)
rank * 7"""
    notebook = lab.open("shows.ipynb", LOAD, cell)
    notebook.run(0)
    notebook.run(1)
    outputs = notebook.outputs(1)

    def shown() -> None:
        table = outputs.nth(0).locator("table").first
        expect(table.locator("tbody tr")).to_have_count(2)
        expect(table).to_contain_text("✓ done")
        expect(notebook.printed(1).filter(has_text="said by 0")).to_be_visible()
        expect(notebook.images(1)).to_have_count(2)
        expect(outputs.last).to_contain_text("[1] 7")

    shown()
    notebook.save()
    notebook.shut_down()
    lab.reopen("shows.ipynb")
    shown()


@pytest.mark.extended
@in_lab
def test_a_failing_cell_shows_one_traceback_with_the_lines_of_its_cells(lab: Lab) -> None:
    helper = "def area(shape):\n    return shape['width'] * shape['hieght']"
    cell = """%%spawn 2 -b gloo
import torch.distributed as dist
if rank:
    area({'width': 3, 'height': 4})
dist.barrier()"""
    notebook = lab.open("fails.ipynb", LOAD, helper, cell)
    for number in range(3):
        notebook.run(number)
    outputs = notebook.outputs(2)
    expect(outputs.nth(0).locator("table").first).to_contain_text("✗ failed")
    error = outputs.last
    expect(error).to_contain_text("RankRaisedError: rank 1 of 2: KeyError: 'hieght' (line 4)")
    message = error.inner_text()
    assert message.count("Traceback") <= 1 and "Cell In[2], line 2" in message and "Cell In[3], line 4" in message
    assert "nbspawn/" not in message


@in_lab
def test_stop_button(lab: Lab) -> None:
    cell = """%%spawn 2 -g 60
import os, time
print('pid', os.getpid())
try:
    time.sleep(600)
finally:
    print('tidied')"""
    notebook = lab.open("stops.ipynb", LOAD, cell, "6 * 7")
    notebook.run(0)
    notebook.start(1)
    outputs = notebook.outputs(1)
    expect(outputs.nth(0).locator("table").first).to_contain_text("running")
    printed = notebook.printed(1)
    expect(printed).to_contain_text("[0]")
    expect(printed).to_contain_text("[1]")
    pids = [int(line.split()[-1]) for line in printed.inner_text().splitlines() if "pid" in line]
    assert len(pids) == 2 and all(map(lives, pids))
    notebook.press("interrupt")
    notebook.wait()
    expect(outputs.last).to_contain_text("KeyboardInterrupt: the ranks were stopped.")
    expect(outputs.nth(0).locator("table").first).to_contain_text("interrupted")
    expect(printed).to_contain_text("tidied")
    wait_gone(pids)
    notebook.run(2)
    expect(notebook.outputs(2)).to_have_text("42")


@pytest.mark.extended
@in_lab
def test_the_live_line_the_stall_and_the_controls_while_a_cell_runs(lab: Lab) -> None:
    cell = """%%spawn 2 -b gloo -g 60
import os, time, torch.distributed as dist
print('pid', os.getpid(), 'of rank', rank)
if rank == 1:
    time.sleep(600)
dist.barrier()"""
    notebook = lab.open("controls.ipynb", LOAD, cell, "6 * 7")
    notebook.run(0)
    notebook.start(1)
    outputs = notebook.outputs(1)
    table = outputs.nth(0)
    expect(table.locator("tbody tr").nth(0)).to_contain_text("6  dist.barrier()")
    expect(table.locator("tbody tr").nth(0)).to_contain_text("waiting")
    expect(table.locator("tbody tr").nth(1)).to_contain_text("5  time.sleep(600)")
    printed = notebook.printed(1)
    expect(printed).to_contain_text("of rank 0")
    expect(printed).to_contain_text("of rank 1")
    message = dict(re.findall(r"pid (\d+) of rank (\d)", printed.inner_text()))
    pids = sorted(map(int, message), key=lambda pid: message[str(pid)])
    outputs.locator("select").select_option("log of rank 1")
    expect(outputs.locator(".jupyter-widgets pre")).to_have_text(f"pid {pids[1]} of rank 1")
    expect(table).to_contain_text("Rank 0 has waited")
    expect(table).to_contain_text(
        "Collective 1 of the default group, barrier (line 6): rank 0 is in it, "
        "rank 1 has not reached it (no call recorded) and is at line 5: time.sleep(600)."
    )
    stop = outputs.get_by_role("button", name="Stop")
    table_box, stop_box, printed_box = (shown.bounding_box() for shown in (table, stop, printed))
    assert table_box and stop_box and printed_box
    assert table_box["y"] < stop_box["y"] < printed_box["y"]
    # At once: the table is replaced every second.
    widths = table.locator("th").evaluate_all("cells => cells.map(cell => cell.getBoundingClientRect().width)")
    assert min(widths) > 30 and widths[-1] > 180, "what a rank wrote last can be read"
    stop.click()
    notebook.wait()
    expect(outputs.last).to_contain_text("KeyboardInterrupt: the ranks were stopped.")
    expect(outputs.locator("button")).to_have_count(0)
    wait_gone(pids)
    assert "widget-view" not in str(notebook.save().cells[1].outputs)
    notebook.run(2)
    expect(notebook.outputs(2)).to_have_text("42")


@pytest.mark.extended
@in_lab
def test_cells_that_were_queued_run_afterwards_in_their_order(lab: Lab, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = f"%%spawn 2\nimport os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    notebook = lab.open(
        "queued.ipynb", LOAD + "\norder = []", cell, "order.append('first')", "order.append('next')", "order"
    )
    notebook.run(0)
    notebook.start(1)
    expect(notebook.outputs(1).get_by_role("button", name="Stop")).to_be_visible()
    for number in (2, 3, 4):
        notebook.start(number, queue=True)
    go.touch()
    notebook.wait()
    expect(notebook.outputs(4)).to_have_text("['first', 'next']")
    expect(notebook.outputs(1).nth(0)).to_contain_text("✓ done")


@pytest.mark.extended
@in_both
def test_debugging_at_a_prompt_in_the_cell(lab: Lab) -> None:
    cell = """%%spawn 3 -b gloo -o sums
import torch, torch.distributed as dist
x = torch.tensor([float(rank)])
if rank != 2:
    breakpoint()
dist.all_reduce(x)
x.item()"""
    notebook = lab.open("debugs.ipynb", LOAD, cell, "list(sums)")
    notebook.run(0)
    notebook.start(1)
    outputs = notebook.outputs(1)
    table = outputs.nth(0).locator("tbody")
    expect(table).to_contain_text("debugging")
    while "dist.all_reduce(x)" not in table.inner_text() or not outputs.filter(has_text="has stopped too").count():
        notebook.answer("ranks")  # what the others do meanwhile is shown with the next prompt
    expect(table.locator("tr").nth(0)).to_contain_text("debugging")
    expect(table.locator("tr").nth(2)).to_contain_text("6  dist.all_reduce(x)")
    expect(outputs.filter(has_text="has stopped too")).to_be_visible()
    notebook.answer("all p x")
    expect(notebook.printed(1).filter(has_text="[1]   tensor([1.])")).to_be_visible()
    notebook.answer("rank 1")
    notebook.answer("!x += 100")
    notebook.answer("all c")
    notebook.wait()
    notebook.run(2)
    expect(notebook.outputs(2)).to_have_text("[103.0, 103.0, 103.0]")


@pytest.mark.extended
@in_lab
def test_stacks_and_debugging_a_rank_that_runs(lab: Lab) -> None:
    cell = """%%spawn 2 -b gloo -o counts
import time, torch.distributed as dist
count = 0
if rank:
    while count < 10**6:
        time.sleep(0.01)
        count += 1
dist.barrier()
count"""
    notebook = lab.open("breaks.ipynb", LOAD, cell, "counts[1] >= 10**7")
    notebook.run(0)
    notebook.start(1)
    outputs = notebook.outputs(1)
    expect(outputs.nth(0).locator("tbody tr").nth(0)).to_contain_text("waiting")
    outputs.get_by_role("button", name="Stacks").click()
    stacks = outputs.filter(has_text="Where the ranks stand")
    expect(stacks).to_contain_text("Rank 0, waiting")
    expect(stacks.locator("pre").nth(0)).to_contain_text("Cell In[2], line 8")
    expect(stacks.locator("pre").nth(1)).to_contain_text("time.sleep(0.01)")
    outputs.locator("select").select_option("log of rank 1")
    outputs.get_by_role("button", name="Debug rank 1").click()
    expect(outputs.nth(0).locator("tbody tr").nth(1)).to_contain_text("debugging")
    expect(outputs.get_by_role("button", name="Stop")).to_be_disabled()
    notebook.answer("!count = 10**7")
    notebook.answer("c")
    notebook.wait()
    notebook.run(2)
    expect(notebook.outputs(2)).to_have_text("True")


@pytest.mark.extended
@in_lab
def test_a_cell_in_the_background(lab: Lab) -> None:
    cell = """%%spawn 2 --background
import time, matplotlib.pyplot as plt
print("begun by", rank)
if rank:
    plt.plot([0, 1]); plt.show()
while True: time.sleep(0.01)"""
    notebook = lab.open("behind.ipynb", LOAD, cell, "print('mine')\n6 * 7")
    notebook.run(0)
    notebook.run(1)
    notebook.run(2)
    behind, mine = notebook.outputs(1), notebook.outputs(2)
    expect(mine).to_have_count(2)
    expect(mine.last).to_contain_text("42")
    table = behind.nth(0).locator("table").first
    expect(table.locator("tr", has_text="time.sleep(0.01)")).to_have_count(2)
    expect(notebook.images(1)).to_have_count(1)
    expect(behind.filter(has_text="begun by 1").last).to_be_visible()
    behind.get_by_role("button", name="Stop").click()
    expect(table).to_contain_text("interrupted")
    expect(behind.filter(has_text="Ranks 0-1 were at line 6")).to_be_visible()
    expect(mine).to_have_count(2)


@pytest.mark.extended
@in_lab
def test_post_mortem_and_quit(lab: Lab) -> None:
    cell = """%%spawn 2 -b gloo --pdb
import os, torch.distributed as dist
print('pid', os.getpid())
def area(shape):
    return shape['width'] * shape['hieght']
if rank:
    area({'width': 3, 'height': 4})
dist.barrier()"""
    notebook = lab.open("mortem.ipynb", LOAD, cell)
    notebook.run(0)
    notebook.start(1)
    outputs = notebook.outputs(1)
    expect(outputs.nth(0).locator("tbody tr").nth(1)).to_contain_text("debugging")
    printed = notebook.printed(1)
    expect(printed.filter(has_text="KeyError: 'hieght'")).to_be_visible()
    notebook.answer("p sorted(shape)")
    expect(printed.filter(has_text="['height', 'width']")).to_be_visible()
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", " ".join(printed.all_inner_texts()))]
    assert len(pids) == 2 and all(map(lives, pids))
    notebook.answer("q")
    notebook.wait()
    expect(outputs.last).to_contain_text("RankRaisedError: rank 1 of 2: KeyError: 'hieght' (line 5)")
    wait_gone(pids)
