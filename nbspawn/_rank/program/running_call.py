"""Which call a frame is in, by its source. Nothing is evaluated, and no local variable is read: to ask for those makes
a copy, which would keep the frame's tensors alive."""

from __future__ import annotations

import ast
import itertools
import linecache
from types import FrameType

UNKNOWN = object()


def running(frame: FrameType) -> str:
    """The call in which the frame is, without what it calls with, as 'work.wait(' (another call on the line may be one
    of its arguments); its line where Python does not tell: before 3.11."""
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno or 0)
    if not hasattr(code, "co_positions"):
        return line
    first, last, start, end = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if first is None or first != last:
        return line
    text = line.encode()[start:end].decode(errors="replace")
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return line
    return f"{ast.unparse(call.func)}(" if isinstance(call, ast.Call) else text


def value_of(frame: FrameType, dotted: str) -> object:
    """What a name such as 'self.work' is in this frame; UNKNOWN of a local variable, and of what is computed."""
    first, *others = dotted.split(".")
    code = frame.f_code
    if first in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return UNKNOWN
    value = frame.f_globals.get(first, UNKNOWN)
    for name in others:
        value = getattr(value, "__dict__", {}).get(name, UNKNOWN)
    return value
