"""How a command ended, as the event that says so: a value, an exception, an exit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from types import TracebackType

from nbspawn import payload
from nbspawn.messages import Leaving, Raised, Returned
from nbspawn.rank import stdio

Outcome = Returned | Raised | Leaving


def returned(rank: int, value: object) -> Returned:
    """The value travels packed; one that cannot is replaced by its text (payload.Value)."""
    return Returned(rank, time.monotonic(), payload.Value.of(value), stdio.log_offset())


def failed(
    rank: int,
    error: BaseException,
    rendered: tuple[str, ...] = (),
    cell: str | None = None,
    skip: str | None = None,
    moment: float | None = None,
    variables: Sequence[str] = (),
) -> Raised | Leaving | Returned:
    """What ``error`` means: ``sys.exit(0)`` is an end in good order, other exits leave, the rest is raised.

    ``cell`` is the file name of the running cell; ``skip`` that of the code whose frames, outermost in the traceback,
    are not the person's; ``moment`` is when it was raised, if that is not now; ``variables`` are lines for below the
    traceback.
    """
    moment = time.monotonic() if moment is None else moment
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF  # what the operating system keeps: sys.exit(-1) is exit code 255
            return Leaving(rank, moment, code, "", stdio.log_offset()) if code else returned(rank, None)
        return Leaving(rank, moment, 1, str(error.code), stdio.log_offset())
    frames = _without(error.__traceback__, skip)
    text = "".join(traceback.format_exception(type(error), error, frames))
    text += "".join(f"{line}\n" for line in variables)
    rendered = rendered and (*rendered, *variables)
    line = _innermost_line(frames, cell) if cell is not None else None
    return Raised(rank, moment, type(error).__name__, _message(error), text, rendered, line, stdio.log_offset())


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a person's __str__ may raise; the error that it belongs to must still be told
        return f"<its __str__ raised {type(broken).__name__}>"


def _without(frames: TracebackType | None, skip: str | None) -> TracebackType | None:
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == skip:
        frames = frames.tb_next
    return frames


def _innermost_line(frames: TracebackType | None, filename: str) -> int | None:
    line = None
    for frame, number in traceback.walk_tb(frames):
        if frame.f_code.co_filename == filename:
            line = number
    return line
