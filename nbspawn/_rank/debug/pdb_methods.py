"""pdb's methods as they are in a rank, for all debuggers that are made of pdb's classes: IPython's, ipdb's, a user's.

They read with ``input()``, which asks the kernel (_rank/debug/prompts.py). What is different:

- the kernel is informed when a debugger has stopped the rank, and when the rank goes on;
- an interrupt ends the session: pdb and IPython swallow it, and the rank would stay at its prompt;
- SIGINT stays nbspawn's: pdb takes it over at ``continue``;
- the frames above the user's code (under fork those of the kernel, too) are neither shown nor stepped through.
"""

from __future__ import annotations

import bdb
import code
import ctypes
import functools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from nbspawn._protocol.frames import Frame
from nbspawn._protocol.messages import Resumed, Stopped
from nbspawn._rank.compare import compared
from nbspawn._rank.debug.user_frames import UserFrames, is_rank_code
from nbspawn._rank.program import stdio
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo

Method = Callable[..., Any]


class DebuggedRank:
    """What all debuggers of this process share."""

    def __init__(self, info: RankInfo, channel: Channel) -> None:
        self.frames = UserFrames(info)
        self.channel = channel
        self.at_prompt = False
        self.broken_into = False
        """Is the next session one that the kernel has asked for? It begins in the user's innermost frame."""
        self.debugger: Any = None
        """The one at whose prompt the rank is."""
        self.paused_at: FrameType | None = None
        """Where a graphical debugger has stopped it (_rank/debug/attached.py)."""
        self.number = info.rank

    @property
    def variables(self) -> dict[str, Any]:
        """What an expression finds at the prompt, in one namespace: a comprehension would not find the frame's own."""
        frame = self.debugger.curframe
        return {**frame.f_globals, **frame.f_locals}

    def stopped(self, frame: FrameType | None, raised: Any) -> None:
        """A session begins, at ``frame`` or, if that is None, where ``raised`` was raised: inform the kernel."""
        self.at_prompt = True
        shown = self.frames.innermost(frame) if self.broken_into and frame is not None else frame
        place, offset = _place(shown, raised), stdio.log_offset()
        self.channel.send(Stopped(self.number, time.monotonic(), place, frame is None, offset))

    def resumed(self, soon: bool) -> None:
        """Note that the debugger's prompt has ended. ``soon``: the rank makes one step or quits, so that its next event
        follows soon."""
        self.at_prompt = False
        self.channel.send(Resumed(self.number, time.monotonic(), soon))


rank: DebuggedRank
"""Of this process."""


def install(info: RankInfo, channel: Channel) -> None:
    """Adapt pdb's class. Under fork that may be IPython's InterruptiblePdb, which ipykernel puts in its place."""
    import pdb

    global rank
    rank = DebuggedRank(info, channel)
    adapt(pdb.Pdb)


class Interrupted(BaseException):
    """A KeyboardInterrupt at the prompt, under a name that neither pdb nor IPython handles."""


