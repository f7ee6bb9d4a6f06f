"""What a test that has failed leaves in its report, so that its cause can be found though it never fails again."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from kernels import Kernel
from pytest import Function

_LINES = 60  # of each, the last


def of(test: Function, began: float) -> str:
    """The machine, what descends from this process, its kernels' terminals and cells, and what ranks have written since
    the test began."""
    return "\n".join([*_machine(), *_processes(), *_kernels(test), *_logs(began)])


def _machine() -> Iterator[str]:
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(tempfile.gettempdir())
    yield f"load {os.getloadavg()}, {memory.available >> 20} MB of memory and {disk.free >> 20} MB of disk are free"


def _processes() -> Iterator[str]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command, used = " ".join(process.cmdline())[:120] or process.name(), sum(process.cpu_times()[:2])
            yield f"{process.pid} (of {process.ppid()}) {process.status()} {used:.1f} s: {command}"


def _kernels(test: Function) -> Iterator[str]:
    for kernel in {value for value in test.funcargs.values() if isinstance(value, Kernel)}:
        with contextlib.suppress(OSError):  # the last test's teardown has removed it
            yield from _last("the kernel's terminal", kernel.terminal)
        if kernel.last is not None:
            yield from _last("the kernel's last cell", str(kernel.last.reply))


def _logs(began: float) -> Iterator[str]:
    """Of runs that have failed, or still run."""
    for path in glob.glob(f"{tempfile.gettempdir()}/nbspawn-*/run-*/*-[0-9]*"):
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            if os.path.getmtime(path) >= began:
                yield from _last(path, Path(path).read_text(errors="replace"))


def _last(name: str, text: str) -> list[str]:
    lines = text.splitlines()
    return [f"---- {name}", *lines[-_LINES:]] if lines else []
