"""The messages between the kernel and its ranks: events up, commands down, one frozen dataclass each.

A rank connects to the kernel's ``AF_UNIX`` socket in the run's private directory (_rank/program/channel.py,
_engine/run/channel.py). Every frame is one message of this file and nothing else; the large buffers of a ``Returned``
or an ``Inspected`` are in a file that is sent with it (wire.py). The first ``RunFunction`` or ``RunCell`` is a part of
the launch (launch.py). Each frame of a rank contains the number of the rank's current command: events of an earlier
command are not mistaken for this one's. Commands are pickled. Events travel as plain data, of which the kernel makes
those of the types below (plain.py): no foreign code runs where it polls the ranks. Guarantees about the order:

- per rank, events arrive in the order in which it sent them: ``Started`` first, then for each command any number of
  ``Listening``, ``DisplayData``, ``ClearOutput``, ``InputRequest``, ``Stopped``, ``Inspected``, ``Resumed``,
  ``Imported``, ``Loaded`` and ``Logged``, then exactly one of ``Returned``, ``Raised``, ``Leaving`` or ``Aborting``.
  ``Sampled`` is sent by a thread of its own, at any time after ``Started``, and may be dropped.
  ``Exited`` is the last, and comes from the engine, not from the rank.
- ``Printed`` comes from the rank's log file (_engine/run/logs.py) and ``Measured`` from its gauges, never over the
  channel. ``offset`` is the length of the log when the event was sent. The engine emits the log up to there before the
  event: this keeps the exact order of prints and displays.
- between ranks there is no guarantee, but ``time`` is CLOCK_MONOTONIC in seconds, and comparable on one host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nbspawn._accelerators.accelerator import Load
from nbspawn._protocol.collectives import Collectives
from nbspawn._protocol.edits import Reload, Version
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.payload import NOTHING, Payload
from nbspawn._protocol.plain import Buffer, often_the_same
from nbspawn._protocol.value_digests import Entries

# ---------------------------------------------------------------- events: rank -> kernel

often_the_same(Position, Load)  # of thousands of ranks most wait at the same line


class Result(NamedTuple):
    """A value on its way to the kernel (_payload/packing.py): ``data`` is its pickle, beside its large ``buffers``.
    ``repr`` is its text, made in the rank, where Stop reaches a ``__repr__`` that does not end. ``reason`` is why there
    is only the text."""

    data: Buffer = b""
    buffers: tuple[Buffer, ...] = ()
    repr: str = ""
    reason: str = ""

    def __repr__(self) -> str:
        return f"<{self.repr}>"  # not megabytes of data


@dataclass(frozen=True)
class Started:
    """The rank's process is set up, and about to run its first command. Sent once, also by kept ranks."""

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
    """``clear_output()`` in a rank: empty its earlier displays."""

    rank: int
    wait: bool
    offset: int


@dataclass(frozen=True)
class InputRequest:
    """``input()`` or ``getpass()`` in a rank, which blocks until it receives the ``InputReply`` of this ``number``."""

    rank: int
    prompt: str
    password: bool
    offset: int
    number: int = 0


@dataclass(frozen=True)
class Raised:
    """The cell or the function raised. ``rendered`` are the coloured lines that a notebook shows.

    ``line`` is the innermost line of the running cell in the traceback (1-based, as the user sees it), None for a
    plain function. ``lost_peer``: was it raised in a collective, and says that the other side does not answer?
    ``collectives`` is what the rank's recorder has, if it was raised in a collective. ``culprit`` is the variable that
    could not be loaded in the rank, if that is what was raised. After a NameError ``missing`` are the names that the
    cell uses and the rank does not have.
    """

    rank: int
    time: float
    name: str
    message: str
    traceback: str
    rendered: tuple[str, ...]
    line: int | None
    offset: int
    lost_peer: bool = False
    collectives: Collectives | None = None
    culprit: str = ""
    missing: tuple[str, ...] = ()

    @property
    def by_quit(self) -> bool:
        """Was it raised by a debugger's ``quit``? Then the user ends the run."""
        return self.name == "BdbQuit"


@dataclass(frozen=True)
class Returned:
    """The rank has finished, with this value. The user's code began at time ``ready``, after nbspawn's own
    preparations, such as making a process group. ``collectives``: the last ones of a rank that cannot be asked any
    more, as its process ends."""

    rank: int
    time: float
    value: Result
    offset: int
    ready: float = 0.0
    collectives: Collectives | None = None

    def lost(self, reason: str) -> Returned:
        """This message without its value, which cannot travel."""
        return replace(self, value=Result(repr=self.value.repr, reason=reason))


