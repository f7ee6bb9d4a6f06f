"""The frames of native code in a rank's stack, where py-spy is installed: those of torch, libraries, the system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbspawn._protocol.frames import Frame, Stack, users_frames

_MOST = 12  # processes of py-spy at a time
_TIMEOUT = 10.0  # seconds; the first dump of a process reads torch's symbols, which takes up to 1 s

# The interpreter's own calls from one Python function to the next, and what binds C++ to Python, are of no use.
_NOISE_IN = ("libpython", "python")
_NOISE = ("0x", "pybind11::")


def added(found: Mapping[int, Stack], pids: Mapping[int, int]) -> dict[int, Stack]:
    """The stacks with what py-spy sees in one rank of those that stand at the same place. Without, where there is no
    py-spy, where the system lets nobody read other processes, and where a rank has moved on meanwhile."""
    program = _py_spy()
    alike: dict[tuple[Frame, ...], list[int]] = {}
    for rank, stack in found.items():
        alike.setdefault(stack.frames, []).append(rank)
    if program is None:
        return dict(found)
    groups = [frames for frames in alike if frames][:_MOST]
    dumps = {frames: _start(program, pids[alike[frames][0]]) for frames in groups}
    filled = dict(found)
    for frames, dump in dumps.items():
        seen = _read(dump)
        if [frame[:2] for frame in seen if frame.line] == [frame[:2] for frame in frames]:
            filled.update({rank: replace(found[rank], frames=seen) for rank in alike[frames]})
    return filled


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return os.fspath(beside) if beside.exists() else shutil.which("py-spy")


def _start(program: str, pid: int) -> subprocess.Popen[bytes]:
    command = [program, "dump", "--native", "--json", "--pid", str(pid)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _read(dump: subprocess.Popen[bytes]) -> tuple[Frame, ...]:
    """The main thread's stack, outermost first. A native frame has line 0, and its library for a file."""
    try:
        answer, _ = dump.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        dump.kill()
        dump.communicate()
        return ()
    if dump.returncode:
        return ()
    try:
        return users_frames(_frames(answer))
    except (ValueError, LookupError, TypeError, AttributeError):  # of a version that writes something else
        return ()


def _frames(answer: bytes) -> list[Frame]:
    main: dict[str, Any] = next((one for one in json.loads(answer) if one["os_thread_id"] == one["pid"]), {})
    found = []
    for frame in main.get("frames", ()):
        library = os.path.basename(frame["module"] or "")
        if not library:
            found.append(Frame(frame["filename"], frame["line"], frame["name"].rpartition(".")[2]))
        elif not (library.startswith(_NOISE_IN) or frame["name"].startswith(_NOISE)):
            found.append(Frame(library, 0, frame["name"]))
    return found
