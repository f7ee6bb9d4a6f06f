"""Does an error say that a collective's other side has gone? Then it may be only the echo of that rank's end."""

from __future__ import annotations

import os
import traceback

from nbspawn._process.imports import is_library

_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",  # NCCL
    "Timed out waiting",
)
_NETWORK_ERROR = "DistNetworkError"  # torch's stores
_OWN_PORT = "failed to listen"  # in such an error that has no other side
_NATIVE = ("gloo", "NCCL", "TCPStore")
"""What is in the text of an error that C++ code of torch.distributed has raised without a Python frame of its own, as
``wait()`` of an asynchronous collective does."""
_DISTRIBUTED = os.path.join("torch", "distributed", ""), os.path.join("torch", "nn", "parallel", "distributed.py")


def raised_in_collective(error: BaseException) -> bool:
    """Does it come from torch.distributed, not from the user's own code that this has called?"""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in file for part in _DISTRIBUTED) or name == "backward":  # DistributedDataParallel's has no frame
            return True
        if not is_library(file):
            return False
    return False


def has_lost_peer(error: BaseException) -> bool:
    """Is it, or has it been caused by, an error of a collective that has lost the connection to another rank?"""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if _says_so(found):
            return True
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def _says_so(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):  # as all of torch.distributed's are
        return False
    text = str(error)
    of_store = type(error).__name__ == _NETWORK_ERROR and _OWN_PORT not in text
    if not of_store and not any(sign in text for sign in _SIGNS):
        return False
    return raised_in_collective(error) or any(word in text for word in _NATIVE)
