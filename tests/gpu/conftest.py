"""What nbspawn does with several GPUs, on the fake ones of .ci/fake_gpu: `.ci/fake-gpu-env`.

Elsewhere there is nothing to collect here: nothing is imported, and no rank starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("fake_gpu") is None:
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session", autouse=True)
def machine(temp: str) -> Iterator[Path]:
    """Two GPUs for these tests alone."""
    folder = Path(temp, "fake-gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_GPU", str(folder))
        patch.setenv("FAKE_GPUS", "2")
        yield folder
