"""The notebook about debugging, with a user at its prompts: each bug is found in the way that it tells."""

from __future__ import annotations

import re
from pathlib import Path

import answered
from kernels import plain

PATH = Path(__file__).parents[2] / "notebooks" / "debugging.ipynb"


def test_three_bugs_are_found() -> None:
    replies = answered.run(PATH)
    drifted, looked, mended, hung, missing = (replies[number] for number in (2, 3, 5, 8, 10))
    assert re.search(r"\[0\] (.*)\n\[1\] (?!\1)", drifted.result)
    message = plain(looked.text())
    assert "[0] done" in message and "('Linear', 'DistributedDataParallel')" in message
    assert mended.status == "ok" and replies[6].status == "ok"
    assert hung.ename == "RunTimeoutError"
    saving, _, working = hung.traceback.partition("Ranks 1-2, waiting")
    assert "in save\n      dist.barrier()" in saving and "in work\n      dist.all_reduce(gradient)" in working
    message = plain(missing.text())
    assert "tensor(nan)" in message and "'part-7'" in message
    assert missing.ename == "RankRaisedError" and "has NaN (1 of 32)" in missing.traceback
