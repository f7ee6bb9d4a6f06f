"""The notebook about debugging, with a user at its prompts: each bug is found in the way that it tells."""

from __future__ import annotations

import re
from pathlib import Path

import answered
import pytest
import torch
from kernels import plain
from packaging.version import Version

pytestmark = pytest.mark.extended

PATH = Path(__file__).parents[2] / "notebooks" / "debugging.ipynb"


def test_the_bugs_are_found() -> None:
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
    if Version(torch.__version__) >= Version("2.8"):  # torch's recorder for gloo
        mismatch, behind = replies[12], replies[15].outputs[-1]["data"]["text/plain"]
        ends = "ranks 0-1 call all_reduce float32[4, 2] (line 4), rank 2 calls all_reduce float32[4, 3] (line 4)."
        assert mismatch.ename == "RunTimeoutError" and ends in mismatch.traceback
        assert "ranks 0 and 2 are in it, rank 1 has not reached it (last call: 3, all_reduce)" in behind
    before, after = replies[18].text(), replies[20].text()
    assert before == "model: 4 entries are equal in all 4 ranks.\n"
    assert "ranks 0-1 and 3 agree, rank 2 differs" in after and "first at [3, 5]" in after
    memory = replies[23].outputs[-1]["data"]["text/plain"]
    assert "Rank 1 has 40 MB in history, others have none." in memory
