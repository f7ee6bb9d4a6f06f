"""What travels between the kernel and its ranks: events up, commands down, one frozen dataclass each.

A rank connects to the kernel's ``AF_UNIX`` socket in the run's private directory (_rank/channel.py,
_engine/channel.py). Every frame is one pickled object of this file and nothing else; the large buffers of a
``Returned`` are in a file that comes with it (``encode``). ``RunFunction`` and ``RunCell`` come with the launch
(_rank/launch.py). Each frame of a rank bears the number of the command that the rank runs: what belongs to an earlier
one is not taken for this one's. The kernel loads nothing but the classes of this file and ``payload.Value``, so that no
foreign code runs where it waits for ranks. The order that is promised:

- per rank, events arrive in the order in which it sent them: ``Started`` first, then for each command any number of
  ``Listening``, ``DisplayData``, ``ClearOutput``, ``InputRequest``, ``Stopped``, ``Resumed`` and ``Imported``, then
  exactly one of
  ``Returned``, ``Raised`` or ``Leaving``.
  ``Sampled`` comes from a thread of its own, at any time after ``Started``, and may be left out.
  ``Exited`` comes last and is the engine's own word, not the rank's.
- ``Printed`` comes from the rank's log file (_engine/logs.py) and ``Measured`` from its gauges, never over the channel.
  Events that carry ``offset`` say how long the log was when they were sent: the engine hands out the log up to there
  before the event, so that prints and displays keep their order exactly.
- nothing is promised between ranks, but ``time`` is CLOCK_MONOTONIC in seconds and comparable on one host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.payload import NOTHING, Payload

# ---------------------------------------------------------------- events: rank -> kernel


@dataclass(frozen=True)
class Started:
    """The rank's process is set up and about to run its first command. Of further ones a kept rank says nothing."""

    rank: int
    pid: int
    time: float


@dataclass(frozen=True)
class DisplayData:
    """A mime bundle that the rank displayed; ``update`` replaces an earlier one with the same display id."""

    rank: int
    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    transient: Mapping[str, Any]
    update: bool
    offset: int


@dataclass(frozen=True)
class ClearOutput:
    """``clear_output()`` in a rank: earlier displays of that rank are to be emptied."""

    rank: int
    wait: bool
    offset: int


@dataclass(frozen=True)
class InputRequest:
    """``input()`` or ``getpass()`` in a rank, which now blocks until an ``InputReply`` comes."""

    rank: int
    prompt: str
    password: bool
    offset: int


@dataclass(frozen=True)
class Raised:
    """An exception left the cell or the function. ``rendered`` are the coloured lines that a notebook shows.

    ``line`` is the innermost line of the running cell in the traceback (1-based, as the person sees it), None for a
    plain function.
    """

    rank: int
    time: float
    name: str
    message: str
    traceback: str
    rendered: tuple[str, ...]
    line: int | None
    offset: int

    @property
    def by_quit(self) -> bool:
        """Is it what a debugger's ``quit`` raises? Then the person ends the run."""
        return self.name == "BdbQuit"


@dataclass(frozen=True)
class Returned:
    """The rank finished; ``value`` is a ``payload.Value`` (packed bytes, or why it could not be packed). It was
    ``ready`` to begin at that time; what it had to do before (make a process group) is not of the person's code."""

    rank: int
    time: float
    value: Any
    offset: int
    ready: float = 0.0


@dataclass(frozen=True)
class Leaving:
    """The rank's code called ``sys.exit`` with a code other than 0 (``text`` if it was not a number)."""

    rank: int
    time: float
    code: int
    text: str
    offset: int


@dataclass(frozen=True)
class Stopped:
    """A debugger has stopped the rank's main thread at this line (``post_mortem``: the one that raised). It asks for
    commands by ``InputRequest`` until ``Resumed``."""

    rank: int
    time: float
    frame: Frame
    post_mortem: bool


@dataclass(frozen=True)
class Listening:
    """A debugger can attach to the rank at this port of the loopback interface (_rank/listener.py)."""

    rank: int
    port: int


@dataclass(frozen=True)
class Resumed:
    """The rank goes on. ``soon`` it will be heard of again: it makes one step, or was told to quit."""

    rank: int
    time: float
    soon: bool


@dataclass(frozen=True)
class Sampled:
    """Where the rank is, in the same call ``since`` then; and the seconds that it has spent at each position since the
    last such message. Sent when the position has changed, at a bounded rate, and every two seconds."""

    rank: int
    time: float
    position: Position
    since: float
    spent: tuple[tuple[Position, float], ...]


