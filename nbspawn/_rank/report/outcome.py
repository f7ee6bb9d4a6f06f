"""How a command ended, as an event: a value, an exception, an exit."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from nbspawn._payload import packing
from nbspawn._protocol.frames import PACKAGE
from nbspawn._protocol.messages import Leaving, Raised, Returned
from nbspawn._rank.group.lost_peer import has_lost_peer
from nbspawn._rank.program import stdio
from nbspawn._rank.report import recorder

Outcome = Returned | Raised | Leaving


# What a user's class cannot override.
_name_of = type.__dict__["__name__"].__get__
_frames_of = BaseException.__dict__["__traceback__"].__get__

_LOADING = PACKAGE, f"{os.sep}cloudpickle{os.sep}"
"""Parts of the paths of what loads variables."""
_NAME = 200  # characters of the name of its class
_MESSAGE = 2000  # characters of an exception's own text
_PART = 10_000  # characters of one part of a traceback: a frame, or the message
_WHOLE = 60_000  # characters of a traceback


def returned(rank: int, value: object) -> Returned | Raised:
    """The event for a value, which is sent packed, or as text if it cannot be. If the rank's output is not completely
    in its log, the rank has failed."""
    packed = packing.Value.of(value).result
    if (lost := stdio.flush()) is not None:
        text = f"the last output of this rank could not be written to its log: {lost.strerror}. "
        text += "Free some space, or give --log-dir (log_dir) a directory that has some."
        return Raised(rank, time.monotonic(), "OSError", text, f"OSError: {text}\n", (), None, stdio.log_offset())
    return Returned(rank, time.monotonic(), packed, stdio.log_offset())


def failed(
    rank: int,
    error: BaseException,
    rendered: tuple[str, ...] = (),
    cell: str | None = None,
    skip: str | None = None,
    moment: float | None = None,
    variables: Sequence[str] = (),
) -> Raised | Leaving | Returned:
    """The event for ``error``: ``sys.exit(0)`` is a success, another exit is ``Leaving``, anything else ``Raised``.

    ``cell`` is the file name of the running cell; ``skip`` that of code whose frames, outermost in the traceback, are
    not the user's, or of its folder; ``moment`` is when it was raised, if that is not now; ``variables`` are lines to
    add below the traceback.
    """
    moment = time.monotonic() if moment is None else moment
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF  # what the operating system keeps: sys.exit(-1) is exit code 255
            if code == 0:
                return returned(rank, None)
            return Leaving(rank, moment, code, "", stdio.log_offset(), _innermost_line(_frames_of(error), cell))
        return Leaving(rank, moment, 1, _text(error.code), stdio.log_offset(), _innermost_line(_frames_of(error), cell))
    if isinstance(error, packing.UnloadableError):
        return _unloaded(rank, error, moment)
    name, frames = _cut(str.__str__(_name_of(type(error))), _NAME), _without(_frames_of(error), skip)
    try:
        lines = traceback.format_exception(type(error), error, frames)
    except Exception:  # a user's class may raise at any attribute; the error must still be reported
        lines = [*traceback.format_tb(frames), f"{name}: {_text(error)}\n"]
    lines = _bounded([*lines, *(f"{line}\n" for line in variables)])
    rendered = rendered and tuple(_bounded([*rendered, *variables]))
    line = _innermost_line(frames, cell)
    lost, recorded = False, None
    with suppress(Exception):
        lost, recorded = has_lost_peer(error), recorder.if_raised_in_collective(error)
    return Raised(rank, moment, name, _text(error), "".join(lines), rendered, line, stdio.log_offset(), lost, recorded)


def _unloaded(rank: int, error: packing.UnloadableError, moment: float) -> Raised:
    """The error of loading, with the frames of the user's own code, if that has raised it."""
    cause, frames = error.error, _frames_of(error.error)
    while frames is not None and any(part in frames.tb_frame.f_code.co_filename for part in _LOADING):
        frames = frames.tb_next
    lines = [] if frames is None else traceback.format_exception(type(cause), cause, frames)
    text = "".join(_bounded([*lines, f"PayloadError: {error}\n"]))
    offset = stdio.log_offset()
    return Raised(rank, moment, "PayloadError", _text(error), text, (), None, offset, culprit=error.variable)


def _text(value: object) -> str:
    """Plain text, of bounded length."""
    try:
        return _cut(str.__str__(str(value)), _MESSAGE)  # not a subclass, which the kernel would have to load
    except Exception as broken:  # a user's __str__ may raise; the error must still be reported
        return f"<its __str__ raised {type(broken).__name__}>"


def _bounded(parts: Sequence[str]) -> list[str]:
    """Shorten a traceback for a notebook: an exception's message may contain megabytes of data."""
    kept = [_cut(part, _PART) for part in parts]
    while sum(map(len, kept)) > _WHOLE:
        del kept[len(kept) // 2]
    if len(kept) < len(parts):
        kept.insert(len(kept) // 2, f"... {len(parts) - len(kept)} frames are left out ...\n")
    return kept


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... {len(text) - 2 * half:,} characters are left out ... {text[-half:]}"


def _without(frames: TracebackType | None, skip: str | None) -> TracebackType | None:
    while skip and frames is not None and frames.tb_next is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(skip):
            break
        frames = frames.tb_next
    return frames


def _innermost_line(frames: TracebackType | None, filename: str | None) -> int | None:
    line = None
    for frame, number in traceback.walk_tb(frames):
        if frame.f_code.co_filename == filename:
            line = number
    return line
