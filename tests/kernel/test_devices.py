"""What the words for a number of ranks mean, which backend goes with what, what is said of devices that are not here.

No machine of ours has a GPU or a TPU: the chips on the PCI bus are files in a folder here, and NVML's count a number.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernels import Kernel
from resolving import resolved

import nbspawn
from nbspawn._engine import devices, tpu
from nbspawn._engine.launch import cores

Machine = Callable[[int], None]


@pytest.fixture
def chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Has the PCI bus of this machine have so many TPU v5e, beside a network card of Google's."""
    monkeypatch.setattr(tpu, "_PCI", tmp_path)

    def put(name: str, vendor: str, device: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")

    def machine(count: int) -> None:
        put("gvnic", "0x1ae0", "0x0042")
        put("disk", "0x8086", "0x0063")
        for number in range(count):
            put(f"tpu{number}", "0x1ae0", "0x0063")

    return machine


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Has torch be a CUDA build on a machine with so many GPUs."""

    def machine(count: int) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return machine


# ---------------------------------------------------------------- how many ranks


def test_words_on_a_machine_without_accelerators() -> None:
    assert resolved(3, None, {}) == (3, None, "")
    assert resolved("cpu", None, {}) == (cores(), None, "cpu")
    assert resolved("auto", None, {}) == (cores(), None, "")
    with pytest.raises(nbspawn.UsageError, match="no GPU.*give a number of ranks, or cpu"):
        resolved("gpu", None, {})
    with pytest.raises(nbspawn.UsageError, match="'gpus' is neither a number of ranks nor one of auto, cpu"):
        resolved("gpus", None, {})


def test_words_on_a_machine_with_gpus(gpus: Machine) -> None:
    gpus(4)
    assert resolved("gpu", None, {}) == resolved("auto", None, {}) == (4, None, "")
    assert resolved("gpu", None, {}, [0, 2]).nprocs == 2
    assert resolved("cpu", None, {}).nprocs == cores()


def test_chips_are_counted_on_the_pci_bus(chips: Machine) -> None:
    assert tpu.chips() == 0
    chips(8)
    assert tpu.chips() == 8


def test_the_functions_take_the_words_too() -> None:
    assert len(nbspawn.Session("cpu")) == cores()
    with pytest.raises(nbspawn.UsageError, match="no GPU"):
        nbspawn.spawn(print, nprocs="gpu")


# ---------------------------------------------------------------- backends


def test_the_backend_that_fits(gpus: Machine) -> None:
    assert resolved(2, "auto", {}).backend == "gloo"
    gpus(4)
    assert resolved("gpu", "auto", {}).backend == "nccl"
    assert resolved(3, "auto", {}).backend == "nccl"
    assert resolved(5, "auto", {}).backend == "gloo", "two ranks on one GPU cannot be of one group of NCCL's"
    assert resolved("cpu", "auto", {}).backend == "gloo"


def test_nccl_where_it_cannot_work(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(nbspawn.UsageError, match="built without CUDA: use -b gloo"):
        resolved(2, "nccl", {})
    gpus(2)
    with pytest.raises(nbspawn.UsageError, match="there are 4 ranks and 2 visible GPUs"):
        resolved(4, "nccl", {})


@pytest.mark.parametrize(("number", "backend"), [("gpu", "xla"), ("cpu", "tpu_dist"), ("xla", "tpu_dist")])
def test_backends_of_other_devices(number: str, backend: str) -> None:
    with pytest.raises(nbspawn.UsageError, match=f"{backend} is no backend for {number}: use -b auto"):
        resolved(number, backend, {})


# ---------------------------------------------------------------- torch_xla and torch_tpu that are not there


@pytest.mark.parametrize(
    ("package", "line", "what_to_do"),
    [
        # torch_xla ends with torch 2.9, and pip would only fail
        ("torch_xla", "xla", "torch_tpu"),
        ("torch_xla", "4 -b xla", "torch_tpu"),
        ("torch_tpu", "tpu", "`pip install torch_tpu`"),
        ("torch_tpu", "4 -b tpu_dist", "`pip install torch_tpu`"),
    ],
)
def test_what_is_not_installed(kernel: Kernel, package: str, line: str, what_to_do: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    reply = kernel.execute(f"%%spawn {line}\nrank")
    assert reply.ename == "UsageError"
    assert f"{package} is not installed in this environment" in reply.evalue and what_to_do in reply.evalue
    assert reply.traceback.count("\n") == 0, "one sentence"


def test_another_torchs_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it would end with the name of a C++ symbol."""
    monkeypatch.setattr(devices.xla, "installed", lambda: True)
    monkeypatch.setattr(devices.xla.importlib.metadata, "version", lambda name: "2.7.1")
    with pytest.raises(nbspawn.UsageError, match=r"torch_xla 2\.7\.1 does not load with torch"):
        resolved("xla", None, {})


# ---------------------------------------------------------------- torch_xla on TPUs


@pytest.fixture
def with_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.xla, "check", lambda: None)
    monkeypatch.setattr(devices.xla, "installed", lambda: True)
    monkeypatch.setattr(tpu, "installed", lambda: False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


@pytest.mark.usefixtures("with_torch_xla")
def test_one_rank_a_chip(chips: Machine) -> None:
    chips(8)
    assert resolved("auto", None, {}) == resolved("xla", None, {}) == (8, None, "xla")
    assert resolved("auto", "xla", {}) == resolved("xla", "auto", {}) == (8, "xla", "xla")
    assert resolved("xla", "xla", {"PJRT_DEVICE": "CPU"}).nprocs == 1


@pytest.mark.usefixtures("with_torch_xla")
def test_as_many_ranks_as_torch_xla_can_have(chips: Machine) -> None:
    chips(8)
    assert devices.xla.prepare(8, {}) == devices.xla.prepare(1, {}) == {"PJRT_DEVICE": "TPU"}
    with pytest.raises(nbspawn.UsageError, match="all 8 TPU chips of this machine, or on one, got 4 ranks"):
        devices.xla.prepare(4, {})
    assert devices.xla.prepare(4, {"PJRT_DEVICE": "CPU"}) == {"PJRT_DEVICE": "CPU"}


@pytest.mark.usefixtures("with_torch_xla")
def test_a_host_with_a_single_chip(chips: Machine) -> None:
    """Colab's."""
    chips(1)
    assert resolved("xla", "xla", {}).nprocs == 1
    with pytest.raises(nbspawn.UsageError, match="the one TPU chip of this machine, got 8 ranks"):
        devices.xla.prepare(8, {})


@pytest.mark.usefixtures("with_torch_xla")
def test_devices_are_gpus(chips: Machine) -> None:
    chips(8)
    with pytest.raises(nbspawn.UsageError, match="--devices selects GPUs"):
        resolved("xla", None, {}, [0, 1])