@dataclass(frozen=True)
class Imported:
    """These installed modules have been imported in the rank since it told of others. The engine keeps it: the fork
    server should have them for the next ranks."""

    rank: int
    modules: tuple[str, ...]


# ---------------------------------------------------------------- events: the engine's own


@dataclass(frozen=True)
class Printed:
    """Text from a rank's log: complete ``lines`` (no newline) and the unfinished ``current`` line (progress bars)."""

    rank: int
    lines: tuple[str, ...]
    current: str


@dataclass(frozen=True)
class Measured:
    """From the rank's gauges (_protocol/gauges.py), about once a second: ``time`` is the rank's last sign of life;
    ``cpu`` the seconds of processor time that it has used, ``memory`` its resident bytes, ``device_memory`` the bytes
    that torch has allocated on its device (-1: it uses none)."""

    rank: int
    time: float
    cpu: float
    memory: int
    device_memory: int


@dataclass(frozen=True)
class Stopping:
    """The engine asked this rank to end: ``how`` is 'interrupt', 'SIGTERM' or 'SIGKILL'."""

    rank: int
    time: float
    how: str


@dataclass(frozen=True)
class Exited:
    """The rank's process has ended: ``code`` as in ``Process.exitcode`` (negative: minus the signal number), None if
    nobody could tell (_engine/exits.py)."""

    rank: int
    time: float
    code: int | None


# ---------------------------------------------------------------- commands: kernel -> rank


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What both ways to run something have. ``turn`` counts the commands of these ranks from 1. ``payload`` is what the
    command works on. ``interrupts`` is the number that had been announced to the rank when this was sent: later ones
    are meant for this command. ``debug`` stops at the first line, ``pdb`` lets the person look at the frame that
    raised, ``show_locals`` tells its variables."""

    turn: int = 1
    payload: Payload = NOTHING
    interrupts: int = 0
    debug: bool = False
    pdb: bool = False
    show_locals: bool = False


@dataclass(frozen=True)
class RunFunction(_Run):
    """Call ``fn(rank, *args, **kwargs)``, which are the payload, a dict. ``names`` are what IPython calls the
    notebook's cells, by file name."""

    names: Mapping[str, str]


@dataclass(frozen=True)
class RunCell(_Run):
    """Run a notebook cell, where the payload is the dict of the notebook's variables that come along.

    ``source`` is the cell's body with the magic's line as a leading comment, so that line numbers are the person's, and
    ``transformed`` what IPython makes of that ('' if nobody has asked it yet);
    ``first_line`` is that line as the person typed it, '' if there is none; ``filename`` and ``number`` are IPython's
    names for the cell (0: it is no cell of the notebook);
    ``sources`` holds ``filename -> (execution count, source lines)`` of the notebook's other cells, for tracebacks
    and ``inspect.getsource``. The value of a ``silent`` cell is returned but not displayed. ``colors`` are
    IPython's for tracebacks ('': none).
    """

    source: str
    filename: str
    first_line: str = ""
    number: int = 0
    sources: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    colors: str = ""
    silent: bool = False
    transformed: str = ""

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """What IPython calls the notebook's cells in tracebacks, by file name: 'Cell In[5]'. Others keep theirs."""
        numbers = {name: number for name, (number, _) in self.sources.items()} | {self.filename: self.number}
        return {file: f"Cell In[{number}]" if number else file for file, number in numbers.items()}


UNGROUPED = "the process group could not be made anew"  # by Regroup: what the rank's next command fails with


@dataclass(frozen=True)
class Regroup:
    """Ranks may have made different calls: what they share has to begin anew. ``number`` tells this time from the
    others; ``store`` is the file at which to make the process group of ``--backend`` again, '' if there is none. It is
    one file for all times: a FileStore opens its file once more when it is destroyed, at the end of the rank maybe."""

    number: int
    store: str


@dataclass(frozen=True)
class Close:
    """A kept rank has nothing more to run: it leaves in good order."""


@dataclass(frozen=True)
class InputReply:
    """The answer to an ``InputRequest``: ``kind`` is 'text', 'eof', 'interrupt' or 'refused' (``text`` says why)."""

    kind: str
    text: str = ""


Event = (
    Started
    | DisplayData
    | ClearOutput
    | InputRequest
    | Stopped
    | Resumed
    | Listening
    | Sampled
    | Imported
    | Raised
    | Returned
    | Leaving
    | Printed
    | Measured
    | Stopping
    | Exited
)
Command = RunFunction | RunCell | InputReply | Regroup | Close

# ---------------------------------------------------------------- the wire