class RankPdb:
    """The methods; each gets, after ``self``, the original that it overrides.

    ``adapt`` puts them over the originals in pdb's own classes: so ``from pdb import Pdb``, a user's subclass, ipdb and
    IPython's debugger all have them. A subclass would be there for ``breakpoint()`` alone. A base class with
    ``super()`` cannot do it either. It would have to stand before the originals in the class that they are written in,
    and their own ``super()`` looks from that class on: it would find this one again, and never end.
    """

    nosigint = property(lambda self: True, lambda self, value: None)

    def interaction(self: Any, original: Method, frame: FrameType | None, *args: Any, **kwargs: Any) -> None:
        """A session at the prompt; IPython's ``interaction`` calls pdb's, and the kernel is informed once."""
        if rank.at_prompt:
            original(self, frame, *args, **kwargs)
            return
        rank.debugger = self
        rank.stopped(frame, args[0] if args else None)
        try:
            original(self, frame, *args, **kwargs)
        except Interrupted:
            raise KeyboardInterrupt from None
        finally:
            rank.debugger = None
            compared.forget()
            rank.resumed(soon=self.quitting or frame is None or self.stoplineno != -1)

    def cmdloop(self: Any, original: Method, intro: Any = None) -> None:
        """Read commands until the rank goes on."""
        self.completekey = None  # else readline is imported, and writes to the terminal
        try:
            original(self, intro)
        except KeyboardInterrupt:
            raise Interrupted from None
        if sys.version_info < (3, 13) and self.curframe is not None:  # what the user has assigned there
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(0))

    def set_trace(self: Any, original: Method, frame: FrameType | None = None, **kwargs: Any) -> None:
        """Stop here, not at the next line: the statements of a cell are programs of their own, and the last has
        none."""
        frame = frame or sys._getframe(2)  # beyond what adapt() puts around this
        original(self, frame, **kwargs)
        sys.settrace(None)
        self.interaction(frame, None)
        if self.quitting:
            raise bdb.BdbQuit
        if self.stoplineno != -1 or self.breaks:
            sys.settrace(self.trace_dispatch)

    def get_stack(self: Any, original: Method, *args: Any) -> Any:
        """The stack from the cell on, or from the user's function, and the index of the current frame in it."""
        stack, current = original(self, *args)
        while len(stack) > 1 and is_rank_code(stack[-1][0]):
            del stack[-1]  # an input() of the user's that raised is the user's, not our code below it
        current = min(current, len(stack) - 1)
        first = max((number + 1 for number, (frame, _) in enumerate(stack) if is_rank_code(frame)), default=0)
        files = [frame.f_code.co_filename for frame, _ in stack]
        if rank.frames.cell in files[first:]:
            first = files.index(rank.frames.cell, first)
        for frame, _ in stack:
            frame.f_trace_lines = True  # the sampler marks library frames with it (_rank/report/sampler.py)
        if rank.broken_into:
            rank.broken_into = False
            current = [frame for frame, _ in stack].index(rank.frames.innermost(stack[-1][0]))
        return stack[first:], max(0, current - first)

    def format_stack_entry(self: Any, original: Method, *args: Any, **kwargs: Any) -> str:
        """'Cell In[5]', as in tracebacks, where IPython has a temporary file's path."""
        text: str = original(self, *args, **kwargs)
        for file, name in rank.frames.names.items():
            text = text.replace(file, name)
        return text

    def stop_here(self: Any, original: Method, frame: FrameType) -> bool:
        """Neither in what runs the cell, nor in what that calls by itself."""
        return rank.frames.has(frame) and original(self, frame)

    def user_call(self: Any, original: Method, frame: FrameType, *args: Any) -> None:
        """Do not stop at the call of a cell's statement: from one statement the next step leads to the next one."""
        if not _is_statement(frame):
            original(self, frame, *args)

    def user_return(self: Any, original: Method, frame: FrameType, *args: Any) -> None:
        """Nor at its return."""
        if not _is_statement(frame):
            original(self, frame, *args)

    def do_help(self: Any, original: Method, arg: str) -> None:
        """pdb's help, and that of the commands that the notebook carries out."""
        if arg in _FOR_ALL_RANKS:
            self.message(f"{arg}: {_FOR_ALL_RANKS[arg]}")
            return
        original(self, arg)
        if not arg:
            heading = "For all ranks (type help <topic>):"
            self.message(f"{heading}\n{'=' * len(heading)}\n{'  '.join(_FOR_ALL_RANKS)}\n")

    do_h = do_help

    def do_interact(self: Any, original: Method, arg: str) -> None:
        """A console over the frame's variables. ``exit()`` leads back: a notebook has no end of file to type."""
        frame = self.curframe
        shows, sys.displayhook = sys.displayhook, self.displayhook  # a cell's values are shown when it ends
        try:
            code.interact("exit() leads back to the debugger", local={**frame.f_globals, **frame.f_locals}, exitmsg="")
        except SystemExit:
            pass
        finally:
            sys.displayhook = shows


_FOR_ALL_RANKS = {
    "ranks": "`ranks` lists where each rank is.",
    "rank": "`rank 2` switches to rank 2, if the debugger has stopped it, too.",
    "all": "`all n` gives the command n to every rank that the debugger has stopped; so does `all p loss`.",
    "diff": "`diff loss` compares the value of loss over the ranks that the debugger has stopped.",
}
"""What _session/prompts.py and _session/debugger_diff.py do, for ``help``."""

_METHODS = tuple(name for name in vars(RankPdb) if not name.startswith("_"))
_AGAIN = ("interaction", "format_stack_entry", "stop_here", "do_interact")
"""What IPython's do, they do before pdb's or in its place. Its ``set_trace`` and ``get_stack`` call pdb's first."""

_adapted: set[type] = set()
"""In this process, or in the rank that has forked it."""


def adapt(kind: type) -> None:
    """Put the methods over those of pdb's class, or of IPython's, which overrides some of them."""
    import pdb

    if kind in _adapted:
        return
    _adapted.add(kind)
    for name in _METHODS if kind is pdb.Pdb else _AGAIN:
        method = vars(RankPdb)[name]
        setattr(kind, name, method if isinstance(method, property) else _over(getattr(kind, name), method))


def _over(original: Method, method: Method) -> Method:
    @functools.wraps(method)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, original, *args, **kwargs)

    return adapted


def _is_statement(frame: FrameType) -> bool:
    """Is it a cell's own code? IPython runs each of its statements as a program."""
    module = frame.f_code.co_name.startswith(("<module>", "<cell line"))  # the latter in Colab
    return module and frame.f_code.co_filename in rank.frames.names


def _place(frame: FrameType | None, raised: Any) -> Frame:
    """The line at which the session begins: ``frame``'s, or that of the innermost frame of a traceback."""
    if frame is not None:
        return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    frames = getattr(raised, "__traceback__", raised)
    while frames.tb_next is not None:
        frames = frames.tb_next
    raised_in = frames.tb_frame.f_code
    return Frame(raised_in.co_filename, frames.tb_lineno, raised_in.co_name)
