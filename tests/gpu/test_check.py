"""``python -m nbspawn --check gpu`` on fake GPUs: all is well, and what does not work is told."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nbspawn import _check as check
from nbspawn._state import collectives

# The checks need SIGALRM.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(method="thread")]

ALL = {one.run.__name__.lstrip("_"): one for one in check._CHECKS}
Checked = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Checked:
    """A function that makes these checks (none: all), and returns the exit status, the verdicts, and what was said."""

    def run(*checks: check._Check, **env: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(check, "_CHECKS", checks or check._CHECKS)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        status = check.gpu()
        said = capsys.readouterr().out
        return status, [line[:10].strip() for line in said.splitlines() if line[:10] in VERDICTS], said

    return run


VERDICTS = ("ok        ", "left out  ", "FAILED    ")


def test_all_is_well(checked: Checked) -> None:
    status, verdicts, said = checked()
    assert (status, verdicts) == (0, ["ok"] * len(ALL)), said
    assert all(f"ok        {one.name} (" in said for one in ALL.values())
    assert "2 GPUs: 2 ranks, one on each" in said and "cuda:1: Fake GPU, 16.0 GiB" in said
    assert "nccl: the sum took " in said and "rank 0 is in it, rank 1 has not reached it" in said, said
    assert "rank 1 of 2: AcceleratorError: CUDA error: device-side assert triggered (line " in said
    assert said.endswith("All is well.\n")


def test_one_gpu(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_HANG", 3.0)
    status, verdicts, said = checked(*list(ALL.values())[:-2], FAKE_GPUS="1")
    assert (status, verdicts) == (0, ["ok", "left out", *["ok"] * 4]), said
    assert "1 GPU: 1 rank, " in said and "There is one GPU, and no group has two ranks on one." in said


def test_gpus_that_do_not_reach_each_other(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_FIRST", 2.0)
    monkeypatch.setattr(check, "_FIRST", 6.0)
    status, verdicts, said = checked(ALL["collectives"], ALL["own_gpu"], FAKE_NCCL_P2P="hang")
    assert (status, verdicts) == (1, ["FAILED", "ok"]), said
    assert "all its ranks have called it, and it has not ended for" in said
    assert "With NCCL_P2P_DISABLE=1 it works" in said, said
    assert said.endswith("1 of 2 checks have failed.\n")


def test_collectives_that_fail(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need them are left out."""
    monkeypatch.setattr(check, "_SUM", "1 / 0")
    status, verdicts, said = checked(ALL["collectives"], ALL["hang_is_told"])
    assert (status, verdicts) == (1, ["FAILED", "left out"]), said
    assert "With NCCL_P2P_DISABLE=1 it does not work either: rank " in said and "ZeroDivisionError" in said


def test_ranks_that_are_lost(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check gets new ones."""
    monkeypatch.setattr(check, "_HANG", 4.0)
    status, verdicts, said = checked(ALL["hang_is_survived"], ALL["error_arrives"], FAKE_NCCL_ABORT="hang")
    assert (status, verdicts) == (1, ["FAILED", "FAILED"]), said
    assert said.count("The ranks, and their variables, are lost: they were killed") == 2, said


def test_a_gpu_that_is_broken(checked: Checked) -> None:
    status, verdicts, said = checked(ALL["own_gpu"], ALL["nothing_left"], FAKE_GPU_ASSERT_AT="1")
    assert (status, verdicts) == (1, ["FAILED", "left out"]), said
    assert "RankRaisedError: rank " in said and "how much memory is free is not known" in said


def endless(ranks: Any) -> str:
    return str(ranks.execute("time.sleep(600)", 600.0))


def test_what_does_not_end_is_stopped(checked: Checked) -> None:
    status, verdicts, said = checked(ALL["own_gpu"], check._Check("endless", endless, seconds=3.0), ALL["own_gpu"])
    assert (status, verdicts) == (1, ["ok", "FAILED", "ok"]), said
    assert "It did not end, and was stopped after 3 s." in said and "Ranks 0-1 were at line 1." in said, said


def test_ctrl_c(checked: Checked) -> None:
    def pressed(ranks: Any) -> str:
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
        return endless(ranks)

    status, verdicts, said = checked(ALL["own_gpu"], check._Check("endless", pressed), ALL["own_gpu"])
    assert (status, verdicts) == (130, ["ok"]) and said.endswith("Stopped.\n"), said
