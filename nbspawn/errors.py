"""What can go wrong in a run, and how several failures become the one error that is raised.

SpawnError
├── UsageError            an option or an argument is invalid, or the ranks are busy
├── StartError            the ranks could not be started, or not as requested, or have ended
├── PayloadError          something that the ranks need, or a rank's value, cannot be sent between processes
├── RankRaisedError       a rank raised              (also torch.multiprocessing.ProcessRaisedException)
├── RankExitedError       a rank ended by itself     (also torch.multiprocessing.ProcessExitedException)
└── RunTimeoutError       the time of ``timeout`` ran out

An interrupt stays ``KeyboardInterrupt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from nbspawn._payload.diagnosis import SEND_MODULES, remedy_of_loading
from nbspawn._protocol.failure import Failure, signal_name
from nbspawn._state.wording import on_host, ranges

_DIFFERENT = 200  # characters of a line that differs from the first one's
_FOLLOWED = 12  # failures after the first that are described


class SpawnError(Exception):
    """Anything that nbspawn raises about a run. In a notebook it is shown as ``lines``, not as our own frames."""

    lines: tuple[str, ...] = ()

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: what the cell's error looks like."""
        return list(self.lines) or [f"{type(self).__name__}: {self}"]


class UsageError(SpawnError, ValueError):
    """An option or an argument is invalid, or the ranks are busy; nothing was started."""


class StartError(SpawnError):
    """The ranks could not be started, or not as requested, or have ended already."""


class PayloadError(SpawnError):
    """A variable of the cell, or a rank's value, cannot be sent between processes, or cannot be loaded in a rank;
    ``culprit`` is its short name."""

    def __init__(self, message: str, culprit: str = "") -> None:
        super().__init__(message)
        self.culprit = culprit


class RunTimeoutError(SpawnError, TimeoutError):
    """The run took longer than its ``timeout`` in seconds; the message says where every rank stood."""


def with_echoes(failures: Sequence[Failure], peer_ended: bool = False) -> list[Failure]:
    """The failures. Those that have lost a peer are echoes if one is known to have ended: another of these ranks, which
    has not lost one itself, or one that has not failed (``peer_ended``)."""
    known = peer_ended or not all(failure.lost_peer for failure in failures)
    return [replace(failure, is_echo=known and failure.lost_peer) for failure in failures]


def root_cause_first(failures: Sequence[Failure]) -> list[Failure]:
    """The failures by time, but those that have lost a peer behind everything else: ranks that fail later fail because
    of the first."""
    return sorted(failures, key=lambda failure: (failure.lost_peer, failure.time))


class _RankError(SpawnError):
    """What both kinds of rank errors carry beside torch's own attributes: of the rank that failed first; ``others`` are
    the failures after it."""

    rank: int
    pid: int
    node: int
    host: str
    log_path: str
    others: tuple[Failure, ...]
    summary: str
    missing: tuple[str, ...]

    def describe(
        self,
        first: Failure,
        others: tuple[Failure, ...],
        summary: str,
        context: Sequence[str],
        causes: Sequence[str],
    ) -> None:
        """Set the attributes that every version of torch lacks or names differently."""
        self.rank, self.pid, self.node, self.host = first.rank, first.pid, first.node, first.host
        self.log_path, self.others = first.log_path, others
        self.summary, self.missing = summary, first.missing
        after = [*_follow(first, others), *context]
        detail = first.rendered or tuple(first.traceback.splitlines())
        self.lines = (f"{type(self).__name__}: {self.summary}", *causes, *detail, *after)


class RankRaisedError(_RankError, ProcessRaisedException):
    """A rank raised; ``str`` ends with its traceback, as torch's does."""

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), (self.msg, self.error_index, self.pid), self.__dict__)


class RankExitedError(_RankError, ProcessExitedException):
    """A rank was killed, crashed, or left without finishing. ``exit_code`` and ``signal_name`` as in torch."""

    def __reduce__(self) -> Any:
        arguments = (self.msg, self.error_index, self.pid, self.exit_code, self.signal_name)
        return _rebuilt, (type(self), arguments, self.__dict__)


