"""Loads the fake GPU into each process that imports torch: torch calls ``load`` at the end of its import, by the entry
point ``torch.backends`` (build.py). Nothing of it initialises CUDA."""

import ctypes
from pathlib import Path


def load() -> None:
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):  # torch opens them by their names: there they are
        ctypes.CDLL(str(libraries / name))
    ctypes.CDLL(str(libraries / "libfake_gpu.so"))
    # Kernels for which the CPU has no counterpart are not chosen.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
