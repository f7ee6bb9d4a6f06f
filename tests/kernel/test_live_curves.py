"""Curves of what ranks print by name or log: in the saved notebook, of every kind of ranks; none where nothing is."""

from __future__ import annotations

import re

from kernels import Kernel, Reply, ok

CELL = """
import time, nbspawn
for step in range(4):
    print('step', step, 'loss', 1.5 - rank / 4 - step / 8)
    nbspawn.log(accuracy=step / 4)
    time.sleep(0.15)"""


def pictures(reply: Reply) -> list[str]:
    """What each says where it cannot be shown."""
    return sorted(re.findall(r'<img alt="([^"]+)" style="display:inline-block', reply.table["text/html"]))


def test_curves(kernel: Kernel, method: str) -> None:
    loss, accuracy = "loss of ranks 0-1: 1.5 to 1.125", "accuracy of ranks 0-1: 0 to 0.75"
    reply = ok(kernel.execute(f"%%spawn 2 --keep -m {method}{CELL}"))
    try:
        assert pictures(reply) == [accuracy, loss]
        assert pictures(ok(kernel.execute(f"%%ranks{CELL}"))) == [accuracy, loss]
        reply = kernel.execute(f"%%ranks{CELL}\n1 / 0")
        assert reply.ename == "RankRaisedError" and pictures(reply) == [accuracy, loss], "they stay after an error"
        assert pictures(ok(kernel.execute("%%ranks\nimport time\nprint('loss', 0.5)\ntime.sleep(0.1)"))) == []
    finally:
        ok(kernel.execute("%ranks stop"))


def test_log_outside_of_ranks_does_nothing(kernel: Kernel) -> None:
    reply = ok(kernel.execute("import nbspawn\nnbspawn.log(loss=1)"))
    assert reply.outputs == [] and reply.text() == ""
    assert kernel.execute("nbspawn.log(loss='high')").ename == "ValueError"
