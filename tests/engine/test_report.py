"""``python -m nbspawn``: the report that users paste into bug reports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nbspawn
from nbspawn._engine.start import learned


def _report(*options: str) -> str:
    done = subprocess.run([sys.executable, "-m", "nbspawn", *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def _row(report: str, name: str) -> str:
    found = re.search(rf"^  {re.escape(name)} +(.*)$", report, re.MULTILINE)
    assert found is not None, f"no row {name!r} in:\n{report}"
    return found[1]


def test_it_names_versions_limits_and_devices() -> None:
    report = _report()
    assert _row(report, "nbspawn") == nbspawn.__version__
    assert "build)" in _row(report, "torch")
    for name in ("python", "ipython", "cloudpickle", "cores", "memory", "own host name", "memfd", "lifeline", "GPUs"):
        assert _row(report, name)
    assert "2 ranks, spawn" not in report


@pytest.mark.extended
def test_every_start_method_is_really_tried() -> None:
    report = _report("--all")
    assert _row(report, "fork is safe here").startswith("yes")
    for name in ("fork server, start", "2 ranks, fork", "2 ranks, forkserver", "2 ranks, spawn"):
        assert re.fullmatch(r"works \(\d+\.\d+ s\)", _row(report, name)), report


@pytest.mark.extended
def test_what_the_fork_server_preloads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NBSPAWN_PRELOAD_MB", "300")
    known = learned.Learned()
    known.tried = {"rich.progress": 0.1}
    known.refused = {"starts.thread": "it starts a thread (mine)"}
    known.save()
    report = _report()
    assert re.fullmatch(r"\d+ MiB with torch alone; imports up to 300", _row(report, "its memory"))
    assert _row(report, "remembered imports") == f"1 in {learned.path()}"
    assert _row(report, "refused imports") == "starts.thread: it starts a thread (mine)"
