"""Build the fake GPU into an environment that has torch's CUDA build, with stand-ins (cuda_stand_ins.py) or without.

    python .ci/fake_gpu/build.py SITE_PACKAGES

CUDA's runtime and driver, NCCL and NVML go where torch's libraries look for theirs; torch itself loads the rest, by an
entry point (fake_gpu.py). Takes half a minute. Needs gcc and g++.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from cuda_stand_ins import all_wanted, stand_in  # noqa: E402

NOT_SUPPORTED = 801  # cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED
INVALID_USAGE = 5  # ncclInvalidUsage


def main() -> None:
    site_packages = Path(sys.argv[1])
    torch = site_packages / "torch"
    libraries = torch / "lib"
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    runtime = [f"-L{libraries}", "-l:libcudart.so.13", "-Wl,-rpath,$ORIGIN"]
    _, symbols_of = all_wanted(libraries)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(source: str, *options: str) -> Path:
            target = Path(folder, source).with_suffix(".o")
            compiler = ["g++", "-std=c++20"] if source.endswith(".cpp") else ["gcc", "-std=gnu11"]
            subprocess.run([*compiler, "-O1", "-fPIC", *options, "-c", HERE / source, "-o", target], check=True)
            return target

        def build(name: str, answer: int, source: str, *link: str) -> None:
            stand_in(libraries / name, symbols_of(name), answer, [compiled(source)], link)

        build("libcudart.so.13", NOT_SUPPORTED, "device.c", "-lpthread", "-ldl")
        build("libcuda.so.1", NOT_SUPPORTED, "driver.c", *runtime)
        build("libnccl.so.2", INVALID_USAGE, "nccl.cpp", *runtime, "-lstdc++")
        stand_in(libraries / "libnvidia-ml.so.1", {}, objects=[compiled("nvml.c")])
        torchs = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-lstdc++", *runtime]
        stand_in(libraries / "libfake_gpu.so", {}, objects=[compiled("kernels.cpp", *include)], link=torchs)

    shutil.copy(HERE / "fake_gpu.py", site_packages)
    metadata = site_packages / "fake_gpu-1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-gpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nfake_gpu = fake_gpu:load\n")


if __name__ == "__main__":
    main()
