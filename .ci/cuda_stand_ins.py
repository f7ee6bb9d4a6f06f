"""Make torch's ordinary Linux wheel import without the 2.5 GB of CUDA libraries that it is linked against.

    python .ci/cuda_stand_ins.py SITE_PACKAGES

torch_xla needs a torch of its own minor version, and PyPI has those built for CUDA only. For each CUDA library that is
not there a stand-in is compiled into ``torch/lib``: it has the symbols that torch's libraries want, under the versions
that they want, and every function says that there is no device. Takes 20 s, most of it readelf's. Needs gcc.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE
CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvToolsExt|nvJitLink)")
FUNCTION = re.compile(
    r"(cu|cuda|cublas|cudnn|cufft|curand|cusparse|cusolver|cufile|cupti|nccl|nvrtc|nvshmem|nvJitLink)[A-Z_]\w*|nvshmem\w+|cuFile\w+"
)


UNVERSIONED = {"libnccl": re.compile("nccl"), "libcuda": re.compile("cu(?!File)[A-Z]")}


def may_define(library: str, symbol: str) -> bool:
    """Is a symbol without a version in this library? Those of UNVERSIONED are in one only; any other is in each library
    that has no versions: torch's libraries name some of them."""
    owners = [name for name, symbols in UNVERSIONED.items() if symbols.match(symbol)]
    return library.partition(".")[0] in owners if owners else True


def wanted(library: Path) -> tuple[set[str], dict[str, set[str]], dict[str, set[str]], set[str]]:
    """What one library asks for: other libraries, the versions of each, the symbols of each version, those of none."""
    told = subprocess.run(["readelf", "-dVW", "--dyn-syms", library], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", told))
    versions = defaultdict(set)
    symbols = defaultdict(set)
    unversioned = set()
    file = ""
    for line in told.splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif found := re.search(r"Name: (\S+)\s+Flags", line):
            versions[file].add(found[1])
        elif found := re.search(r" UND (\w+)(?:@([^\s@]+))?", line):
            if found[2]:
                symbols[found[2]].add(found[1])
            elif FUNCTION.fullmatch(found[1]):
                unversioned.add(found[1])
    return libraries, versions, symbols, unversioned


def all_wanted(folder: Path) -> tuple[set[str], Callable[[str], dict[str, set[str]]]]:
    """What the libraries of a folder ask for: other libraries, and for each its symbols by version, '' for none."""
    libraries, versions = set(), defaultdict(set)
    symbols, unversioned = defaultdict(set), set()
    for library in sorted(folder.glob("*.so*")):
        its_libraries, its_versions, its_symbols, its_unversioned = wanted(library)
        libraries |= its_libraries
        unversioned |= its_unversioned
        for name, found in its_versions.items():
            versions[name] |= found
        for version, found in its_symbols.items():
            symbols[version] |= found

    def symbols_of(name: str) -> dict[str, set[str]]:
        own = {version: symbols[version] for version in versions[name]}
        return own or {"": {symbol for symbol in unversioned if may_define(name, symbol)}}

    return libraries, symbols_of


def stand_in(
    path: Path,
    versions: dict[str, set[str]],
    answer: int = NO_DEVICE,
    objects: Sequence[Path] = (),
    link: Sequence[str] = (),
) -> None:
    """Compile one. The symbols of the version '' are under none. What ``objects`` define is theirs."""
    own = set()
    for compiled in objects:
        told = subprocess.run(["nm", "-g", compiled], capture_output=True, text=True, check=True).stdout
        own |= set(re.findall(r" [A-TV-Z] (\w+)", told))
    names = sorted(set().union(*versions.values()) - own)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "source.c"), Path(folder, "versions")
        source.write_text("".join(f"int {name}(void) {{ return {answer}; }}\n" for name in names) or "int nothing;\n")
        named = {version: symbols for version, symbols in versions.items() if version}
        script.write_text(
            "".join(
                f"{version} {{ global: {' '.join(f'{name};' for name in symbols)} }};\n"
                for version, symbols in named.items()
            )
        )
        versioned = [f"-Wl,--version-script={script}"] if named else []
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", *versioned]
        path.unlink(missing_ok=True)  # who has it open goes on with it
        subprocess.run([*command, "-o", path, source, *objects, *link], check=True)


def main() -> None:
    folder = Path(sys.argv[1], "torch", "lib")
    libraries, symbols_of = all_wanted(folder)
    missing = sorted(name for name in libraries if CUDA.match(name) and not (folder / name).exists())
    for name in missing:
        stand_in(folder / name, symbols_of(name))
    print(f"made {len(missing)} stand-ins: {', '.join(missing)}")


if __name__ == "__main__":
    main()
