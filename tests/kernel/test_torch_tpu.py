"""torch_tpu (TorchTPU), the real package: what can be reached without a TPU (.ci/newest-env makes the environment)."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels import WARM, ExecutedKernel, Kernel, ok
from resolving import resolved

from nbspawn._accelerators.accelerator import Unavailable
from nbspawn._accelerators.kinds import TPU

pytest.importorskip("torch_tpu")


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with ExecutedKernel(tmp_path_factory.mktemp("kernel")) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute("import torch", timeout=120))
        ok(kernel.execute(WARM))
        yield kernel


@pytest.fixture
def four_chips(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has torch_tpu find four TPU v5e: what it reads of the PCI bus is given."""
    from torch_tpu import _loader
    from torch_tpu._internal import env_utils
    from torch_tpu._internal.utils import hardware

    monkeypatch.setattr(hardware, "_scan_pci_tpus", lambda: (4, hardware._V5E_TOPOLOGY))
    monkeypatch.setattr(env_utils, "_resolved_values", {})
    before = dict(os.environ)
    _loader.load()  # as `import torch` does, and did before there were any
    yield
    os.environ.clear()
    os.environ.update(before)


# ---------------------------------------------------------------- without a TPU


@pytest.mark.parametrize("line", ["tpu", "4 -b tpu_dist", "tpu -b auto", "1 -b tpu"])
def test_no_tpu(kernel: Kernel, line: str) -> None:
    reply = kernel.execute(f"%%spawn {line}\nrank")
    assert reply.ename == "UsageError"
    assert "torch_tpu finds no TPU on this machine" in reply.evalue and "or cpu" in reply.evalue
    assert reply.traceback.count("\n") == 0, "one sentence"
    assert reply.seconds < 5, "asked for a device, torch_tpu looks for ten minutes"


def test_ranks_on_the_cpu_beside_it(kernel: Kernel) -> None:
    """torch loads torch_tpu by itself, in every rank."""
    reply = ok(
        kernel.execute(
            "%%spawn 2 -b auto\nimport torch, torch.distributed as dist\n"
            "total = torch.tensor(rank + 1)\ndist.all_reduce(total)\ntotal.item(), device.type, dist.get_backend()"
        )
    )
    assert reply.result == "[0-1] (3, 'cpu', 'gloo')"
    assert reply.text() == reply.text("stderr") == "", "what torch_tpu says when it is loaded is not a rank's output"


def test_fork_is_refused(kernel: Kernel) -> None:
    reply = kernel.execute("%%spawn 2 -m fork\nrank")
    assert reply.ename == "StartError"
    assert "torch_tpu is loaded in this kernel" in reply.evalue and "-m forkserver" in reply.evalue
    assert reply.seconds < 3, "without a trial, in which torch_tpu would look for a TPU"


# ---------------------------------------------------------------- up to the hardware


@pytest.mark.usefixtures("four_chips")
def test_backends() -> None:
    assert resolved("tpu", None, {}) == (4, None, "tpu")
    assert resolved("tpu", "auto", {}) == (4, "tpu_dist", "tpu")
    assert resolved(4, "tpu_dist", {}) == (4, "tpu_dist", "tpu")


@pytest.mark.usefixtures("four_chips")
def test_the_environment_that_the_ranks_would_have() -> None:
    for _ in range(2):
        TPU.prepare(4, {})
        assert os.environ["TORCH_TPU_TOPOLOGY"] == "2,2,1"
        addresses = os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
        assert len(set(addresses)) == 4 and all(address.startswith("localhost:") for address in addresses)
    with pytest.raises(Unavailable, match="for 4 ranks in this kernel.*restart the kernel for 1"):
        TPU.prepare(1, {})


@pytest.mark.usefixtures("four_chips")
def test_a_number_of_ranks_that_the_chips_cannot_have() -> None:
    with pytest.raises(Unavailable, match="torch_tpu cannot run 3 ranks on the 4 TPUs here: .*count: 3"):
        TPU.prepare(3, {})


@pytest.mark.usefixtures("four_chips")
def test_a_kernel_that_holds_the_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said then: test_xla.py."""
    assert not TPU.is_held({})
    monkeypatch.setattr(torch, "tpu", types.SimpleNamespace(is_initialized=lambda: True))
    assert TPU.is_held({})


def test_the_report_names_it(tmp_path: Path) -> None:
    from nbspawn.__main__ import versions

    assert dict(versions())["torch_tpu"] == "0.2.0"