@dataclass(frozen=True)
class Leaving:
    """The rank's code called ``sys.exit`` with a code other than 0 (``text`` if that was not a number), at this line of
    the running cell."""

    rank: int
    time: float
    code: int
    text: str
    offset: int
    line: int | None = None


@dataclass(frozen=True)
class Aborting:
    """C++ code is about to abort the rank's process. ``traceback`` is the main thread's, ``line`` the innermost line of
    the running cell in it, and ``collectives`` what the rank's recorder has."""

    rank: int
    time: float
    traceback: str
    line: int | None
    offset: int
    collectives: Collectives | None = None


@dataclass(frozen=True)
class Stopped:
    """A debugger has stopped the rank's main thread at this line (``post_mortem``: the line that raised). It reads
    commands by ``InputRequest`` until ``Resumed``; a ``graphical`` one reads them from its front end."""

    rank: int
    time: float
    frame: Frame
    post_mortem: bool
    offset: int = 0
    graphical: bool = False


@dataclass(frozen=True)
class Listening:
    """A debugger can attach to the rank at this port of the loopback interface (_rank/debug/listener.py)."""

    rank: int
    port: int


@dataclass(frozen=True)
class Resumed:
    """The rank leaves the debugger's prompt. ``soon``: the next event will follow soon, because the rank makes one step
    or quits."""

    rank: int
    time: float
    soon: bool


@dataclass(frozen=True)
class Sampled:
    """The rank's position, in which it has been ``since`` that time, and the seconds ``spent`` at one position after
    another since the last such message. Sent if the position has changed, at a bounded rate, and every two seconds."""

    rank: int
    time: float
    position: Position
    since: float
    spent: tuple[tuple[Position, float], ...]


Compared = Entries | tuple[Buffer, ...] | None
"""What a rank answers to a question of a comparison (_rank/compare/compared.py): its entries, or the bytes of some."""


@dataclass(frozen=True)
class Inspected:
    """The answer to the ``Inspect`` of that number; or the expression raised ``error``, 'NameError: …'. The rank waits
    at its prompt again."""

    rank: int
    number: int
    value: Compared
    error: str = ""

    def lost(self, reason: str) -> Inspected:
        """This message without its value, which cannot travel."""
        return replace(self, value=None, error=reason)


@dataclass(frozen=True)
class Imported:
    """Installed modules that the rank has imported since the last such message. The engine records them: the fork
    server should preload them for the next ranks."""

    rank: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Logged:
    """``nbspawn.log`` in the rank: of each number, by name, the newest value, the least and the greatest since the last
    such message."""

    rank: int
    time: float
    numbers: Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Loaded:
    """Files of the user's that the rank has imported since the last such message, and in which versions. Kept ranks
    send it, at the end of a command. The engine looks whether they are edited (_engine/run/edits.py)."""

    rank: int
    files: Mapping[str, Version]


RankEvent = (
    Started
    | DisplayData
    | ClearOutput
    | InputRequest
    | Stopped
    | Resumed
    | Listening
    | Sampled
    | Inspected
    | Imported
    | Loaded
    | Logged
    | Aborting
    | Raised
    | Returned
    | Leaving
)
"""What a rank sends."""

# ---------------------------------------------------------------- events: the engine's own


@dataclass(frozen=True)
class Dropped:
    """A message of the rank could not be read, for this reason: nobody knows what it said."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Printed:
    """Text from a rank's log: complete ``lines`` (no newline) and the unfinished ``current`` line (progress bars)."""

    rank: int
    lines: tuple[str, ...]
    current: str


@dataclass(frozen=True)
class Measured:
    """From the rank's gauges (_protocol/gauges.py), about once a second, and once more when it has ended the command:
    ``time`` is the rank's last sign of life, ``cpu`` the seconds of processor time that it has used, ``memory`` its
    resident bytes, ``device_memory`` the bytes that torch has allocated on its device (-1: it uses none). The peaks are
    the most of these during the command. ``load`` is the device's."""

    rank: int
    time: float
    cpu: float
    memory: int
    peak_memory: int
    device_memory: int
    peak_device_memory: int
    load: Load = Load()


