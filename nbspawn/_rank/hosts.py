"""What hosted notebooks (Colab, Kaggle) change in a kernel that would break a rank forked from it: a function each."""

from __future__ import annotations

from typing import Any


def plain_errors(shell: Any) -> None:
    """Colab shows an ImportError by a handler of its own, whose traceback is an object with a button, no list of lines
    (google/colab/_shell_customizations.py). A rank's error is sent as lines; the same goes for any handler that
    somebody has set with ``set_custom_exc``."""
    shell.custom_exceptions = ()
