"""Where a rank stands: on a signal it writes its main thread's stack to a file, even from inside C code."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

# A real-time signal collides with no program's own use of SIGUSR1 or SIGUSR2. macOS has none.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def answer(path: Path) -> None:
    """Write the stack to ``path`` at each ``SIGNAL``; faulthandler needs neither the GIL nor the bytecode loop."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=fd, all_threads=False)


def report_crashes(path: Path) -> None:
    """On a segfault or an abort, write the Python stack to ``path``, unless the person's environment says no."""
    if os.environ.get("PYTHONFAULTHANDLER", "1") != "0":
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.enable(file=fd, all_threads=False)
