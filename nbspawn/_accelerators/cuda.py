"""NVIDIA's GPUs (CUDA) and AMD's (ROCm), which torch uses by the same names, and how they are counted."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nbspawn._accelerators.accelerator import Accelerator, Load

_INDICES = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*")


class Cuda(Accelerator):
    """NVIDIA's."""

    type, title = "cuda", "CUDA"
    backends = ("nccl",)
    counting = "torch._C._cuda_getDeviceCount()"  # torch.cuda.device_count() believes NVML
    visible: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)

    def is_built(self) -> bool:
        import torch

        return torch.version.cuda is not None

    def count(self, env: Mapping[str, str]) -> int:
        """The number of GPUs, by NVML, in microseconds. ``torch.cuda.device_count()`` can initialise CUDA in the
        kernel, and then no forked rank could use it: where NVML does not know, it is asked in another process."""
        if not self.is_built() or not self._has_driver():
            return 0
        lists = [env[name] for name in self.visible if name in env]
        if lists == [""]:
            return 0
        if not lists or (len(lists) == 1 and _INDICES.fullmatch(lists[0])):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, where NVML does not start
                there = self._all()
            if there >= 0:
                return _seen(lists[0].split(","), there) if lists else there
        return super().count(env)

    def _has_driver(self) -> bool:
        """Is there CUDA's driver? Without it no process would find a GPU. To load it initialises nothing."""
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
        return True

    def _all(self) -> int:
        """How many there are; -1 if that is not known. A GPU that is partitioned (MIG) is not what CUDA counts."""
        import torch

        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            found = int(torch.cuda._raw_device_count_nvml())
        except OSError:
            return -1
        return -1 if any(_is_partitioned(nvml, index) for index in range(found)) else found

    def load(self, index: int) -> Load:
        found = Load(index)
        try:
            import pynvml  # nvidia-ml-py
        except ImportError:
            return found
        with suppress(pynvml.NVMLError, AttributeError):  # torch tells the UUID from 2.4 on
            handle = _handle(str(self.module.get_device_properties(index).uuid))
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found = found._replace(used=memory.used, total=memory.total)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    found = found._replace(own=process.usedGpuMemory)
            # Last, because a part of a GPU (MIG) has none.
            found = found._replace(busy=pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return found

    def synchronize(self) -> None:
        torch: Any = sys.modules["torch"]
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):  # to wait for another would make one
                torch.cuda.synchronize(index)


@functools.cache
def _handle(uuid: str) -> Any:
    """NVML's, by what is the same to CUDA: both may number the GPUs in another order."""
    import pynvml

    pynvml.nvmlInit()
    for kind in ("GPU", "MIG"):
        with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            return pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}".encode())
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def _is_partitioned(nvml: ctypes.CDLL, index: int) -> bool:
    handle, now, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    return (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        and nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(pending)) == 0
        and now.value == 1
    )


def _seen(indices: list[str], there: int) -> int:
    """The indices that CUDA takes from this list, of so many GPUs: up to the first that is not there, and none if one
    is listed twice."""
    seen: list[int] = []
    for index in map(int, indices):
        if not 0 <= index < there:
            break
        if index in seen:
            return 0
        seen.append(index)
    return len(seen)


class Rocm(Cuda):
    """AMD's."""

    title = "ROCm"
    visible = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    # https://github.com/meta-pytorch/torchrec/pull/2427; accelerate's notebook_launcher does the same.
    only_spawn = "allocations on AMD's GPUs are known to fail in processes of a fork server"

    def is_built(self) -> bool:
        import torch

        return torch.version.hip is not None

    def _has_driver(self) -> bool:
        return os.path.exists("/dev/kfd")

    def _all(self) -> int:
        import torch

        return int(torch.cuda._raw_device_count_amdsmi())

    def load(self, index: int) -> Load:
        """The load of a GPU of AMD's, by the package amdsmi, which torch asks."""
        try:
            busy, used = self.module.utilization(index), self.module.device_memory_used(index)
        except Exception:  # it is not installed, or as different from version to version as its errors
            return Load(index)
        return Load(index, busy, used, self.module.get_device_properties(index).total_memory)
