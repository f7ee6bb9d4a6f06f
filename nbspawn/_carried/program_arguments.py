"""The notebook's ``sys.argv``: read in the kernel, without what that was started with, and put into force in ranks."""

from __future__ import annotations

import sys

_put: tuple[str, ...] | None = None


def read() -> tuple[str, ...]:
    """In the kernel: the notebook's ``sys.argv``. At the kernel's own arguments (its connection file), ``argparse`` in
    a cell would end the rank."""
    config = sys.modules.get("traitlets.config")
    own = list(config.Application.instance().argv) if config and config.Application.initialized() else []
    program, *arguments = map(str, getattr(sys, "argv", None) or [""])
    return program, *(arguments[len(own) :] if arguments[: len(own)] == own else arguments)


def put(argv: tuple[str, ...]) -> None:
    """In the rank, for each command: set ``sys.argv``, unless the notebook's is as it was, and so the rank's is its
    own."""
    global _put
    if argv != _put:
        sys.argv, _put = list(argv), argv
