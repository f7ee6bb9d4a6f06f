"""``%ranks memory``: a leak in one rank is seen at a glance; idle ranks and busy ones, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernels import Kernel, Reply, ok, once

START = """%%spawn 3 --keep -b gloo -m {method} --name leaky
import os, time, torch
class Cache:
    items = []
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.Adam(model.parameters())
table = torch.zeros(1_000_000).share_memory_()
history = []
for step in range(4):
    loss = model(torch.ones(50, 1000)).sum()
    loss.backward()
    optimizer.step()
    if rank == 2:
        history.append(torch.ones(1000, 2000))
given.sum().item()"""


@pytest.fixture
def leaky(kernel: Kernel, method: str) -> Iterator[Kernel]:
    """Three kept ranks; number 2 has a list that grows."""
    ok(kernel.execute("import torch; given = torch.ones(2_000_000)"))
    ok(kernel.execute(START.format(method=method)))
    yield kernel
    kernel.execute("%ranks stop")


def shown(reply: Reply) -> tuple[dict[str, list[str]], str]:
    """The rows of the table, by name, and the whole text."""
    text = ok(reply).outputs[0]["data"]["text/plain"]
    rows = [re.split(r"  +", line) for line in text.partition("\n\n")[0].splitlines()[1:]]
    return {name: amounts for name, *amounts in rows}, text


def test_a_leak_in_one_rank(leaky: Kernel) -> None:
    table, text = shown(leaky.execute("%ranks memory"))
    assert text.startswith("Memory of 3 ranks @leaky\n")
    assert table["rank"] == ["0", "1", "2"]
    assert table["history"] == ["-", "-", "32 MB"]
    assert table["model"] == table["optimizer"] == ["8 MB"] * 3 and table["given"] == ["8 MB"] * 3
    assert "\nRank 2 has 32 MB in history, others have none.\n" in text
    assert "\nhistory: rank 2: 4 tensors float32[1000, 2000] in a list\n" in text
    assert "\nmodel: 4 tensors, largest .weight float32[1000, 1000], 4 MB of it gradients, also in optimizer\n" in text
    assert "\ntable: float32[1000000], in shared memory\n" in text
    assert max(map(len, text.splitlines())) <= 120 and "(no variable)" not in table


@once
def test_it_changes_nothing_in_the_ranks(leaky: Kernel) -> None:
    ok(
        leaky.execute(
            "%%ranks\nimport gc, weakref\n_ = 5\nnames = set(globals()); gone = weakref.ref(last := torch.ones(3))"
        )
    )
    first, _ = shown(leaky.execute("%ranks memory"))
    second, _ = shown(leaky.execute("%ranks memory @leaky"))
    assert first["tensors"] == second["tensors"]
    reply = ok(leaky.execute("%%ranks\ndel last\ngone() is None, sorted(set(globals()) - names), gc.isenabled()"))
    assert reply.result == "[0-2] (True, ['gone', 'names'], True)"


@once
def test_sent_by_the_notebook_until_it_is_changed(leaky: Kernel) -> None:
    _, text = shown(leaky.execute("%ranks memory"))
    assert "\ngiven: float32[2000000], sent by the notebook, shared until it is changed" in text


HIDE = """%%ranks 1
import sys, types
Cache.items.append(torch.ones(3_000_000))
sys.modules["mylib"] = types.ModuleType("mylib")
sys.modules["mylib"].classes = [Cache]
del Cache"""


@once
def test_what_no_variable_leads_to(leaky: Kernel) -> None:
    ok(leaky.execute(HIDE))
    table, text = shown(leaky.execute("%ranks memory"))
    assert table["(no variable)"] == ["-", "12 MB", "-"]
    assert "\n(no variable): rank 1: float32[3000000] in a list in class Cache" in text


RUNNING = """%%ranks {ranks}--background
def train(batch):
    while not os.path.exists({flag!r}):
        weights = [batch * 2, batch * 3]
        time.sleep(0.01)
print("begins")
train(torch.ones(2_500_000))"""


@once
@pytest.mark.parametrize("ranks", ["", "0,2 "])
def test_busy_ranks(leaky: Kernel, ranks: str) -> None:
    flag = str(leaky.folder / f"flag-{len(ranks)}")
    running = leaky.submit(RUNNING.format(ranks=ranks, flag=flag))
    ok(running.wait())
    running.see(lambda: "begins" in str(running.reply.saved), "the cell runs")
    table, text = shown(leaky.execute("%ranks memory"))
    assert table["rank"] == ["0", "1", "2"] and table["model"] == ["8 MB"] * 3
    assert "Rank 2 has 32 MB in history, others have none." in text
    assert int(table["tensors"][0].split()[0]) >= 8 + 8 + 8 + 4 + 30
    open(flag, "w").close()
    ok(leaky.execute("%ranks wait"))
    assert shown(leaky.execute("%ranks memory"))[0]["rank"] == ["0", "1", "2"]


@once
def test_a_rank_that_does_not_answer(leaky: Kernel) -> None:
    """It holds Python's lock in native code."""
    hang = "import ctypes\nprint('begins')\nctypes.PyDLL(None).sleep(600) if rank == 1 else time.sleep(600)"
    running = leaky.submit(f"%%ranks --background\n{hang}")
    ok(running.wait())
    running.see(lambda: str(running.reply.saved).count("begins") >= 1, "the cell runs")
    _, text = shown(leaky.execute("%ranks memory"))
    assert "Rank 1: no answer; ended, stopped, or in native code that holds Python's lock." in text
    assert "Rank 2 has 32 MB in history, others have none." in text


@once
def test_errors(leaky: Kernel) -> None:
    assert "there are no kept ranks named 'nope'" in leaky.execute("%ranks memory @nope").traceback
    assert leaky.execute("%ranks memory 1").ename == "UsageError"
