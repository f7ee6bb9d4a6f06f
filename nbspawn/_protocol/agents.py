"""The messages between the kernel and the agents: the process on each node of a run over several machines.

An agent runs the ranks of its node by the local engine, which numbers them from 0; what it reports has the run's
numbers, and moments on the kernel's clock (_agent/translation.py). Three TCP connections lead from each agent to the
kernel (connection.py). Over *control* goes one message of this file a frame: pickled to the agent, and as plain data to
the kernel (plain.py), where no code of another machine is run. Over *bulk* go the bytes of large buffers, in transfers
that control announces (transfers.py): neither waits for the other. Over *life* goes nothing: it ends with either
machine, or with the link between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbspawn._protocol import questions
from nbspawn._protocol.failure import Failure
from nbspawn._protocol.frames import Frame, Stack
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.messages import Event, RunCell, RunFunction
from nbspawn._protocol.place import Place
from nbspawn._protocol.settings import Settings


@dataclass(frozen=True)
class Transfer:
    """Buffers of these ``sizes`` in bytes come over bulk, laid out as in shared_memory.py. ``number`` counts the
    transfers in one direction."""

    number: int
    sizes: tuple[int, ...]


# ---------------------------------------------------------------- kernel -> agent


@dataclass(frozen=True)
class Begin:
    """Start ranks with this first ``command``, whose payload is the ``transfer``. ``options`` are LaunchOptions, for
    this node alone."""

    place: Place
    options: Any
    notebook: Settings
    command: RunCell | RunFunction
    transfer: Transfer


@dataclass(frozen=True)
class RunNext:
    """Have kept ranks of this node run a further command each; the payload of all is the ``transfer``, if there is
    one."""

    commands: Mapping[int, RunCell | RunFunction]
    transfer: Transfer | None


@dataclass(frozen=True)
class Call:
    """Call a method of the local engine, or of the agent, one of CALLS; the answer has the same ``number``, if that is
    not 0."""

    method: str
    arguments: tuple[Any, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class ClockTold:
    """The answer to a ``ClockAsked`` of that time: the kernel's CLOCK_MONOTONIC."""

    asked: float
    kernel: float


@dataclass(frozen=True)
class Folder:
    """One with modules of the user's: ``places`` where it may be on a host ('~' is the home directory there), and the
    SHA-256 ``digests`` of its files by their paths in it. Or one with packages, which is for hosts that have no module
    named ``without``."""

    places: tuple[str, ...]
    digests: Mapping[str, bytes]
    without: str = ""


@dataclass(frozen=True)
class Unwanted:
    """Nobody waits for the transfers up to this ``number`` any more."""

    number: int


LOG_PART = 1 << 20
"""Bytes of a log in one answer."""
CALLS: Mapping[str, Any] = {
    "send": None,
    "stop_at": None,
    "break_into": None,
    "dismiss": None,
    "dispose": bool | None,
    "log_part": bytes | None,
    "serve_store": tuple[str, int],
    "look": dict[int, Stack] | None,
    "ask": dict[int, questions.Answer] | None,
    "stood": dict[int, tuple[Frame, ...]] | None,
    "usage": list[Reading] | None,
    "losses": list[str] | None,
    "regroup": bool | None,
    "listen": tuple[str, int],
    "reach": list[str],
    "backend": str | None,
    "use_folders": list[bool] | str,
    "write_files": str,
}
"""What the methods return; None where there are no ranks."""


# ---------------------------------------------------------------- agent -> kernel


@dataclass(frozen=True)
class Hello:
    """The agent's first message: what must be the same on all nodes, and what the kernel has to know of this one."""

    host: str
    address: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class ClockAsked:
    """What time is it? ``time`` is the agent's own CLOCK_MONOTONIC."""

    time: float


@dataclass(frozen=True)
class Status:
    """What the local engine says of itself (_engine/base.py). ``command_number`` is that of its last command."""

    command_number: int
    all_exited: bool
    finished: bool
    all_alive: bool
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Begun:
    """The ranks have been started."""

    pids: tuple[int, ...]
    log_dir: str
    log_paths: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """The ranks have not begun, and why."""

    reason: str


@dataclass(frozen=True)
class Reported:
    """What has happened on the node since the last such message."""

    events: tuple[Event, ...]
    status: Status


@dataclass(frozen=True)
class WithBuffers:
    """An event, whose parts are pickled as ``body``, and whose large buffers are the ``transfer``."""

    transfer: Transfer
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What the method of a ``Call`` has returned: the pickled parts of a value of its type (CALLS)."""

    number: int
    value: bytes


FromAgent = Hello | ClockAsked | Begun | Refused | Reported | WithBuffers | Answer
