"""A short campaign; a long one is run by hand (campaign.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended


@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("more", [[], ["--on", "agents"], ["--on", "ssh"]])
def test_a_short_campaign(more: list[str]) -> None:
    """The bounds are wide: they find what hangs, on whatever machine."""
    program = Path(__file__).parent / "campaign.py"
    command = [sys.executable, program, "--seed", "11", "--steps", "8", "--slack", "10", *more]
    message = subprocess.run(command, capture_output=True, text=True, check=False)
    assert message.returncode == 0, message.stdout + message.stderr
