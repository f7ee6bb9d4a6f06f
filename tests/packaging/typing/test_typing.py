"""The public types, as a user's type checker sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

CONSUMER = Path(__file__).parent / "consumer.py"


def check(*command: str) -> None:
    ran = subprocess.run([sys.executable, "-m", *command, str(CONSUMER)], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_mypy() -> None:
    check("mypy", "--strict", "--warn-unused-ignores", "--config-file=", "--follow-imports=silent")


def test_pyright() -> None:
    check("pyright", "--pythonpath", sys.executable)
