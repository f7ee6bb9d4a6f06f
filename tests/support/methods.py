"""The start methods, and where test helpers lie."""

from __future__ import annotations

from pathlib import Path

METHODS = "fork", "forkserver", "spawn"
SUPPORT = str(Path(__file__).parent)
"""On ``PYTHONPATH``, for programs that tests run."""
