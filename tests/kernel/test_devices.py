"""What the words for a number of ranks mean, which backend goes with what, what is said of devices that are not here.

No machine of ours has a GPU or a TPU: the chips on the PCI bus are files in a folder here, and NVML's count a number.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import Kernel
from resolving import resolved

import nbspawn
from nbspawn._accelerators import accelerator, tpu, xla
from nbspawn._accelerators.accelerator import Unavailable
from nbspawn._accelerators.cuda import Cuda, Rocm
from nbspawn._accelerators.kinds import GPUS, TPU, XLA
from nbspawn._engine import devices
from nbspawn._engine.devices import resolve
from nbspawn._engine.launch import cores
from nbspawn._engine.options import LaunchOptions
from nbspawn._engine.start import start_method

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
    """Has torch be a CUDA build on a machine with so many GPUs (-1: NVML does not tell)."""

    def machine(count: int) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(Cuda, "_has_driver", lambda self: True)
        monkeypatch.setattr(Cuda, "_all", lambda self: count)
        monkeypatch.setattr(devices, "_available", lambda: ["gloo", "nccl"])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return machine


# ---------------------------------------------------------------- how many ranks


def test_words_on_a_machine_without_accelerators() -> None:
    assert resolved(3, None, {}) == (3, None, "cpu")
    assert resolved("cpu", None, {}) == resolved("auto", None, {}) == (cores(), None, "cpu")
    with pytest.raises(nbspawn.UsageError, match="no GPU.*give a number of ranks, or cpu"):
        resolved("gpu", None, {})
    with pytest.raises(nbspawn.UsageError, match="'gpus' is neither a number of ranks nor one of auto, cpu"):
        resolved("gpus", None, {})


def test_words_on_a_machine_with_gpus(gpus: Machine) -> None:
    gpus(4)
    assert resolved("gpu", None, {}) == resolved("auto", None, {}) == (4, None, "")
    assert resolved("gpu", None, {}, [0, 2]).nprocs == 2
    assert resolved(3, None, {}).nprocs == 3
    assert resolved("cpu", None, {}).nprocs == cores()


def test_chips_are_counted_on_the_pci_bus(chips: Machine) -> None:
    assert tpu.chips() == 0
    chips(8)
    assert tpu.chips() == 8


def test_the_functions_take_the_words_too() -> None:
    assert len(nbspawn.Session("cpu")) == cores()
    with pytest.raises(nbspawn.UsageError, match="no GPU"):
        nbspawn.spawn(print, nprocs="gpu")


# ---------------------------------------------------------------- GPUs that ranks may see


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("0,1", 2), ("7, 0", 2), ("0,0", 0), ("9,0", 0), ("0,9,1", 1), ("-1", 0)]
)
def test_visible_gpus(gpus: Machine, visible: str, count: int) -> None:
    gpus(8)
    assert resolved("auto", None, {"CUDA_VISIBLE_DEVICES": visible}).nprocs == (count or cores())


def test_the_runs_own_environment_counts(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert resolved("gpu", "auto", {}).nprocs == 2
    assert resolved("gpu", "auto", {"CUDA_VISIBLE_DEVICES": "1"}) == (1, "nccl", "")
    assert resolved(4, "auto", {"CUDA_VISIBLE_DEVICES": "0,1"}).backend == "gloo"


def test_selected_gpus_are_some_of_the_visible_ones(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of other users."""
    gpus(8)

    def selected(*indices: int) -> str:
        options = LaunchOptions(nprocs="gpu", devices=indices)
        assert resolve(resolve(options)) == resolve(options)
        return resolve(options).env["CUDA_VISIBLE_DEVICES"]

    assert selected(0, 7) == "0,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,12")
    assert selected(0, 1) == "4,5" and selected(1) == "5"
    with pytest.raises(nbspawn.UsageError, match="--devices 2: there are CUDA devices 0 to 1 here with CUDA_VIS.*=4, "):
        selected(1, 2)
    with pytest.raises(nbspawn.UsageError, match="--devices 1,1 names one of them twice"):
        selected(1, 1)
    gpus(0)
    with pytest.raises(nbspawn.UsageError, match="--devices 0: there is no CUDA device here"):
        selected(0)
    with pytest.raises(nbspawn.UsageError, match="--devices selects GPUs, and these ranks have none"):
        resolved("cpu", None, {}, [0])


@pytest.mark.parametrize("visible", ["MIG-8d7e0b6a", "GPU-00000002"])
def test_where_only_another_process_can_tell(gpus: Machine, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    asked = []
    monkeypatch.setattr(accelerator, "counted", lambda *question: asked.append(question) or 3)
    gpus(8)
    assert resolved("gpu", "auto", {"CUDA_VISIBLE_DEVICES": visible}) == (3, "nccl", "")
    gpus(-1)
    assert resolved("gpu", None, {}).nprocs == 3
    assert [dict(names) for _, names in asked] == [{"CUDA_VISIBLE_DEVICES": one} for one in (visible, None)]
    assert resolved(4, None, {}) == (4, None, "") and len(asked) == 2, "nobody has asked for a count"


# ---------------------------------------------------------------- accelerators of others


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch be a ROCm build on a machine with four GPUs."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(Rocm, "_has_driver", lambda self: True)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_amdsmi", lambda: 4)
    monkeypatch.setattr(devices, "_available", lambda: ["gloo", "nccl"])


