"""``python -m nbspawn --check gpu`` where there is none; tests/gpu has the rest."""

from __future__ import annotations

import sys

import pytest

from nbspawn import __main__


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["nbspawn", "--check", "gpu"])
    with pytest.raises(SystemExit) as status:
        __main__.main()
    assert status.value.code == 1
    said = capsys.readouterr().out
    assert said.startswith("torch 2.") and said.endswith("finds no GPU on this machine: there is nothing to check.\n")
    assert said.count("\n") == 1
