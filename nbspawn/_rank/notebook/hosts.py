"""Undoes changes that hosted notebooks (Colab, Kaggle) make in a kernel, and that would break a forked rank."""

from __future__ import annotations

from typing import Any


def plain_errors(shell: Any) -> None:
    """Remove handlers that were set with ``set_custom_exc``. Colab shows an ImportError by such a handler, whose
    traceback is an object with a button, not a list of lines (google/colab/_shell_customizations.py). A rank's error is
    sent as lines."""
    shell.custom_exceptions = ()