@dataclass(frozen=True)
class Stopping:
    """The engine sent this rank a signal that ends it: ``how`` is 'interrupt', 'SIGTERM' or 'SIGKILL'."""

    rank: int
    time: float
    how: str


@dataclass(frozen=True)
class Exited:
    """The rank's process has ended: ``code`` as in ``Process.exitcode`` (negative: minus the signal number), None if
    it is unknown (_engine/run/exits.py). After an abort ``text`` is what the library said, and ``line`` where the
    rank's main thread was in the cell, if that is known."""

    rank: int
    time: float
    code: int | None
    text: str = ""
    line: int | None = None


# ---------------------------------------------------------------- commands: kernel -> rank


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The fields that both commands have. ``command_number`` counts the commands of these ranks from 1. ``payload`` is
    the command's input. ``interrupts`` is the number of interrupts that had been announced to the rank when this was
    sent: later ones are meant for this command. ``debug`` stops at the first line, ``pdb`` opens the debugger in the
    frame that raised, ``show_locals`` shows its variables. ``reload`` tells which edited modules are loaded again first
    (None: none). ``argv`` is the notebook's ``sys.argv``."""

    command_number: int = 1
    payload: Payload = NOTHING
    interrupts: int = 0
    debug: bool = False
    pdb: bool = False
    show_locals: bool = False
    reload: Reload | None = None
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFunction(_Run):
    """Call ``fn(rank, *args, **kwargs)``; the payload is a dict of these three. ``names`` are IPython's names for the
    notebook's cells, by file name."""

    names: Mapping[str, str]


@dataclass(frozen=True)
class RunCell(_Run):
    """Run a notebook cell; the payload is a dict of the notebook's variables that it uses.

    ``source`` is the cell's body, with the magic's line as a leading comment: line numbers are those that the user
    sees. ``transformed`` is the source in plain Python, from IPython ('': not transformed yet). ``first_line`` is the
    magic's line as the user typed it, '' if there is none. ``filename`` and ``number`` (the execution count) are
    IPython's for the cell; 0: it is not a cell of the notebook. ``sources`` holds
    ``filename -> (execution count, source lines)`` of the notebook's other cells, for tracebacks and
    ``inspect.getsource``. The value of a ``silent`` cell is returned but not displayed. ``colors`` are IPython's, for
    tracebacks ('': none). ``aliases`` are the user's own (``%alias``), name -> command. ``directories`` are those that
    the notebook has been in, the first one first. ``flags`` are the compiler's that the notebook's cells have set.
    """

    source: str
    filename: str
    first_line: str = ""
    number: int = 0
    sources: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    colors: str = ""
    silent: bool = False
    transformed: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    flags: int = 0

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """IPython's names for the notebook's cells in tracebacks, by file name: 'Cell In[5]'. Others keep their own."""
        numbers = {name: number for name, (number, _) in self.sources.items()} | {self.filename: self.number}
        return {file: f"Cell In[{number}]" if number else file for file, number in numbers.items()}


UNGROUPED = (
    "the process group could not be created again"  # with this the rank's next command fails after Regroup has failed
)


@dataclass(frozen=True)
class Regroup:
    """Reset what the ranks share: they may have made different collective calls. ``number`` counts these commands;
    ``grouped``: make the process group of ``--backend`` again. ``store`` is the file for its FileStore, on one machine.
    All these commands use one file: a FileStore opens its file once more when it is destroyed, possibly at the end of
    the rank."""

    number: int
    grouped: bool
    store: str


@dataclass(frozen=True)
class Close:
    """There are no more commands: the kept rank exits cleanly."""


@dataclass(frozen=True)
class InputReply:
    """The answer to the ``InputRequest`` of that ``number``: ``kind`` is 'text', 'eof', 'interrupt' or 'refused'
    (``text``: the reason)."""

    kind: str
    text: str = ""
    number: int = 0


@dataclass(frozen=True)
class Inspect:
    """To a rank at a debugger's prompt, in place of the reply that it waits for: answer a question of a comparison
    (_rank/compare/compared.py). An expression is evaluated in the debugger's current frame."""

    number: int
    question: str
    arguments: tuple[Any, ...] = ()


Event = RankEvent | Dropped | Printed | Measured | Stopping | Exited
UNHURRIED = (Printed, Measured, Sampled, Imported, Logged)
"""Events that may wait for a moment, to be handled together with others."""
Command = RunFunction | RunCell | InputReply | Inspect | Regroup | Close
