"""What hosted notebooks (Colab, Kaggle) change in a kernel that would break a rank forked from it: a function each."""

from __future__ import annotations

import os
from typing import Any


def native_commands() -> None:
    """Colab's ``!cmd`` and ``x = !cmd`` poll the kernel's stdin socket, which hangs in any other process. By this
    variable it leaves them to IPython (google/colab/_shell.py)."""
    os.environ["USE_NATIVE_IPYTHON_SYSTEM_COMMANDS"] = "1"


def plain_errors(shell: Any) -> None:
    """Colab shows an ImportError by a handler of its own, whose traceback is an object with a button, no list of lines
    (google/colab/_shell_customizations.py). A rank's error is sent as lines; the same goes for any handler that
    somebody has set with ``set_custom_exc``."""
    shell.custom_exceptions = ()


def silent_widgets(comms: Any) -> None:
    """Widgets that are made in a rank have nobody to talk to: their comms would use the kernel's sockets, and look in
    the front end for targets that know nothing of the rank."""
    comms.create_comm = comms.DummyComm
