"""What the programs of this folder print under torchrun, on this machine.

    with launcher() as started:
        lines = prints(started, "ddp")

By torchrun's launcher in a process of its own, with ranks that are forked from it: a sixth of torchrun's time, in which
each rank imports torch anew. Nothing is saved: processors sum in different orders, whatever torch is told.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

RANKS = 2
FOLDER = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("test_programs", "torchrun"))

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

Lines = list[list[str]]
"""By rank."""


def said(lines: list[str]) -> list[str]:
    """The program's own lines, with the logger before them if there is one; not what stands left of them of a bar."""
    found = (re.search(r"([\w.]+ [A-Z]+: )?\brank \d.*", line) for line in lines)
    return [line[0] for line in found if line]


def run(program: str) -> Lines:
    """What each rank prints under torchrun itself."""
    with tempfile.TemporaryDirectory() as name:
        # An interpreter that ends normally may abort: threads of torch that free tensors then want its lock
        # (https://github.com/pytorch/pytorch/pull/179291). Ranks of %%spawn end as this does.
        script = written(program, Path(name), "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        ran = subprocess.run(
            [*torchrun, "--redirects=3", "--log-dir=logs", script],
            env={**os.environ, **ENVIRONMENT},
            cwd=name,
            capture_output=True,
            text=True,
            timeout=150,
        )
        printed = logged(Path(name))
        assert ran.returncode == 0, "\n".join([ran.stderr, *printed])
        lines = [said(text.splitlines()) for text in printed]
        assert all(lines), printed
        return lines


def run_forked(program: str) -> Lines:
    """The same by torchrun's launcher, with ranks that are forked from this process, which has imported torch."""
    with tempfile.TemporaryDirectory() as name:
        child = os.fork()  # the launcher has threads, and this process must have none
        if not child:
            os.setpgid(0, 0)
            signal.alarm(150)  # what a launcher's ranks have printed counts, whether or not it ends itself
            try:
                os.chdir(name)
                launch(written(program, Path(name)))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # ranks that hang
        printed = logged(Path(name))
        lines = [said(text.splitlines()) for text in printed]
        assert all(lines), printed
        return lines


def launch(script: Path) -> None:
    """What torch.distributed.run does with a script, but for new processes."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id="program",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs("logs", redirects=Std.ALL),
    )
    elastic_launch(config, main_of)(script)


namespaces: list[dict[str, object]] = []
"""Kept until the rank's process ends, as under torchrun: torch 2.13 may hang when a model outlives its group."""


def main_of(script: Path) -> None:
    sys.argv[:] = sys.path[:1] = [os.fspath(script)]
    namespaces.append(runpy.run_path(os.fspath(script), run_name="__main__"))


def written(program: str, folder: Path, ending: str = "") -> Path:
    """The program as a script in a folder; not under its own name: nothing else of this folder can be imported."""
    script = folder / "program.py"
    script.write_text((FOLDER / f"{program}.py").read_text() + ending)
    return script


def logged(folder: Path) -> list[str]:
    """What each rank has written, as the launcher has saved it."""
    return [
        "".join(
            path.read_text()
            for name in ("stdout", "stderr")
            for path in folder.glob(f"logs/*/attempt_0/{rank}/{name}.log")
        )
        for rank in range(RANKS)
    ]


def launcher() -> subprocess.Popen[str]:
    """A process for ``prints``."""
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def prints(started: subprocess.Popen[str], program: str) -> Lines:
    """What each rank prints by this launcher."""
    assert started.stdin is not None and started.stdout is not None
    print(program, file=started.stdin, flush=True)
    lines: Lines = json.loads(started.stdout.readline())
    return lines


def main() -> None:
    import torch._dynamo  # noqa: F401, the programs' ranks have it then

    for line in sys.stdin:
        print(json.dumps(run_forked(line.strip())), flush=True)


if __name__ == "__main__":
    main()