@pytest.mark.usefixtures("amd")
def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved("gpu", "auto", {}) == resolved("auto", "nccl", {}) == (4, "nccl", "")
    assert resolved("gpu", None, {"HIP_VISIBLE_DEVICES": "1,2"}).nprocs == 2
    assert resolve(LaunchOptions(nprocs="gpu", devices=[3])).env == {"HIP_VISIBLE_DEVICES": "3"}
    env = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert resolve(LaunchOptions(nprocs="gpu", devices=[1], env=env)).env == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setattr(accelerator, "counted", lambda counting, names: 1)
    assert resolved("gpu", None, {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0"}).nprocs == 1


def test_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    monkeypatch.setattr(accelerator, "counted", lambda counting, names: 2 if counting.startswith("torch.xpu") else 0)
    monkeypatch.setattr(devices, "_available", lambda: ["gloo", "xccl"])
    assert resolved("gpu", "auto", {}) == (2, "xccl", "")
    assert resolve(LaunchOptions(nprocs="gpu", devices=[1])).env == {"ZE_AFFINITY_MASK": "1"}


def test_whose_runtime_is_not_to_be_trusted_in_a_forked_process() -> None:
    """AMD's and Intel's: not even from the fork server."""
    packed: Any = object()
    for one in GPUS:
        if not one.only_spawn:
            continue
        how = start_method.choose("auto", lambda: packed, {}, "cell", one)
        assert (how.method, how.why, how.news) == ("spawn", one.only_spawn, True)


def test_an_accelerator_that_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert resolved(2, "auto", {}) == (2, "gloo", "cpu")
    with pytest.raises(nbspawn.UsageError, match="torch has mps devices here, which nbspawn does not serve"):
        resolved("gpu", None, {})


# ---------------------------------------------------------------- backends


def test_the_backend_that_fits(gpus: Machine) -> None:
    assert resolved(2, "auto", {}).backend == "gloo"
    gpus(4)
    assert resolved("gpu", "auto", {}).backend == "nccl"
    assert resolved(3, "auto", {}).backend == "nccl"
    assert resolved(5, "auto", {}).backend == "gloo", "two ranks on one GPU cannot be of one group of NCCL's"
    assert resolved("cpu", "auto", {}).backend == "gloo"


def test_the_backend_on_other_machines(gpus: Machine) -> None:
    """They choose it."""
    gpus(4)
    assert resolve(LaunchOptions(nprocs=2, backend="AUTO", on="ray")).backend == "auto"


def test_nccl_where_it_cannot_work(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(nbspawn.UsageError, match="built without CUDA: use -b gloo"):
        resolved(2, "nccl", {})
    gpus(2)
    with pytest.raises(nbspawn.UsageError, match="there are 4 ranks and 2 visible GPUs"):
        resolved(4, "nccl", {})
    gpus(0)
    with pytest.raises(nbspawn.UsageError, match="nccl needs GPUs, and torch finds none on this machine"):
        resolved(2, "cpu:gloo,cuda:nccl", {})


@pytest.mark.parametrize(
    ("number", "backend"), [("gpu", "xla"), ("cpu", "tpu_dist"), ("xla", "tpu_dist"), ("cpu", "nccl")]
)
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
    monkeypatch.setattr(XLA, "is_built", lambda: True)
    monkeypatch.setattr(xla.importlib.metadata, "version", lambda name: "2.7.1")
    with pytest.raises(nbspawn.UsageError, match=r"torch_xla 2\.7\.1 does not load with torch"):
        resolved("xla", None, {})


# ---------------------------------------------------------------- torch_xla on TPUs


@pytest.fixture
def with_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XLA, "_check", lambda: None)
    monkeypatch.setattr(XLA, "is_built", lambda: True)
    monkeypatch.setattr(TPU, "is_built", lambda: False)
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
    assert XLA.prepare(8, {}) == XLA.prepare(1, {}) == {"PJRT_DEVICE": "TPU"}
    with pytest.raises(Unavailable, match="all 8 TPU chips of this machine, or on one, got 4 ranks"):
        XLA.prepare(4, {})
    assert XLA.prepare(4, {"PJRT_DEVICE": "CPU"}) == {"PJRT_DEVICE": "CPU"}


@pytest.mark.usefixtures("with_torch_xla")
def test_a_host_with_a_single_chip(chips: Machine) -> None:
    """Colab's."""
    chips(1)
    assert resolved("xla", "xla", {}).nprocs == 1
    with pytest.raises(Unavailable, match="the one TPU chip of this machine, got 8 ranks"):
        XLA.prepare(8, {})


@pytest.mark.usefixtures("with_torch_xla")
def test_devices_are_gpus(chips: Machine) -> None:
    chips(8)
    with pytest.raises(nbspawn.UsageError, match="--devices selects GPUs"):
        resolved("xla", None, {}, [0, 1])