class RankTraceback(Exception):
    """The cause of a rank's error in a notebook: the rank's traceback, as text, for what shows errors by itself."""


def _rebuilt(kind: type[SpawnError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> SpawnError:
    error = kind(*arguments)
    error.__dict__.update(attributes)
    return error


def rank_error(
    failures: Sequence[Failure],
    world_size: int,
    context: Sequence[str] = (),
    peer_ended: bool = False,
    causes: Sequence[str] = (),
) -> SpawnError:
    """The error of the rank that failed first; the others follow as one line each. ``context`` are closing lines;
    ``peer_ended``: has a rank ended that has not failed? ``causes`` are sentences that explain the error."""
    first, *rest = root_cause_first(with_echoes(failures, peer_ended))
    if first.culprit:
        return _unloaded(first)
    others = tuple(rest)
    if first.host and "ModuleNotFoundError" in first.what:
        context = [f"{first.host} does not have that module. {SEND_MODULES}", *context]
    head = f"rank {first.rank} of {world_size}{on_host([first.host])}: {first.summary}"
    error: RankRaisedError | RankExitedError
    if first.exitcode is None:
        title = f"-- Process {first.rank} terminated with the following error:"
        lines = [head, *causes, *_follow(first, others), *context, "", title]
        error = RankRaisedError("\n".join(lines) + "\n" + first.traceback, first.rank, first.pid)
    else:
        lines = [head, *causes, *_follow(first, others), *context, *filter(None, [first.traceback])]
        error = RankExitedError(
            "\n".join(lines),
            first.rank,
            first.pid,
            exit_code=first.exitcode,
            signal_name=signal_name(first.exitcode) if first.exitcode < 0 else None,
        )
    error.describe(first, others, head, context, causes)
    return error


def _unloaded(first: Failure) -> PayloadError:
    """Where the rank's own code has raised it, with the frames of that."""
    what = first.what.partition(": ")[2]
    where = f" (rank {first.rank}{on_host([first.host])})" if first.host else ""
    text = f"{what}{where}. {remedy_of_loading(what, elsewhere=bool(first.host))}"
    error = PayloadError(text, first.culprit)
    error.lines = (*first.traceback.splitlines()[:-1], f"PayloadError: {text}")
    return error


def _follow(first: Failure, others: Sequence[Failure]) -> list[str]:
    """A line for each thing that went wrong after the first, with the ranks that it happened to."""
    same: dict[tuple[str, str, str], list[Failure]] = {}
    for other in others:
        unsure = abs(other.time - first.time) < first.time_error + other.time_error and other.node != first.node
        when = ", at the same time as far as their clocks tell" if unsure and not other.is_echo else ""
        same.setdefault((when, other.summary, "" if other.is_echo else other.message), []).append(other)
    lines = []
    for (when, summary, message), failures in list(same.items())[:_FOLLOWED]:
        on = on_host(failure.host for failure in failures)
        who = f"rank{'s' if len(failures) > 1 else ''} {ranges(failure.rank for failure in failures)}{on}"
        if summary == first.summary:
            known = set(first.message.splitlines())
            own = (line.strip() for line in message.splitlines() if line not in known and "0x" not in line)
            differs = next(own, "")
            summary = f"the same, but: {differs[:_DIFFERENT]}" if differs else "the same"
        lines.append(f"also {who}{when}: {summary}")
    rest = sum(len(failures) for failures in list(same.values())[_FOLLOWED:])
    return [*lines, f"also {rest} more ranks, in other ways: the error's `others` lists all"] if rest else lines


def interrupt_error(stood: Sequence[str], what: str = "the ranks were stopped") -> KeyboardInterrupt:
    """The user's own interrupt, which in a notebook says where the ranks were instead of where our loop was."""
    error = KeyboardInterrupt(" ".join(stood))
    lines = [f"KeyboardInterrupt: {what}.", *stood]
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error
