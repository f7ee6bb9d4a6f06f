"""The system's limit on open files: without room half-way through a start, the kernel could not open anything."""

from __future__ import annotations

import os
import resource

from nbspawn.errors import StartError


def check_descriptors(count: int, kind: str, needed: int) -> None:
    """Raises StartError if this process may not open ``needed`` more files for so many 'ranks' or 'nodes'."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        needed += len(os.listdir("/dev/fd"))
    except OSError as refusal:
        raise StartError(
            f"this process cannot open one more file ({refusal.strerror}), and {count} {kind} need {needed}: close "
            "some, or raise the limit (ulimit -n) and start the kernel again"
        ) from None
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise StartError(
            f"{count} {kind} need {needed} open files in this process, and the system allows {limit}: "
            f"choose fewer {kind}, or raise the limit (ulimit -n) and start the kernel again"
        )
