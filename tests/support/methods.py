"""What all tests share: the start methods, where test helpers lie, how long to wait."""

from __future__ import annotations

from pathlib import Path

import pytest

METHODS = "fork", "forkserver", "spawn"
EVERY_METHOD = "fork", "forkserver", pytest.param("spawn", marks=pytest.mark.extended)
"""For parametrize: a spawned rank imports torch anew, which is two seconds."""

PATIENCE = 100.0
"""Seconds: the bound of every wait. Nothing comes near it, but on a machine under load."""

SUPPORT = str(Path(__file__).parent)
"""On ``PYTHONPATH``, for programs that tests run."""
